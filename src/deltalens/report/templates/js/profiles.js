// Depth profiles: one card per measure, one panel per protocol on a shared vertical axis.
const PANEL = { top: 22, bottom: 26, left: 44, gap: 22 };

function profileExtent(measure, series) {
  const values = [];
  for (const suffix of ["", "_lo", "_hi", "_null", "_chance"])
    for (let p = 0; p < page.protocols.length; p++)
      for (const s of series) values.push(...summaryProfile(measure.name + suffix, p, s).filter(finite));
  if (finite(measure.reference)) values.push(measure.reference);
  const kept = measure.scale === "log" ? values.filter((v) => v > 0) : values;
  if (!kept.length) return null;
  let [low, high] = [Math.min(...kept), Math.max(...kept)];
  if (measure.scale === "log") {
    if (high / low < 1.5) [low, high] = [low / 1.25, high * 1.25];
    return [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  }
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  [low, high] = [low - pad, high + pad];
  if (measure.domain) [low, high] = [Math.max(low, measure.domain[0] - pad * 0.5), Math.min(high, measure.domain[1] + pad * 0.5)];
  return [low, high];
}

function linePath(xs, ys) {
  let out = "";
  let pen = false;
  xs.forEach((x, i) => {
    if (!finite(ys[i])) { pen = false; return; }
    out += `${pen ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    pen = true;
  });
  return out;
}

function bandPath(xs, lows, highs) {
  let out = "";
  for (let i = 0; i < xs.length; ) {
    if (!finite(lows[i]) || !finite(highs[i])) { i++; continue; }
    let j = i;
    while (j < xs.length && finite(lows[j]) && finite(highs[j])) j++;
    const upper = [];
    const lower = [];
    for (let k = i; k < j; k++) { upper.push(`${xs[k].toFixed(1)} ${highs[k].toFixed(1)}`); lower.unshift(`${xs[k].toFixed(1)} ${lows[k].toFixed(1)}`); }
    out += `M${upper.join("L")}L${lower.join("L")}Z`;
    i = j;
  }
  return out;
}

function spreadLabels(labels, low, high, gap = 13) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + gap);
  const over = labels.length ? labels.at(-1).y - high : 0;
  if (over > 0) for (let i = labels.length - 1; i >= 0; i--) labels[i].y = Math.min(labels[i].y - (i === labels.length - 1 ? over : 0), i < labels.length - 1 ? labels[i + 1].y - gap : Infinity);
  for (const label of labels) label.y = Math.max(label.y, low);
  return labels;
}

const xTicks = (layers, width) => {
  const count = Math.max(2, Math.floor(width / 46));
  if (layers.length <= count) return layers;
  const step = [1, 2, 3, 5, 10, 20, 50].find((s) => (layers.at(-1) - layers[0]) / s <= count) || 100;
  return layers.filter((l) => l % step === 0);
};

function axisY(group, y, left, right, count, unit) {
  for (const v of y.ticks(count)) {
    const at = y(v);
    group.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
      svg("text", { class: "tick", x: left - 7, y: at + 3.5, "text-anchor": "end" }, tickLabel(v) + (unit === "°" ? "°" : "")));
  }
}

// With one layer a band has no width and a line no length: a bar and two short strokes stand for them.
function drawLone(group, x, stroke, low, high, nulls, chance) {
  if (finite(low) && finite(high)) group.append(svg("line", { x1: x, x2: x, y1: low, y2: high, stroke, "stroke-width": 2, opacity: 0.55 }));
  if (finite(nulls)) group.append(svg("line", { class: "null", x1: x - 34, x2: x + 34, y1: nulls, y2: nulls, stroke }));
  if (finite(chance)) group.append(svg("line", { class: "chance", x1: x - 34, x2: x + 34, y1: chance, y2: chance, stroke }));
}

function drawSeries(group, measure, p, s, x, y, box, index) {
  const xs = depthsOf(s).map(x);
  const dense = xs.length > 14;
  const at = (suffix) => summaryProfile(measure.name + suffix, p, s).map((v) => (finite(v) ? y(v) : NaN));
  const stroke = `var(--s${tone(s)})`;
  const middle = at("");
  const inside = (ys) => ys.map((v) => (finite(v) ? clamp(v, box.top, box.bottom) : NaN));
  group.append(svg("path", { class: "band", d: bandPath(xs, inside(at("_lo")), inside(at("_hi"))), fill: stroke }));
  const nulls = at("_null");
  if (nulls.some(finite)) group.append(svg("path", { class: "null", d: linePath(xs, nulls), stroke }));
  const chance = at("_chance");
  if (chance.some(finite)) group.append(svg("path", { class: "chance", d: linePath(xs, chance), stroke }));
  group.append(svg("path", { class: "line", d: linePath(xs, middle), stroke, "stroke-dasharray": DASHES[tone(s)] }));
  if (xs.length === 1) drawLone(group, xs[0], stroke, inside(at("_lo"))[0], inside(at("_hi"))[0], nulls[0], chance[0]);
  xs.forEach((x, i) => {
    const alone = finite(middle[i]) && !finite(middle[i - 1]) && !finite(middle[i + 1]);
    if (finite(middle[i]) && (!dense || alone || i % 4 === index % 4)) group.append(mark(s, x, middle[i], 2.9));
  });
  return middle;
}

function referenceNames(group, measure, p, series, y, box) {
  let used = null;
  for (const [suffix, name] of [["_null", "null"], ["_chance", "chance"]]) {
    const s = series.find((one) => summaryProfile(measure.name + suffix, p, one).some(finite));
    if (s === undefined) continue;
    const values = summaryProfile(measure.name + suffix, p, s);
    const i = values.findIndex(finite);
    const at = clamp(y(values[i]) - 4, box.top + 9, box.bottom - 3);
    const crowded = used !== null && Math.abs(at - used) < 11;
    used = crowded ? used : at;
    group.append(svg("text", { class: "ref-name", x: box.left + (crowded ? 48 : 4), y: at }, name));
  }
}

const measuredUnder = (measure, p, series) => series.some((s) => summaryProfile(measure.name, p, s).some(finite));

function drawPanel(group, measure, p, series, box, y, x) {
  if (!measuredUnder(measure, p, series)) {
    group.append(svg("text", { class: "panel-name", x: box.left, y: box.top - 9 }, protocolName(p)),
      svg("text", { class: "empty", x: box.left, y: box.bottom }, "not measured"));
    return [];
  }
  axisY(group, y, box.left, box.right, 4, measure.unit);
  group.append(svg("text", { class: "panel-name", x: box.left, y: box.top - 9 }, protocolName(p)));
  const ticks = page.normalised ? [0, 0.25, 0.5, 0.75, 1] : xTicks(page.layers, box.right - box.left);
  for (const t of ticks) group.append(svg("text", { class: "tick", x: x(t), y: box.bottom + 16, "text-anchor": "middle" }, page.normalised ? `${t * 100}%` : String(t)));
  if (finite(measure.reference)) group.append(svg("line", { class: "reference", x1: box.left, x2: box.right, y1: y(measure.reference), y2: y(measure.reference) }));
  group.append(svg("line", { class: "cursor", x1: x(cursorDepth()), x2: x(cursorDepth()), y1: box.top, y2: box.bottom }));
  const ends = series.map((s, i) => ({ s, middle: drawSeries(group, measure, p, s, x, y, box, i) }));
  referenceNames(group, measure, p, series, y, box);
  return ends;
}

function panelBoxes(width, count, labels) {
  const right = labels ? 92 : 8;
  const stacked = width < 430;
  const height = stacked ? 132 : 168;
  const inner = stacked ? width - PANEL.left - right : (width - PANEL.left * count - PANEL.gap * (count - 1) - right) / count;
  const boxes = Array.from({ length: count }, (_, p) => {
    const left = stacked ? PANEL.left : PANEL.left + p * (inner + PANEL.left + PANEL.gap);
    const top = PANEL.top + (stacked ? p * (height + PANEL.bottom + PANEL.top) : 0);
    return { left, right: left + inner, top, bottom: top + height };
  });
  return { boxes, height: boxes.at(-1).bottom + PANEL.bottom };
}

function drawProfile(card) {
  const { measure, root } = card;
  const series = activeSeries();
  const width = root.clientWidth || 600;
  const { boxes, height } = panelBoxes(width, page.protocols.length, width >= 520);
  const extent = profileExtent(measure, series);
  root.setAttribute("height", height);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.replaceChildren(svg("title", {}, `${measure.title}: ${measure.definition}, by layer`));
  if (!extent) {
    root.append(svg("text", { class: "empty", x: width / 2, y: 90, "text-anchor": "middle" }, series.length ? "not measured for these maps" : "no map is switched on"));
    card.boxes = [];
    return;
  }
  card.boxes = boxes;
  const [first, last] = page.normalised ? [0, 1] : [page.layers[0], page.layers.at(-1)];
  const span = last - first;
  card.x = boxes.map((b) => makeScale(first, last || 1, span ? b.left + 4 : (b.left + b.right) / 2, span ? b.right - 4 : (b.left + b.right) / 2 + 1, false));
  boxes.forEach((box, p) => {
    const y = makeScale(extent[0], extent[1], box.bottom, box.top, measure.scale === "log");
    const ends = drawPanel(root, measure, p, series, box, y, card.x[p]);
    const later = boxes.some((_, q) => q > p && measuredUnder(measure, q, series));
    if (width >= 520 && !later && ends.length) {
      const labels = ends.map(({ s, middle }) => ({ s, y: middle.findLast(finite) })).filter((l) => finite(l.y));
      for (const l of spreadLabels(labels, box.top + 4, box.bottom))
        root.append(svg("text", { class: "direct", x: box.right + 10, y: l.y + 3.5, style: `fill: var(--s${tone(l.s)}-ink)` }, seriesLabel(l.s)));
    }
  });
}

function profileTip(card, p, layer) {
  const { measure } = card;
  const depth = depthOf(layer, page.modelLayers);
  const rows = activeSeries().map((s) => {
    const own = layerNear(s, depth);
    const value = (suffix) => summaryValue(measure.name + suffix, p, s, own);
    const interval = finite(value("_lo")) ? `[${format(value("_lo"))}, ${format(value("_hi"))}]` : "";
    const extra = [["null", "_null"], ["chance", "_chance"]].filter(([, x]) => finite(value(x))).map(([n, x]) => `${n} ${format(value(x))}`);
    if (page.normalised) extra.unshift(`layer ${layerName(own)}`);
    return [s, format(value(""), measure.unit), interval, extra.join(", ")];
  });
  const kind = page.blockKinds[layer] ? ` · ${page.blockKinds[layer]}` : "";
  const where = page.normalised ? `Depth ${Math.round(depth * 100)}%` : `Layer ${layerName(layer)}${kind}`;
  return tipTable(`${where} · ${protocolName(p)}`, rows);
}

function nearestLayer(scale, at) {
  const gap = (l) => Math.abs(scale(depthOf(l, page.modelLayers)) - at);
  return page.layers.reduce((best, l) => (gap(l) < gap(best) ? l : best), page.layers[0]);
}

function locate(card, event) {
  const rect = card.root.getBoundingClientRect();
  const [x, y] = [event.clientX - rect.left, event.clientY - rect.top];
  const p = card.boxes.findIndex((b) => x >= b.left - 12 && x <= b.right + 12 && y >= b.top - 18 && y <= b.bottom + 22);
  return p < 0 ? null : { p, layer: nearestLayer(card.x[p], x) };
}

function profileKeys(card, event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  event.preventDefault();
  const i = page.layers.indexOf(state.layer);
  const layer = page.layers[clamp(i + move, 0, page.layers.length - 1)];
  setState({ layer });
  const rect = card.root.getBoundingClientRect();
  showTip(profileTip(card, page.judged, layer), rect.left + rect.width / 2, rect.top + rect.height / 2);
}

function profileRows(measure) {
  const head = [...(page.series[0].run ? ["run"] : []), "layer", "map", "fit", "protocol", ...["", "_lo", "_hi", "_null", "_chance"].map((x) => measure.name + x).filter((c) => page.summary.columns[c])];
  const rows = page.summary.layer.map((layer, i) => {
    const s = page.series[page.summary.series[i]];
    return [...(s.run ? [s.run] : []), layer, s.map, s.fit, page.protocols[page.summary.protocol[i]], ...head.slice(s.run ? 5 : 4).map((c) => page.summary.columns[c][i])];
  });
  return [head, ...rows];
}

function profileCard(measure) {
  const root = svg("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": `${measure.title} by layer. Arrow keys move the layer.` });
  const python = pythonSummary([measure.name]);
  const card = { measure, root, boxes: [] };
  card.node = el("article", { class: "card", "data-measure": measure.name },
    el("header", {}, el("h3", {}, measure.title), el("span", { class: "actions" },
      el("button", { type: "button", class: "quiet", title: "Copy this figure's numbers as CSV", onclick: (e) => copyText(csv(profileRows(measure)), e.target) }, "CSV"),
      el("button", { type: "button", class: "quiet", title: python, onclick: (e) => copyText(python, e.target) }, "Python"))),
    el("p", { class: "definition" }, measure.definition, measure.unit ? ` (${measure.unit})` : ""), root);
  root.addEventListener("pointermove", (event) => {
    const hit = locate(card, event);
    if (hit) showTip(profileTip(card, hit.p, hit.layer), event.clientX, event.clientY);
    else hideTip();
  });
  root.addEventListener("pointerleave", hideTip);
  root.addEventListener("blur", hideTip);
  root.addEventListener("click", (event) => { const hit = locate(card, event); if (hit) setState({ layer: hit.layer }); });
  root.addEventListener("keydown", (event) => profileKeys(card, event));
  return card;
}

function startProfiles() {
  const main = page.measures.filter((m) => m.group === "main").map(profileCard);
  const more = page.measures.filter((m) => m.group !== "main").map(profileCard);
  document.getElementById("profiles").append(...main.map((c) => c.node));
  const details = document.getElementById("more-profiles");
  details.hidden = !more.length;
  details.querySelector("summary").textContent = `All other measures (${more.length})`;
  details.querySelector(".cards").append(...more.map((c) => c.node));
  const draw = () => { main.forEach(drawProfile); if (details.open) more.forEach(drawProfile); };
  details.addEventListener("toggle", draw);
  onChange(["active", "layer", "width"], draw);
}
