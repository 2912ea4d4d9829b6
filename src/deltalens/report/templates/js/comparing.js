// The bar of a comparison: runs are switched, one map is chosen, the layer follows the first run's depth.
function settleSeries() {
  const { map, fit } = page.maps[state.map];
  const active = page.series.map((_, s) => s).filter((s) => page.series[s].map === map && page.series[s].fit === fit && state.runs.has(page.series[s].tone));
  setState({ active: new Set(active) });
}

function startComparison() {
  Object.assign(state, { active: new Set(), runs: new Set(page.runs.map((_, i) => i)), map: 0, layer: page.layers[Math.floor(page.layers.length / 2)], protocol: page.judged, measure: null, sure: false, width: innerWidth, theme: null });
  const chips = document.getElementById("runs");
  page.runs.forEach((name, i) => {
    const first = page.series.findIndex((s) => s.tone === i);
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true" }, swatch(first), name);
    chip.addEventListener("click", () => {
      const runs = new Set(state.runs);
      if (runs.has(i)) runs.delete(i); else runs.add(i);
      chip.setAttribute("aria-pressed", String(runs.has(i)));
      setState({ runs });
      settleSeries();
    });
    chips.append(chip);
  });
  const map = document.getElementById("map");
  map.replaceChildren(...page.maps.map((m, i) => el("option", { value: i }, m.label)));
  map.addEventListener("change", () => { setState({ map: +map.value }); settleSeries(); });
  const slider = document.getElementById("layer");
  slider.max = String(page.layers.length - 1);
  slider.disabled = page.layers.length < 2;
  slider.addEventListener("input", () => setState({ layer: page.layers[+slider.value] }));
  document.getElementById("layer-word").textContent = page.normalised ? "Depth" : "Layer";
  document.getElementById("depth-note").textContent = page.normalised ? "The runs measure different layers, so depth is relative: (l + ½) / L." : "";
  onChange(["layer"], () => {
    slider.value = String(page.layers.indexOf(state.layer));
    document.getElementById("layer-name").textContent = page.normalised ? `${Math.round(cursorDepth() * 100)}%` : layerName(state.layer);
  });
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    setState({ theme: document.documentElement.dataset.theme });
  });
  settleSeries();
  startProfiles();
  startDifferences();
  drawAll();
  document.documentElement.dataset.ready = "true";
}

let resizing = null;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => setState({ width: innerWidth }), 80);
});
startComparison();
