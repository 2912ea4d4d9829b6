const tip = document.getElementById("tip");

function showTip(content, x, y) {
  tip.replaceChildren(content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
  tip.style.left = `${clamp(left, 8, Math.max(8, innerWidth - box.width - 8))}px`;
  tip.style.top = `${clamp(y - box.height / 2, 8, Math.max(8, innerHeight - box.height - 8))}px`;
}

const hideTip = () => (tip.hidden = true);
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { passive: true });

function tipTable(title, rows) {
  const body = rows.map(([series, ...cells]) =>
    el("tr", {},
      el("th", { scope: "row" }, series === null ? "" : swatch(series), series === null ? cells.shift() : seriesLabel(series)),
      ...cells.map((c) => el("td", {}, c))));
  return el("div", {}, el("div", { class: "tip-title" }, title), el("table", {}, el("tbody", {}, ...body)));
}

function swatch(series) {
  return svg("svg", { class: "swatch", width: 22, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: `var(--s${tone(series)})`, "stroke-width": 2, "stroke-dasharray": DASHES[tone(series)] }),
    mark(series, 11, 5, 3.2));
}
