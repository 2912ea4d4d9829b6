// Error against KL: one panel per map at the chosen layer, the residual in colour, its controls in grey.
const CLOUDS = [
  { name: "kl_single_random", control: "random", title: "random direction" },
  { name: "kl_single_shuffled", control: "shuffled", title: "another token's residual" },
];

function scatterPoints(s) {
  const errors = tokenColumn("relative_error", state.protocol, s, state.layer);
  const column = (name) => tokenColumn(name, state.protocol, s, state.layer);
  if (!errors || !column("kl_single")) return null;
  return { errors, residual: column("kl_single"), random: column("kl_single_random"), shuffled: column("kl_single_shuffled") };
}

function scatterExtent(clouds) {
  const excluded = tokensData().text.excluded;
  const xs = [];
  const ys = [];
  for (const cloud of clouds) cloud.errors.forEach((v, i) => {
    if (excluded[i] || !(v > 0)) return;
    xs.push(v);
    for (const k of ["residual", "random", "shuffled"]) if (cloud[k] && cloud[k][i] > 0) ys.push(cloud[k][i]);
  });
  if (!xs.length || !ys.length) return null;
  const range = (v) => { const [a, b] = [quantile(v, 0.001), quantile(v, 0.9995)]; return a === b ? [a / 2, b * 2] : [a / 1.25, b * 1.25]; };
  return { x: range(xs), y: range(ys) };
}

function paintCloud(context, values, errors, x, y, fill, hollow) {
  const excluded = tokensData().text.excluded;
  const box = [x.domain, y.domain];
  context.fillStyle = fill;
  context.strokeStyle = fill;
  for (let i = 0; i < values.length; i++) {
    if (excluded[i] || !(values[i] > 0) || !(errors[i] > 0)) continue;
    const at = [clamp(errors[i], ...box[0]), clamp(values[i], ...box[1])];
    context.beginPath();
    context.arc(x(at[0]), y(at[1]), hollow ? 1.7 : 1.9, 0, 7);
    if (hollow) context.stroke();
    else context.fill();
  }
}

function scatterAxes(root, x, y, box) {
  axisY(root, y, box.left, box.right, 5, "");
  for (const v of roomy(x.ticks(4), x, 34)) root.append(svg("text", { class: "tick", x: x(v), y: box.bottom + 16, "text-anchor": "middle" }, tickLabel(v)));
  const floor = page.noiseFloor.single;
  if (finite(floor) && floor > y.domain[0] && floor < y.domain[1]) root.append(
    svg("rect", { class: "noise", x: box.left, width: box.right - box.left, y: y(floor), height: box.bottom - y(floor) }),
    svg("text", { class: "ref-name", x: box.right - 4, y: y(floor) - 4, "text-anchor": "end" }, "noise floor"));
}

function scatterCaption(s) {
  const value = (name) => summaryValue(name, state.protocol, s, state.layer);
  const interval = finite(value("spearman_lo")) ? ` [${format(value("spearman_lo"))}, ${format(value("spearman_hi"))}]` : "";
  const parts = [el("strong", {}, `ρ = ${format(value("spearman"))}`), interval];
  if (finite(value("spearman_random"))) parts.push(el("span", { class: "muted" }, ` · random control ${format(value("spearman_random"))}`));
  if (finite(value("kl_ratio_random"))) parts.push(el("span", { class: "muted" }, ` · KL ${format(value("kl_ratio_random"), "×")} random's`));
  return el("p", { class: "scatter-caption" }, ...parts);
}

function drawScatterPanel(s, points, extent, host) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const root = svg("svg", { class: "plot", role: "img" }, svg("title", {}, `${seriesLabel(s)}: relative error against KL at layer ${layerName(state.layer)}`));
  host.append(el("div", { class: "scatter-cell" }, el("h4", {}, swatch(s), " ", seriesLabel(s)), el("div", { class: "layered" }, canvas, root), scatterCaption(s)));
  const width = root.clientWidth || 280;
  const height = Math.round(clamp(width * 0.86, 220, 320));
  const box = { left: 42, right: width - 6, top: 8, bottom: height - 24 };
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  const x = makeScale(...extent.x, box.left, box.right, true);
  const y = makeScale(...extent.y, box.bottom, box.top, true);
  scatterAxes(root, x, y, box);
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  for (const cloud of CLOUDS) if (points[cloud.control] && state.clouds.has(cloud.control)) {
    context.globalAlpha = 0.42;
    paintCloud(context, points[cloud.control], points.errors, x, y, style.getPropertyValue(cloud.control === "random" ? "--muted" : "--shuffled").trim(), true);
  }
  context.globalAlpha = 0.62;
  paintCloud(context, points.residual, points.errors, x, y, colour(s), false);
}

function drawScatter() {
  const host = document.getElementById("scatters");
  host.replaceChildren();
  const all = activeSeries().map((s) => ({ s, points: scatterPoints(s) })).filter((a) => a.points);
  const extent = scatterExtent(all.map((a) => a.points));
  document.getElementById("scatter-layer").textContent = `layer ${layerName(state.layer)}, ${protocolName(state.protocol)}`;
  if (!extent) {
    host.append(el("p", { class: "empty" }, "This page carries no per-token errors and KL for this choice; they are in the run folder if they were measured."));
    return;
  }
  for (const { s, points } of all) drawScatterPanel(s, points, extent, host);
}

function startScatter() {
  const toggles = document.getElementById("cloud-toggles");
  for (const cloud of CLOUDS) {
    if (!tokensData().columns[cloud.name]) continue;
    const box = el("input", { type: "checkbox", checked: state.clouds.has(cloud.control), onchange: () => {
      const clouds = new Set(state.clouds);
      if (box.checked) clouds.add(cloud.control); else clouds.delete(cloud.control);
      setState({ clouds });
    } });
    toggles.append(el("label", {}, box, ` control: ${cloud.title}`));
  }
  onChange(["active", "layer", "protocol", "clouds", "width", "theme"], drawScatter);
}
