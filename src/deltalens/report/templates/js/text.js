// The text itself: tokens coloured by a measure, a map of depth above them, one token's story beside them.
const PAGE_TOKENS = 256;
const view = { windows: [], pages: [], spans: [], slots: [], range: null };

// Short windows are shown several to a page, so that a page is always worth reading.
function layPages() {
  const { window: ids } = tokensData().text;
  const slots = new Map();
  ids.forEach((w, i) => { if (!slots.has(w)) slots.set(w, []); slots.get(w).push(i); });
  view.windows = [...slots.keys()];
  for (const w of view.windows) {
    const last = view.pages.at(-1);
    if (last && last.count + slots.get(w).length <= PAGE_TOKENS) { last.windows.push(w); last.count += slots.get(w).length; }
    else view.pages.push({ windows: [w], count: slots.get(w).length });
  }
  for (const p of view.pages) p.slots = p.windows.map((w) => slots.get(w));
}

const unitOf = (name) => tokenMeasure(name).unit;
const isLog = (name) => tokenMeasure(name).scale === "log";

function shade(value, range, log) {
  if (!finite(value) || !range || (log && value < 0)) return null;
  const [low, high] = log ? range.map(Math.log) : range;
  const at = log ? (value > 0 ? Math.log(value) : low) : value;
  return clamp((at - low) / (high - low || 1), 0, 1);
}

function buildTokens() {
  const text = tokensData().text;
  const shown = view.pages[state.window];
  view.slots = shown.slots.flat();
  view.spans = view.slots.map((slot, i) => el("span", { class: text.excluded[slot] ? "token excluded" : "token", role: "button", tabindex: "-1", "data-slot": slot, "data-index": i }, ...visible(text.token[slot], { running: true })));
  if (view.spans.length) view.spans[0].tabIndex = 0;
  const label = (w, slot) => el("span", { class: "window-label", dir: "ltr" }, `window ${w}`, text.document ? ` · ${text.document[slot]}` : "");
  let next = 0;
  document.getElementById("tokens").replaceChildren(...shown.slots.map((slots, k) => {
    const spans = view.spans.slice(next, (next += slots.length));
    return el("div", { class: "window" }, label(shown.windows[k], slots[0]), ...spans);
  }));
  const [first, last] = [shown.windows[0], shown.windows.at(-1)].map((w) => view.windows.indexOf(w) + 1);
  document.getElementById("window-name").textContent = `${first === last ? `Window ${first}` : `Windows ${first}–${last}`} of ${view.windows.length}`;
  document.getElementById("window-previous").disabled = state.window === 0;
  document.getElementById("window-next").disabled = state.window === view.pages.length - 1;
}

function paintTokens() {
  const { measure, protocol, series, layer } = state;
  const values = tokenColumn(measure, protocol, series, layer);
  const log = isLog(measure);
  view.range = measureRange(measure, protocol, series, state.scaleAll ? page.layers : [layer]);
  view.spans.forEach((span, i) => {
    const slot = view.slots[i];
    const t = values && !tokensData().text.excluded[slot] ? shade(values[slot], view.range, log) : null;
    span.style.background = t === null ? "" : rgb(ramp(t));
    span.style.color = t === null ? "" : inkOn(ramp(t));
    span.dataset.value = values && finite(values[slot]) ? values[slot].toPrecision(6) : "";
    span.classList.toggle("unmeasured", t === null);
    span.classList.toggle("chosen", slot === state.slot);
    span.setAttribute("aria-pressed", String(slot === state.slot));
  });
  drawLegend();
}

function drawLegend() {
  const node = document.getElementById("legend");
  const steps = Array.from({ length: 24 }, (_, i) => rgb(ramp(i / 23)));
  const range = view.range;
  node.replaceChildren(
    el("span", { class: "legend-end" }, range ? format(range[0], unitOf(state.measure)) : "–"),
    el("span", { class: "legend-bar", style: { background: `linear-gradient(90deg, ${steps.join(",")})` } }),
    el("span", { class: "legend-end" }, range ? format(range[1], unitOf(state.measure)) : "not measured"));
}

function paintHeat() {
  const canvas = document.getElementById("heat");
  const [columns, rows] = [view.slots.length, page.layers.length];
  const { measure, protocol, series } = state;
  const range = measureRange(measure, protocol, series, page.layers);
  const log = isLog(measure);
  canvas.width = Math.max(columns, 1);
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, rows);
  page.layers.forEach((layer, k) => {
    const values = tokenColumn(measure, protocol, series, layer);
    const y = rows - 1 - k;
    for (let i = 0; i < columns; i++) {
      const slot = view.slots[i];
      const t = values && !tokensData().text.excluded[slot] ? shade(values[slot], range, log) : null;
      const at = 4 * (y * columns + i);
      if (t === null) { image.data[at + 3] = 0; continue; }
      image.data.set([...ramp(t), 255], at);
    }
  });
  context.putImageData(image, 0, 0);
  canvas.style.height = `${clamp(rows * 7, 64, 190)}px`;
}

function placeHeatMarks() {
  const rows = page.layers.length;
  const k = page.layers.indexOf(state.layer);
  const line = document.getElementById("heat-layer");
  line.style.top = `${((rows - 1 - k) / rows) * 100}%`;
  line.style.height = `${100 / rows}%`;
  const column = document.getElementById("heat-token");
  const i = view.slots.indexOf(state.slot);
  column.hidden = i < 0;
  if (i >= 0) { column.style.left = `${(i / view.slots.length) * 100}%`; column.style.width = `${100 / view.slots.length}%`; }
}

function heatPlace(event) {
  const rect = document.getElementById("heat").getBoundingClientRect();
  const i = clamp(Math.floor(((event.clientX - rect.left) / rect.width) * view.slots.length), 0, view.slots.length - 1);
  const k = clamp(Math.floor((1 - (event.clientY - rect.top) / rect.height) * page.layers.length), 0, page.layers.length - 1);
  return { slot: view.slots[i], layer: page.layers[k] };
}

function tokenTip(slot, layer) {
  const text = tokensData().text;
  const value = (name) => { const v = tokenColumn(name, state.protocol, state.series, layer); return v ? v[slot] : NaN; };
  const rows = availableMeasures(state.protocol, state.series).slice(0, 6).map((m) => [null, m.title, format(value(m.name), m.unit)]);
  const excluded = text.excluded[slot] ? el("div", { class: "tip-note" }, `excluded: ${text.reasons[text.reason[slot]] || "by rule"}`) : null;
  const head = el("div", { class: "tip-token" }, el("bdi", {}, ...visible(text.token[slot], { running: false })));
  return el("div", {}, head, tipTable(`position ${text.position[slot]} · layer ${layerName(layer)}`, rows), excluded);
}

function tokenEvents(host) {
  const find = (event) => event.target.closest(".token");
  host.addEventListener("pointerover", (event) => { const span = find(event); if (span && event.pointerType === "mouse") showTip(tokenTip(+span.dataset.slot, state.layer), event.clientX, event.clientY + 60); });
  host.addEventListener("pointerout", hideTip);
  host.addEventListener("click", (event) => { const span = find(event); if (span) chooseToken(+span.dataset.index, false); });
  host.addEventListener("keydown", (event) => {
    const span = find(event);
    if (!span) return;
    const i = +span.dataset.index;
    const moves = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: view.spans.length - 1 };
    if (event.key in moves) { event.preventDefault(); chooseToken(clamp(moves[event.key], 0, view.spans.length - 1), true); }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); chooseToken(i, true); }
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      event.preventDefault();
      const k = page.layers.indexOf(state.layer) + (event.key === "ArrowUp" ? 1 : -1);
      setState({ layer: page.layers[clamp(k, 0, page.layers.length - 1)] });
    }
  });
}

function chooseToken(index, focus) {
  const span = view.spans[index];
  for (const other of view.spans) other.tabIndex = -1;
  span.tabIndex = 0;
  if (focus) span.focus();
  setState({ slot: view.slots[index] });
}

function fillSelect(select, options, value) {
  const node = document.getElementById(select);
  node.replaceChildren(...options.map(([v, label]) => el("option", { value: v, selected: v === value }, label)));
  node.value = String(value);
}

// Falls back to what this page carries when a map is switched off or a protocol holds fewer measures.
function settleChoice() {
  const active = activeSeries();
  const series = active.includes(state.series) ? state.series : active[0] ?? state.series;
  const names = availableMeasures(state.protocol, series).map((m) => m.name);
  const measure = names.includes(state.measure) || !names.length ? state.measure : names[0];
  fillSelect("text-map", (active.length ? active : [series]).map((s) => [s, seriesLabel(s)]), series);
  fillSelect("text-measure", names.map((n) => [n, tokenMeasure(n).title]), measure);
  if (series !== state.series || measure !== state.measure) setState({ series, measure });
}

function startText() {
  layPages();
  const host = document.getElementById("tokens");
  tokenEvents(host);
  const heat = document.getElementById("heat-box");
  heat.addEventListener("pointermove", (event) => { const at = heatPlace(event); showTip(tokenTip(at.slot, at.layer), event.clientX, event.clientY); });
  heat.addEventListener("pointerleave", hideTip);
  heat.addEventListener("click", (event) => { const at = heatPlace(event); setState({ slot: at.slot, layer: at.layer }); });
  document.getElementById("text-map").addEventListener("change", (e) => setState({ series: +e.target.value }));
  document.getElementById("text-measure").addEventListener("change", (e) => setState({ measure: e.target.value }));
  document.getElementById("scale-all").addEventListener("change", (e) => setState({ scaleAll: e.target.checked }));
  const turn = (by) => setState({ window: clamp(state.window + by, 0, view.pages.length - 1) });
  document.getElementById("window-previous").addEventListener("click", () => turn(-1));
  document.getElementById("window-next").addEventListener("click", () => turn(1));
  onChange(["active", "protocol", "series"], settleChoice);
  onChange(["window"], () => { buildTokens(); if (!view.slots.includes(state.slot)) state.slot = view.slots[Math.min(12, view.slots.length - 1)]; });
  onChange(["window", "layer", "protocol", "series", "measure", "scaleAll", "slot", "theme"], paintTokens);
  onChange(["window", "protocol", "series", "measure", "theme"], paintHeat);
  onChange(["window", "layer", "slot"], placeHeatMarks);
  onChange(["window", "slot", "layer", "protocol", "series", "measure", "active", "width"], drawStory);
}
