function linearTicks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => span / s <= count) || 10 * power;
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

function logTicks(low, high, count) {
  const from = Math.ceil(Math.log10(low) - 1e-9);
  const to = Math.floor(Math.log10(high) + 1e-9);
  if (to - from >= 1) {
    const every = Math.ceil((to - from + 1) / count);
    const out = [];
    for (let p = from; p <= to; p += every) out.push(10 ** p);
    return out;
  }
  return linearTicks(low, high, count).filter((v) => v > 0);
}

function roomy(ticks, scale, gap) {
  const kept = [];
  for (const v of ticks) if (!kept.length || Math.abs(scale(v) - scale(kept.at(-1))) >= gap) kept.push(v);
  return kept;
}

function tickLabel(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || size < 1e-3) {
    const power = Math.round(Math.log10(size));
    const head = value / 10 ** power;
    const digits = String(power).replace("-", "⁻").replace(/\d/g, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]);
    return Math.abs(head - 1) < 1e-9 ? `10${digits}` : `${+head.toPrecision(2)}·10${digits}`;
  }
  return String(+value.toPrecision(3)).replace("-", "−");
}

function makeScale(low, high, start, end, log) {
  const a = log ? Math.log(low) : low;
  const b = log ? Math.log(high) : high;
  const scale = (v) => start + ((log ? Math.log(Math.max(v, low * 1e-3)) : v) - a) / (b - a || 1) * (end - start);
  scale.ticks = (count) => (log ? logTicks(low, high, count) : linearTicks(low, high, count));
  scale.invert = (p) => { const v = a + ((p - start) / (end - start)) * (b - a); return log ? Math.exp(v) : v; };
  scale.domain = [low, high];
  scale.log = log;
  return scale;
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// Sequential ramps with monotone lightness, safe for colour-blind readers; low values fade into the page.
const RAMP_LIGHT = ["#fdfcf8", "#fdeec8", "#fbcf8a", "#f5a05a", "#e06a4b", "#b43a58", "#7a2360"];
const RAMP_DARK = ["#15181d", "#2b1a44", "#5a1e66", "#92295f", "#c8434c", "#ee7a3a", "#f9b455", "#fdf0b4"];
const hexToRgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function ramp(t) {
  const stops = (isDark() ? RAMP_DARK : RAMP_LIGHT);
  const at = clamp(t, 0, 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [hexToRgb(stops[i]), hexToRgb(stops[i + 1])];
  return a.map((v, k) => Math.round(v + (b[k] - v) * (at - i)));
}

const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;
function inkOn([r, g, b]) {
  const lin = [r, g, b].map((v) => { const s = v / 255; return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
  const luminance = 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2];
  return luminance > 0.22 ? "#16181d" : "#ffffff";
}

const colour = (series) => getComputedStyle(document.documentElement).getPropertyValue(`--s${tone(series)}`).trim();
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3", "", "7 3"];
const MARKS = ["circle", "square", "triangle", "diamond", "cross", "circle", "square", "triangle", "diamond", "cross"];

function mark(series, x, y, size = 3.4, extra = {}) {
  const kind = MARKS[tone(series)];
  const common = { fill: `var(--s${tone(series)})`, ...extra };
  if (kind === "circle") return svg("circle", { cx: x, cy: y, r: size, ...common });
  if (kind === "square") return svg("rect", { x: x - size * 0.9, y: y - size * 0.9, width: size * 1.8, height: size * 1.8, ...common });
  const paths = {
    triangle: `M${x} ${y - size * 1.2}L${x + size * 1.1} ${y + size * 0.8}H${x - size * 1.1}Z`,
    diamond: `M${x} ${y - size * 1.3}L${x + size * 1.3} ${y}L${x} ${y + size * 1.3}L${x - size * 1.3} ${y}Z`,
    cross: `M${x - size} ${y - size * 0.4}H${x - size * 0.4}V${y - size}H${x + size * 0.4}V${y - size * 0.4}H${x + size}V${y + size * 0.4}H${x + size * 0.4}V${y + size}H${x - size * 0.4}V${y + size * 0.4}H${x - size}Z`,
  };
  return svg("path", { d: paths[kind], ...common });
}
