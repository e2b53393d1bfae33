"use strict";
// A click on a heading sorts the table by that column, the next one the other way round, the third as it was.
(() => {
  const units = { k: 1e3, M: 1e6, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, s: 1, ms: 1e-3, min: 60, h: 3600 };
  const number = (text) => {
    const m = /^[^\d+\u2212-]*([+\u2212-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)/i.exec(text.trim());
    if (!m) return null;
    const rest = text.slice(text.indexOf(m[1]) + m[1].length);
    const unit = /^(?:\s*\u00b1[\d.e+-]+)?\s*(KiB|MiB|GiB|TiB|B|k|M|min|ms|s|h)\b/.exec(rest);
    return parseFloat(m[1].replace(/,/g, "").replace("\u2212", "-")) * (unit ? units[unit[1]] : 1);
  };
  for (const table of document.querySelectorAll("table.sorts")) {
    const body = table.tBodies[0], asItWas = [...body.rows];
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      head.querySelector("button").addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort") || "none"];
        for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", next);
        if (next === "none") { body.replaceChildren(...asItWas); return; }
        const rows = asItWas.filter((r) => !r.classList.contains("section"));
        const cell = (r) => r.cells[column].textContent;
        const words = head.classList.contains("l") || rows.every((r) => number(cell(r)) === null);
        const sign = next === "ascending" ? 1 : -1;
        rows.sort((a, b) => {
          if (words) return sign * cell(a).localeCompare(cell(b));
          const x = number(cell(a)), y = number(cell(b));
          if (x === null || y === null) return (x === null) - (y === null);  // what is missing stays last
          return sign * (x - y);
        });
        body.replaceChildren(...rows);
      });
    }
  }
})();
