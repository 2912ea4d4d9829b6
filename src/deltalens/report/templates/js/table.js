// The summary as a sortable table.
const sorting = { column: 0, descending: false };

function tableRows() {
  const columns = page.tableColumns;
  const rows = [];
  page.summary.layer.forEach((layer, i) => {
    const s = page.summary.series[i];
    if (!state.active.has(s) || (state.tableLayer && layer !== state.layer)) return;
    rows.push({ layer, series: s, cells: [layer, seriesLabel(s), protocolName(page.summary.protocol[i]), ...columns.map((c) => page.summary.columns[c]?.[i] ?? null)] });
  });
  const { column, descending } = sorting;
  const empty = (v) => v === null || v === undefined;
  rows.sort((a, b) => {
    const [u, v] = [a.cells[column], b.cells[column]];
    if (empty(u) || empty(v)) return empty(u) - empty(v);
    const order = typeof u === "number" ? u - v : String(u).localeCompare(String(v));
    return descending ? -order : order;
  });
  return rows;
}

function drawTable() {
  const titles = ["layer", "map", "protocol", ...page.tableColumns.map((c) => c)];
  const head = titles.map((title, i) => {
    const sorted = sorting.column === i ? (sorting.descending ? "descending" : "ascending") : "none";
    const arrow = sorted === "none" ? "" : sorting.descending ? " ↓" : " ↑";
    return el("th", { scope: "col", "aria-sort": sorted }, el("button", { type: "button", onclick: () => {
      sorting.descending = sorting.column === i ? !sorting.descending : false;
      sorting.column = i;
      drawTable();
    } }, title.replaceAll("_", " ") + arrow));
  });
  const body = tableRows().map(({ layer, series, cells }) => el("tr", { class: layer === state.layer ? "here" : "" },
    el("td", {}, layerName(layer)), el("td", { class: "name" }, swatch(series), " ", cells[1]), el("td", { class: "name" }, cells[2]), ...cells.slice(3).map((v) => el("td", {}, format(v)))));
  document.getElementById("table").replaceChildren(el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

function startTable() {
  document.getElementById("table-csv").addEventListener("click", (e) => {
    const head = ["layer", "map", "protocol", ...page.tableColumns];
    copyText(csv([head, ...tableRows().map((r) => r.cells)]), e.target);
  });
  document.getElementById("table-layer").addEventListener("change", (e) => setState({ tableLayer: e.target.checked }));
  onChange(["active", "layer", "tableLayer"], drawTable);
}
