// Distributions per layer as ridgelines: the residual filled, the full update outlined, chance as a tick.
const RIDGE_MEASURES = [
  { residual: "angle_residual_tokenwise", full: "angle_full_tokenwise", node: "angle-ridges", reference: 60, unit: "°", ticks: [0, 30, 60, 90] },
  { residual: "proj_residual", full: "proj_full", node: "projection-ridges", reference: null, unit: "", ticks: [0, 0.25, 0.5, 0.75, 1] },
];

function smooth(counts) {
  const kernel = [0.06, 0.24, 0.4, 0.24, 0.06];
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  return counts.map((_, i) => kernel.reduce((sum, w, k) => sum + w * (counts[clamp(i + k - 2, 0, counts.length - 1)] || 0), 0) / total);
}

function ridgeShape(density, x, domain, base, height, top, closed) {
  const step = (domain[1] - domain[0]) / density.length;
  const points = density.map((d, i) => `${x(domain[0] + (i + 0.5) * step).toFixed(1)} ${(base - (d / top) * height).toFixed(1)}`);
  return closed ? `M${x(domain[0])} ${base}L${points.join("L")}L${x(domain[1])} ${base}Z` : `M${points.join("L")}`;
}

function drawRidge(spec, s, root, width) {
  const p = state.protocol;
  const residual = page.histograms[spec.residual];
  const full = page.histograms[spec.full];
  const key = `${p}.${s}`;
  const row = clamp(380 / page.layers.length, 11, 40);
  const lift = row * (page.layers.length > 8 ? 2.6 : 1.5);
  const height = 20 + lift * 1.25 + row * page.layers.length + 24;
  const [left, right] = [30, width - 8];
  const x = makeScale(residual.domain[0], residual.domain[1], left, right, false);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  root.replaceChildren(svg("title", {}, `${seriesLabel(s)}: distributions by layer`));
  const floor = 14 + lift * 1.25 + row * (page.layers.length - 1) + 4;
  for (const t of spec.ticks) root.append(
    svg("line", { class: t === spec.reference ? "reference" : "grid", x1: x(t), x2: x(t), y1: 8, y2: floor }),
    svg("text", { class: "tick", x: x(t), y: floor + 16, "text-anchor": "middle" }, t + spec.unit));
  const smoothed = page.layers.map((l) => ({
    residual: residual.counts[key] && residual.counts[key][l] && smooth(residual.counts[key][l]),
    full: full && full.counts[key] && full.counts[key][l] && smooth(full.counts[key][l]),
  }));
  const top = Math.max(1e-9, ...smoothed.flatMap((d) => [...(d.residual || []), ...(d.full || []).map((v) => v * 0.8)]));
  page.layers.forEach((layer, i) => {
    // Depth runs upwards: the last layer is at the top.
    const order = page.layers.length - 1 - i;
    const at = page.layers[order];
    const base = 14 + lift * 1.25 + row * i;
    const shapes = smoothed[order];
    const here = at === state.layer;
    const group = svg("g", { class: here ? "ridge here" : "ridge", onclick: () => setState({ layer: at }) }, svg("title", {}, `Layer ${layerName(at)}`));
    if (shapes.full) group.append(svg("path", { class: "ridge-full", d: ridgeShape(shapes.full, x, residual.domain, base, lift * 0.95, top, true) }),
      svg("path", { class: "ridge-outline", d: ridgeShape(shapes.full, x, residual.domain, base, lift * 0.95, top, false) }));
    if (shapes.residual) group.append(svg("path", { class: "ridge-residual", fill: `var(--s${tone(s)})`, d: ridgeShape(shapes.residual, x, residual.domain, base, lift * 0.95, top, true) }),
      svg("path", { class: "ridge-line", stroke: `var(--s${tone(s)})`, d: ridgeShape(shapes.residual, x, residual.domain, base, lift * 0.95, top, false) }));
    group.prepend(svg("line", { class: "grid", x1: left, x2: right, y1: base, y2: base }));
    const chance = summaryValue(`${spec.residual}_chance`, p, s, at);
    if (finite(chance)) group.append(svg("line", { class: "ridge-chance", x1: x(chance), x2: x(chance), y1: base - row * 0.75, y2: base }));
    if (page.layers.length <= 12 || at % 5 === 0 || here) group.append(svg("text", { class: here ? "tick here" : "tick", x: left - 6, y: base + 1, "text-anchor": "end" }, String(at)));
    root.append(group);
  });
}

function drawRidges(spec) {
  const host = document.getElementById(spec.node);
  const section = host.closest(".figure");
  const histogram = page.histograms[spec.residual];
  section.hidden = !histogram;
  if (!histogram) return;
  const series = activeSeries().filter((s) => histogram.counts[`${state.protocol}.${s}`]);
  const plots = series.map((s) => {
    const root = svg("svg", { class: "plot ridge-plot", role: "img" });
    return { s, root, node: el("div", { class: "ridge-cell" }, el("h4", {}, swatch(s), " ", seriesLabel(s)), root) };
  });
  host.replaceChildren(...plots.map((p) => p.node));
  for (const { s, root } of plots) drawRidge(spec, s, root, root.clientWidth || 240);
}

function startRidges() {
  onChange(["active", "layer", "protocol", "width", "theme"], () => RIDGE_MEASURES.forEach(drawRidges));
}
