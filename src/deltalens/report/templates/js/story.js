// One token's story: its values at this layer, its profile over depth, its nearest neighbours in the pool.
function storyProfile(slot) {
  const series = activeSeries();
  const log = isLog(state.measure);
  const lines = series.map((s) => ({ s, values: page.layers.map((l) => { const v = tokenColumn(state.measure, state.protocol, s, l); return v ? v[slot] : NaN; }) }));
  const medians = page.layers.map((l) => summaryValue(state.measure, state.protocol, state.series, l));
  const all = [...lines.flatMap((l) => l.values), ...medians].filter((v) => finite(v) && (!log || v > 0));
  const root = svg("svg", { class: "plot", role: "img" }, svg("title", {}, `${tokenMeasure(state.measure).title} of this token over depth`));
  const width = Math.max(document.getElementById("story").clientWidth - 32, 220);
  const box = { left: 44, right: width - 10, top: 10, bottom: 130 };
  root.setAttribute("viewBox", `0 0 ${width} 156`);
  root.setAttribute("height", 156);
  if (!all.length) return el("p", { class: "empty" }, "not measured for this token");
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const y = makeScale(low, high, box.bottom, box.top, log);
  const x = makeScale(page.layers[0], page.layers.at(-1) || 1, box.left + 4, box.right - 4, false);
  axisY(root, y, box.left, box.right, 4, unitOf(state.measure));
  for (const l of xTicks(page.layers, box.right - box.left)) root.append(svg("text", { class: "tick", x: x(l), y: box.bottom + 16, "text-anchor": "middle" }, String(l)));
  root.append(svg("line", { class: "cursor", x1: x(state.layer), x2: x(state.layer), y1: box.top, y2: box.bottom }));
  const xs = page.layers.map(x);
  root.append(svg("path", { class: "median", d: linePath(xs, medians.map((v) => (finite(v) && (!log || v > 0) ? y(v) : NaN))) }));
  for (const { s, values } of lines) {
    const ys = values.map((v) => (finite(v) && (!log || v > 0) ? y(v) : NaN));
    root.append(svg("path", { class: "line", d: linePath(xs, ys), stroke: `var(--s${tone(s)})`, "stroke-dasharray": DASHES[tone(s)] }));
    const k = page.layers.indexOf(state.layer);
    if (finite(ys[k])) root.append(mark(s, xs[k], ys[k], 3.6));
  }
  root.addEventListener("click", (event) => setState({ layer: nearestLayer(x, event.clientX - root.getBoundingClientRect().left) }));
  return root;
}

function valueCell(measure, value) {
  const floor = { kl_single: page.noiseFloor.single, kl_all: page.noiseFloor.all }[measure.name];
  const below = finite(floor) && finite(value) && value <= floor;
  return el("td", { class: below ? "below" : null, title: below ? "not above the noise floor" : null }, format(value, measure.unit === "nats" ? "" : measure.unit));
}

function storyValues(slot) {
  const series = activeSeries();
  const measures = availableMeasures(state.protocol, state.series);
  const rows = measures.map((m) => el("tr", { class: m.name === state.measure ? "here" : "" }, el("th", { scope: "row", title: m.definition }, m.title),
    ...series.map((s) => { const v = tokenColumn(m.name, state.protocol, s, state.layer); return valueCell(m, v ? v[slot] : NaN); })));
  const head = el("tr", {}, el("td"), ...series.map((s) => el("th", { scope: "col", title: seriesLabel(s) }, swatch(s))));
  return el("div", { class: "scroll" }, el("table", { class: "values" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function poolContext(pool, at) {
  const words = [];
  for (let i = at - 7; i <= at + 5; i++) {
    if (i < 0 || i >= pool.token.length || pool.window[i] !== pool.window[at]) continue;
    const nodes = visible(pool.token[i], { running: false }).map((n) => (n.className === "space" ? document.createTextNode(" ") : n));
    words.push(i === at ? el("mark", {}, ...nodes) : el("span", {}, ...nodes));
  }
  return el("bdi", { class: "context" }, ...words);
}

function storyNeighbors(slot) {
  const data = tokensData().neighbors;
  if (!data) return el("p", { class: "empty" }, "The run kept no neighbours.");
  const packed = data.index[state.layer];
  if (!packed) return el("p", { class: "empty" }, "No neighbours were kept at this layer.");
  const from = slot * data.ranks;
  const index = unpack(packed.slice(from * data.digits, (from + data.ranks) * data.digits), data.digits);
  const distance = decode(data.distance.data[state.layer].slice(from * 2, (from + data.ranks) * 2), data.distance);
  const items = [...index].map((code, r) => {
    if (code === 0) return null;
    const at = code - 1;
    const place = `window ${data.pool.window[at]}, position ${data.pool.position[at]}`;
    return el("li", { title: place }, el("span", { class: "distance" }, finite(distance[r]) ? format(distance[r]) : ""), data.pool.token ? poolContext(data.pool, at) : el("span", {}, place));
  }).filter(Boolean);
  return items.length ? el("ol", { class: "neighbors" }, ...items) : el("p", { class: "empty" }, "An excluded token has no neighbours.");
}

function drawStory() {
  const text = tokensData().text;
  const slot = state.slot;
  const node = document.getElementById("story");
  if (slot === null || slot === undefined) return;
  const where = [`position ${text.position[slot]}`, text.tokenId ? `id ${text.tokenId[slot]}` : "", text.nll && finite(text.nll[slot]) ? `loss of the next token ${format(text.nll[slot])} nats` : ""].filter(Boolean).join(" · ");
  const excluded = text.excluded[slot] ? el("p", { class: "notice" }, `Excluded from every statistic: ${text.reasons[text.reason[slot]] || "by rule"}.`) : null;
  const pool = tokensData().neighbors ? ` (${protocolName(tokensData().neighbors.protocol)} pool)` : "";
  node.replaceChildren(...[
    el("div", { class: "story-token" }, el("bdi", {}, ...visible(text.token[slot], { running: false }))),
    el("p", { class: "muted" }, where), excluded,
    el("h4", {}, tokenMeasure(state.measure).title, " over depth ", el("span", { class: "muted" }, "grey: median token")), storyProfile(slot),
    el("h4", {}, `At layer ${layerName(state.layer)}`), storyValues(slot),
    el("h4", {}, "Nearest in the pool ", el("span", { class: "muted" }, `distance of inputs${pool}`)), storyNeighbors(slot)].filter(Boolean));
}
