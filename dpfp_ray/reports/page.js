"use strict";
// Sorting and filtering for every table. Without this script they are plain tables.
function enhance(root) {
  for (const table of root.querySelectorAll("table.data")) {
    const body = table.tBodies[0];
    const original = Array.from(body.rows);
    const heads = Array.from(table.tHead.rows[table.tHead.rows.length - 1].cells);

    const key = (row, at) => {
      const cell = row.cells[at];
      if (cell.dataset.v !== undefined) {
        const value = cell.dataset.v;
        return value === "inf" ? Infinity : value === "-inf" ? -Infinity : Number(value);
      }
      const text = cell.textContent.trim();
      return text === "—" ? null : text;
    };
    const compare = (a, b) => {
      if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a < b ? -1 : 1;
      return String(a).localeCompare(String(b), "en", { numeric: true });
    };
    heads.forEach((head, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.title = "Sort by this column; a third press restores the order";
      head.textContent = "";
      head.append(button);
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const next = before === "ascending" ? "descending" : before === "descending" ? null : "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        const rows = original.slice();
        if (next) {
          head.setAttribute("aria-sort", next);
          const sign = next === "ascending" ? 1 : -1;
          rows.sort((one, two) => {
            const a = key(one, at), b = key(two, at);
            // Missing values come last, whichever way the table is sorted.
            if (a === null || b === null) return (a === null) - (b === null);
            return sign * compare(a, b);
          });
        }
        body.append(...rows);
      });
    });

    if (original.length < 12) continue;
    const tools = document.createElement("div");
    tools.className = "tools";
    const label = document.createElement("label");
    label.textContent = "Filter: ";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "words, e.g. DP-FP 3";
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    label.append(input);
    tools.append(label, count);
    table.closest(".scroll").before(tools);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of original) {
        const text = Array.from(row.cells, (cell) => cell.textContent).join(" ").toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = words.length ? `${shown} of ${original.length} rows` : "";
    });
  }
}
enhance(document);
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
