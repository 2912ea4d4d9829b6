// The table of differences from the first run.
const differenceSort = { column: 2, descending: false };

function differenceRows() {
  const { map, fit } = page.maps[state.map];
  const kept = page.differences.filter((d) => d.map === map && d.fit === fit && d.measure === state.measure && d.protocol === page.protocols[state.protocol] && state.runs.has(d.run)
    && (!state.sure || excludesZero(d)));
  const rows = kept.map((d) => ({ d, cells: [page.runs[d.run], d.matched_layer, d.layer, d.first, d.second, d.difference, d.low, d.high, d.paired ? "per token" : "of medians"] }));
  const { column, descending } = differenceSort;
  rows.sort((a, b) => {
    const [u, v] = [a.cells[column], b.cells[column]];
    if (u === null || v === null) return (u === null) - (v === null);
    const order = typeof u === "number" ? u - v : String(u).localeCompare(String(v));
    return descending ? -order : order;
  });
  return rows;
}

const excludesZero = (d) => d.low !== null && (d.low > 0 || d.high < 0);
const DIFFERENCE_HEAD = () => ["run", "its layer", `layer of ${page.runs[0]}`, page.runs[0], "run's value", "difference", "from", "to", "kind"];
const signed = (v) => (finite(v) && v > 0 ? `+${format(v)}` : format(v));

function drawDifferences() {
  const head = DIFFERENCE_HEAD().map((title, i) => {
    const sorted = differenceSort.column === i ? (differenceSort.descending ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", "aria-sort": sorted }, el("button", { type: "button", onclick: () => {
      differenceSort.descending = differenceSort.column === i ? !differenceSort.descending : false;
      differenceSort.column = i;
      drawDifferences();
    } }, title + (sorted === "none" ? "" : differenceSort.descending ? " ↓" : " ↑")));
  });
  const body = differenceRows().map(({ d, cells }) => el("tr", { class: d.layer === state.layer ? "here" : "" },
    el("td", { class: "name" }, cells[0]), el("td", { class: "name" }, layerName(d.matched_layer)), el("td", { class: "name" }, layerName(d.layer)),
    el("td", {}, format(d.first)), el("td", {}, format(d.second)), el("td", {}, el(excludesZero(d) ? "b" : "span", {}, signed(d.difference))), el("td", {}, signed(d.low)), el("td", {}, signed(d.high)), el("td", { class: "name" }, cells[8])));
  const none = body.length ? [] : [el("tr", {}, el("td", { colspan: head.length }, "No difference to show for this choice."))];
  document.getElementById("difference-table").replaceChildren(el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body, ...none));
}

function startDifferences() {
  const measures = page.differenceMeasures.filter((m) => page.differences.some((d) => d.measure === m.name));
  const choose = (id, options, set) => {
    const node = document.getElementById(id);
    node.replaceChildren(...options.map(([value, label]) => el("option", { value }, label)));
    node.addEventListener("change", () => set(node.value));
  };
  choose("difference-measure", measures.map((m) => [m.name, m.title]), (measure) => setState({ measure }));
  choose("difference-protocol", page.protocols.map((_, p) => [p, protocolName(p)]), (p) => setState({ protocol: +p }));
  if (measures.length) state.measure = measures[0].name;
  document.getElementById("difference-sure").addEventListener("change", (e) => setState({ sure: e.target.checked }));
  document.getElementById("difference-csv").addEventListener("click", (e) => copyText(csv([DIFFERENCE_HEAD(), ...differenceRows().map((r) => r.cells)]), e.target));
  onChange(["map", "measure", "protocol", "runs", "sure", "layer"], drawDifferences);
}
