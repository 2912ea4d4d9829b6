const SVG = "http://www.w3.org/2000/svg";

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const finite = (value) => typeof value === "number" && Number.isFinite(value);

function format(value, unit = "") {
  if (!finite(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size >= 1000) text = value.toLocaleString("en", { maximumFractionDigits: 0 });
  else if (size >= 100) text = value.toFixed(0);
  else if (size >= 10) text = value.toFixed(1);
  else if (size >= 1) text = value.toFixed(2);
  else if (size >= 0.01) text = value.toFixed(3);
  else if (size >= 0.001) text = value.toPrecision(2);
  else text = value.toExponential(1).replace("e-", "e−").replace("e+", "e");
  text = text.replace(/^-/, "−");
  if (!unit) return text;
  return unit === "°" || unit === "×" ? text + unit : `${text} ${unit}`;
}

// Packed numbers: two characters each, see encode.py.
const ALPHABET = (() => {
  let out = "";
  for (let c = 33; c < 127; c++) if (!"\"'&<>\\".includes(String.fromCharCode(c))) out += String.fromCharCode(c);
  return out;
})();
const BASE = ALPHABET.length;
const LEVELS = BASE * BASE;
const DIGIT = new Int16Array(128).fill(-1);
for (let i = 0; i < BASE; i++) DIGIT[ALPHABET.charCodeAt(i)] = i;

function unpack(text, digits) {
  const out = new Int32Array(text.length / digits);
  for (let i = 0; i < out.length; i++) {
    let value = 0;
    for (let d = 0; d < digits; d++) value = value * BASE + DIGIT[text.charCodeAt(i * digits + d)];
    out[i] = value;
  }
  return out;
}

function decode(text, scale) {
  const levels = unpack(text, 2);
  const out = new Float64Array(levels.length);
  const step = (scale.high - scale.low) / (LEVELS - 3);
  for (let i = 0; i < out.length; i++) {
    if (levels[i] === 0) out[i] = NaN;
    else if (levels[i] === 1) out[i] = 0;
    else {
      const plain = scale.low + (levels[i] - 2) * step;
      out[i] = scale.log ? Math.exp(plain) : plain;
    }
  }
  return out;
}

function readJson(id) {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
}

function quantile(values, q) {
  const kept = Float64Array.from(values.filter ? values.filter(finite) : values).sort();
  if (!kept.length) return NaN;
  const at = (kept.length - 1) * q;
  const low = Math.floor(at);
  return kept[low] + (kept[Math.min(low + 1, kept.length - 1)] - kept[low]) * (at - low);
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1200);
}

function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n");
}

const quotePython = (text) => JSON.stringify(text);
