"use strict";
(() => {
  const { specs, charts } = JSON.parse(document.getElementById("charts").textContent);

  // -- charts: drawn when they come into view, in the colours of the page's style

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // "$name" stands for a parameter of the chart, "@name" for a colour of the style.
  const fill = (part, parameters) => {
    if (typeof part === "string") {
      if (part[0] === "$") return parameters[part.slice(1)];
      return part[0] === "@" ? colour(part.slice(1)) : part;
    }
    if (Array.isArray(part)) return part.map((item) => fill(item, parameters));
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, item]) => [key, fill(item, parameters)]));
  };

  const rows = ({ fields, rows }) =>
    rows.map((row) => Object.fromEntries(fields.map((field, i) => [field, row[i]]).filter(([, item]) => item !== null)));

  const config = (width) => {
    const text = colour("text"), muted = colour("muted"), line = colour("line");
    return {
      aria: false,
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: null },
      mark: { tooltip: { content: "data" } },
      axis: {
        labelColor: muted, titleColor: muted, domainColor: line, tickColor: line, gridColor: line,
        gridOpacity: 0.6, labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400,
        labelLimit: width < 480 ? 96 : 220, labelOverlap: true,
      },
      axisY: { labelColor: text },
      legend: {
        labelColor: text, titleColor: muted, labelFontSize: 11, orient: "top", title: null,
        columns: width < 480 ? 3 : 6, symbolOpacity: 1,
      },
      range: { category: ["c1", "c2", "c3", "c4", "c5", "mark"].map(colour) },
      text: { color: text, fontSize: 11 },
      line: { strokeWidth: 2 },
      style: {
        front: { color: colour("c1"), strokeWidth: 1.5, opacity: 0.6 },
      },
    };
  };

  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const showTip = (_, event, __, value) => {
    tip.hidden = !value;
    if (tip.hidden) return;
    tip.textContent = Object.entries(value).map(([name, figure]) => `${name}: ${figure}`).join(", ");
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  };

  const drawn = new Map();
  const draw = async (figure) => {
    const { kind, parameters, values } = charts[Number(figure.dataset.chart)];
    const place = figure.querySelector(".drawing").firstElementChild; // it gets a role from the library
    const { step, ...rest } = fill(specs[kind], parameters);
    const data = rows(values);
    const spec = {
      ...rest,
      ...(step ? { height: step * new Set(data.map(({ row }) => row)).size } : {}),
      data: { values: data },
      width: "container",
      config: config(place.clientWidth),
    };
    drawn.get(figure)?.finalize();
    const options = {
      mode: "vega-lite", renderer: "svg", actions: false, defaultStyle: false, tooltip: showTip,
      ast: true, // expressions are interpreted: the page's policy forbids to compile them
    };
    drawn.set(figure, await vegaEmbed(place, spec, options));
    figure.dataset.drawn = "true";
  };

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      draw(target).catch((error) => console.error(error));
    }
  }, { rootMargin: "300px" });
  const figures = document.querySelectorAll("figure[data-chart]");
  figures.forEach((figure) => seen.observe(figure));
  const drawAgain = () => {
    for (const figure of drawn.keys()) {
      delete figure.dataset.drawn;
      seen.observe(figure);
    }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
  matchMedia("print").addEventListener("change", drawAgain);

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
