// Read access to the page's data: summary rows by key, per-token columns decoded when first asked for.
const page = readJson("page-data");
let heavy = null;
const tokensData = () => (heavy ??= readJson("token-data"));

const PROTOCOL_NAMES = { held_out: "held out", leave_one_out: "leave one out", in_sample: "in sample" };
const protocolName = (p) => PROTOCOL_NAMES[page.protocols[p]] || page.protocols[p];
const layerName = (l) => `${l}→${l + 1}`;
const seriesLabel = (s) => page.series[s].label;
const activeSeries = () => page.series.map((_, s) => s).filter((s) => state.active.has(s));

const rowAt = new Map();
page.summary.layer.forEach((layer, i) => rowAt.set(`${page.summary.protocol[i]}.${page.summary.series[i]}.${layer}`, i));

function summaryValue(column, protocol, series, layer) {
  const values = page.summary.columns[column];
  const row = rowAt.get(`${protocol}.${series}.${layer}`);
  return values && row !== undefined ? values[row] : null;
}

// A comparison holds series of models of different depth: each has its own layers, placed on one axis.
const tone = (s) => (page.series[s].tone ?? s) % 10;
const layersOf = (s) => page.series[s].layers || page.layers;
const depthOf = (layer, count) => (page.normalised ? (layer + 0.5) / count : layer);
const depthsOf = (s) => layersOf(s).map((l) => depthOf(l, page.series[s].count));
const cursorDepth = () => depthOf(state.layer, page.modelLayers);
function layerNear(s, depth) {
  const depths = depthsOf(s);
  let best = 0;
  depths.forEach((d, i) => { if (Math.abs(d - depth) < Math.abs(depths[best] - depth)) best = i; });
  return layersOf(s)[best];
}

const summaryProfile = (column, protocol, series) => layersOf(series).map((layer) => summaryValue(column, protocol, series, layer));

const columnCache = new Map();
function tokenColumn(measure, protocol, series, layer) {
  const key = `${measure}.${protocol}.${series}.${layer}`;
  if (columnCache.has(key)) return columnCache.get(key);
  let values = null;
  if (measure === "kl_over_random") {
    const top = tokenColumn("kl_single", protocol, series, layer);
    const bottom = tokenColumn("kl_single_random", protocol, series, layer);
    if (top && bottom) values = top.map((v, i) => (bottom[i] > 0 ? v / bottom[i] : NaN));
  } else {
    const column = tokensData().columns[measure];
    const text = column && column.data[`${protocol}.${series}`] && column.data[`${protocol}.${series}`][layer];
    if (text !== undefined && text !== null) values = decode(text, column);
  }
  columnCache.set(key, values);
  return values;
}

const tokenMeasure = (name) => page.tokenMeasures.find((m) => m.name === name);

function availableMeasures(protocol, series) {
  return page.tokenMeasures.filter((m) => page.layers.some((l) => tokenColumn(m.name, protocol, series, l)));
}

function measureRange(measure, protocol, series, layers) {
  const log = tokenMeasure(measure).scale === "log";
  const excluded = tokensData().text.excluded;
  const kept = [];
  for (const layer of layers) {
    const values = tokenColumn(measure, protocol, series, layer);
    if (!values) continue;
    const stride = layers.length > 8 ? 3 : 1;
    for (let i = 0; i < values.length; i += stride) if (!excluded[i] && finite(values[i]) && (!log || values[i] > 0)) kept.push(values[i]);
  }
  if (!kept.length) return null;
  return [quantile(kept, 0.02), quantile(kept, 0.98)];
}

const pythonSummary = (columns) => {
  const names = ["layer", "map", "fit", "protocol", ...columns].map(quotePython).join(", ");
  if (!page.folders) return `${pythonOpen()}.summary()[[${names}]]`;
  return `pd.concat([dl.open(f).summary().assign(run=f) for f in [${page.folders.map(quotePython).join(", ")}]])[["run", ${names}]]`;
};
const pythonOpen = () => `dl.open(${quotePython(page.folder)})`;
