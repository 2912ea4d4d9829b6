// The bar that steers every view, and the order in which the views come up.
function startBar() {
  const chips = document.getElementById("maps");
  page.series.forEach((series, s) => {
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true", "data-series": s }, swatch(s), series.label);
    chip.addEventListener("click", () => {
      const active = new Set(state.active);
      if (active.has(s)) active.delete(s); else active.add(s);
      setState({ active });
    });
    chips.append(chip);
  });
  onChange(["active"], () => chips.querySelectorAll(".chip").forEach((c) => c.setAttribute("aria-pressed", String(state.active.has(+c.dataset.series)))));
  const slider = document.getElementById("layer");
  slider.max = String(page.layers.length - 1);
  slider.disabled = page.layers.length < 2;
  slider.addEventListener("input", () => setState({ layer: page.layers[+slider.value] }));
  onChange(["layer"], () => {
    slider.value = String(page.layers.indexOf(state.layer));
    slider.setAttribute("aria-valuetext", `layer ${layerName(state.layer)}`);
    document.getElementById("layer-name").textContent = layerName(state.layer);
  });
  startProtocols();
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    setState({ theme: document.documentElement.dataset.theme });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (e) => setState({ theme: e.matches ? "dark" : "light" }));
}

function startProtocols() {
  const group = document.getElementById("protocols");
  group.hidden = page.protocols.length < 2;
  page.protocols.forEach((_, p) => group.append(el("label", {}, el("input", { type: "radio", name: "protocol", value: p, checked: p === page.judged, onchange: () => setState({ protocol: p }) }), el("span", {}, protocolName(p)))));
}

function startCopyButtons() {
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copyText(document.getElementById(button.dataset.copy).textContent, button)));
}

function firstMeasure() {
  const names = page.tokenMeasures.map((m) => m.name);
  return names.find((n) => tokensData().columns[n]) || names[0];
}

// The text opens with the map that explains most, the trivial ones aside.
function firstSeries() {
  const error = (s) => quantile(summaryProfile("relative_update_error", page.judged, s).filter(finite), 0.5);
  const fitted = page.series.map((_, s) => s).filter((s) => !["identity", "mean", "scalar", "isolated"].includes(page.series[s].map) && finite(error(s)));
  return fitted.reduce((best, s) => (error(s) < error(best) ? s : best), fitted[0] ?? 0);
}

function firstSlot() {
  const text = tokensData().text;
  // A prompt is read for what its last token predicts.
  if (page.prompt) return Math.max(0, text.excluded.findLastIndex((e, i) => !e && text.window[i] === text.window[0]));
  const shown = text.token.findIndex((t, i) => i > 20 && !text.excluded[i] && /\p{L}{3}/u.test(t));
  return Math.max(0, shown);
}

function start() {
  Object.assign(state, {
    active: new Set(page.series.map((_, s) => s)), layer: page.layers[Math.floor(page.layers.length / 2)], protocol: page.judged, series: firstSeries(),
    clouds: new Set(["random"]), window: 0, slot: null, scaleAll: true, tableLayer: false, width: innerWidth, theme: null, measure: page.tokenMeasures[0].name,
  });
  startBar();
  startCopyButtons();
  // Figures are drawn, and the heavy data parsed, after the first paint.
  requestAnimationFrame(() => setTimeout(() => {
    startProfiles();
    drawAll();
    state.measure = firstMeasure();
    state.slot = firstSlot();
    startViews();
    if (page.prompt && !location.hash) document.getElementById("text").scrollIntoView();
    document.documentElement.dataset.ready = "true";
  }));
}

function startViews() {
  const before = listeners.length;
  startText();
  startRidges();
  startScatter();
  startTable();
  for (const { draw } of listeners.slice(before)) draw(new Set());
}

let resizing = null;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => setState({ width: innerWidth }), 80);
});
start();
