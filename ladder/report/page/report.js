"use strict";

const darkness = matchMedia("(prefers-color-scheme: dark)");
const phone = matchMedia("(max-width: 600px)");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), line: of("--line"), ground: of("--ground") };
}

/* The figure's own layout, in this page's colours and at this window's size. */
function dressed(layout) {
  const colours = theme();
  const axis = { gridcolor: colours.line, zerolinecolor: colours.line, linecolor: colours.line, automargin: true };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colours.text, size: phone.matches ? 10 : 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colours.ground, bordercolor: colours.line, font: { color: colours.text }, align: "left" },
    showlegend: false,
    margin: { l: 10, r: 10, t: 10, b: 40 },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    dragmode: phone.matches ? false : "zoom",
  };
}

function draw(element) {
  const figure = JSON.parse(document.getElementById(element.dataset.figure).textContent);
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  Plotly.react(element, figure.data, dressed(figure.layout), options);
}

/* Buttons that wrap like text, in place of plotly's own legend, which takes room from narrow figures. */
function addLegend(element) {
  const legend = document.createElement("div");
  legend.className = "legend";
  element.data.forEach((trace, number) => {
    if (trace.showlegend === false) return;
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    const swatch = document.createElement("span");
    swatch.style.background = trace.marker.color;
    button.append(swatch, new DOMParser().parseFromString(trace.name, "text/html").body.textContent);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      const same = element.data.flatMap((each, place) => (each.name === trace.name ? [place] : []));
      Plotly.restyle(element, { visible: shown }, same);
    });
    legend.append(button);
  });
  if (legend.childElementCount > 1) element.before(legend);
}

function drawAll() {
  document.querySelectorAll(".plot").forEach(draw);
}

function valueOf(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent;
}

/* Numbers by size, words by letter, what is empty always last. */
function compare(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const difference = Number(a) - Number(b);
  return direction * (Number.isNaN(difference) ? a.localeCompare(b) : difference);
}

function sortBy(header) {
  const table = header.closest("table");
  const column = header.cellIndex;
  const numbers = header.classList.contains("number");
  const first = numbers ? "descending" : "ascending";
  const other = numbers ? "ascending" : "descending";
  const order = header.getAttribute("aria-sort") === first ? other : first;
  const direction = order === "ascending" ? 1 : -1;
  table.querySelectorAll("th[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", order);
  const body = table.tBodies[0];
  const rows = [...body.rows].sort((a, b) => compare(valueOf(a, column), valueOf(b, column), direction));
  body.append(...rows);
}

document.querySelectorAll("table.sortable th button").forEach((button) => {
  button.addEventListener("click", () => sortBy(button.closest("th")));
});
drawAll();
document.querySelectorAll(".plot").forEach(addLegend);
darkness.addEventListener("change", drawAll);
phone.addEventListener("change", drawAll);
addEventListener("beforeprint", drawAll);
addEventListener("afterprint", drawAll);
