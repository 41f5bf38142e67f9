"use strict";

/* A part of a figure is switched off and on by its button; both drawings have it, for wide windows and narrow ones. */
document.querySelectorAll(".legend button").forEach((button) => {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const parts = button.closest("figure").querySelectorAll(`.mark[data-part="${button.dataset.part}"]`);
    parts.forEach((part) => { part.style.display = shown ? "" : "none"; });
  });
});

/* What a mark says stands below its figure as well: a finger cannot hover. */
document.querySelectorAll("figure .mark").forEach((mark) => {
  const say = () => {
    const figure = mark.closest("figure");
    figure.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    mark.classList.add("chosen");
    figure.querySelector(".pointed").textContent = mark.querySelector("title").textContent;
  };
  mark.addEventListener("click", say);
  mark.addEventListener("pointerenter", say);
});

/* Without the clipboard's permission, as in an old browser, what is to be copied is selected. */
async function copy(button) {
  const text = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(text.textContent);
  } catch {
    const range = document.createRange();
    range.selectNodeContents(text);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    if (!document.execCommand("copy")) {
      button.textContent = "Selected";
      return;
    }
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

document.querySelectorAll("button.copy").forEach((button) => {
  button.addEventListener("click", () => copy(button));
});

/* Rows that have every word that was typed, and the outcome that was chosen. */
function filter(box) {
  const words = box.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
  const outcome = box.querySelector("select").value;
  const rows = [...box.nextElementSibling.querySelectorAll("tbody tr")];
  rows.forEach((row) => {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) || (outcome !== "" && row.dataset.outcome !== outcome);
  });
  const shown = rows.filter((row) => !row.hidden).length;
  box.querySelector("span").textContent = shown < rows.length ? `${shown} of ${rows.length} candidates` : "";
}

document.querySelectorAll(".filter").forEach((box) => {
  box.addEventListener("input", () => filter(box));
});

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
