"use strict";
(() => {
  // -- tables: sorted by a heading's button, filtered by text

  const keyOf = (cell) => (cell.dataset.v === undefined ? null : Number(cell.dataset.v));
  const sort = (heading) => {
    const index = heading.cellIndex;
    const body = heading.closest("table").tBodies[0];
    const ascending = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const items = [...body.rows].map((row) => ({ row, key: keyOf(row.cells[index]), text: row.cells[index].textContent }));
    const numeric = heading.classList.contains("n");
    items.sort((a, b) => {
      if (numeric && (a.key === null || b.key === null)) return (a.key === null) - (b.key === null); // no figure: last
      const order = numeric ? a.key - b.key : a.text.localeCompare(b.text, "en", { numeric: true });
      return ascending ? order : -order;
    });
    body.append(...items.map(({ row }) => row));
  };
  const filter = (box) => {
    const words = box.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...box.querySelector("tbody").rows];
    for (const row of all) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    box.querySelector("output").textContent = `${all.filter((row) => !row.hidden).length} of ${all.length} rows`;
  };
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button?.dataset.open) {
      for (const model of document.querySelectorAll(".model")) model.open = button.dataset.open === "true";
    } else if (button?.closest("th")) {
      sort(button.closest("th"));
    }
  });
  document.addEventListener("input", ({ target }) => {
    const box = target.closest(".table");
    if (box) filter(box);
  });

  // -- links into a closed part open it

  const openTarget = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (!target) return;
    for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  document.documentElement.dataset.ready = "true";
})();
