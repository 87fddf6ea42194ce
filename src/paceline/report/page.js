"use strict";
// Zoom and read-out of the charts. Dragging over a chart selects steps in all of them; a double click, Escape or the
// button shows everything again. A focused chart is read with the arrow keys and zoomed with + and -. The numbers are
// those of the element #data: one list of series for each chart. A page that is kept up to date fires
// `paceline:refresh` after its content was replaced.
(() => {
  const svgNs = "http://www.w3.org/2000/svg";
  const left = 62, right = 12, top = 10, bottom = 30, width = 640, height = 260; // as in svg.py
  let figures = [], first = [];
  let shown = null; // the selected steps, [low, high]; null for all

  const number = (value) => {
    if (Number.isInteger(value) && Math.abs(value) >= 1e4 && Math.abs(value) < 1e15) return value.toLocaleString("en");
    const text = value.toPrecision(4);
    return text.includes("e") ? Number(text).toExponential() : String(Number(text));
  };
  const ticks = (low, high) => {
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const first = Math.ceil(low / step);
    // at most six of them fit; an index beyond 2^53 would not grow by 1
    return [0, 1, 2, 3, 4, 5].map((offset) => (first + offset) * step).filter((each) => each <= high);
  };
  const element = (name, attributes, text = "") => {
    const made = document.createElementNS(svgNs, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const stepsOf = (figure) => figure.series.flatMap((each) => each.x);
  const limitsOf = (figure) => {
    const all = stepsOf(figure);
    return shown ?? [Math.min(...all), Math.max(...all)];
  };
  const placeOf = (figure, step) => {
    const [low, high] = limitsOf(figure);
    return left + (high > low ? (step - low) / (high - low) : 0.5) * (width - left - right);
  };

  function draw(figure, index) {
    if (shown === null) {
      figure.svg.innerHTML = first[index];
      return;
    }
    const [low, high] = shown;
    const isStacked = figure.series.some((each) => each.base);
    const inside = figure.series.flatMap((each) => each.y.filter((_, at) => each.x[at] >= low && each.x[at] <= high));
    const [least, greatest] = isStacked ? [0, 100] : inside.length ? [Math.min(...inside), Math.max(...inside)] : [0, 1];
    const margin = isStacked ? 0 : (greatest - least) / 20 || Math.abs(least) / 2 || 0.5;
    const across = (x) => left + ((x - low) / (high - low)) * (width - left - right);
    const down = (y) =>
      height - bottom - ((y - least + margin) / (greatest - least + 2 * margin)) * (height - top - bottom);
    const marks = figure.svg.querySelector(".ticks");
    if (marks === null) return; // a chart without a finite value
    marks.replaceChildren();
    for (const x of ticks(low, high)) {
      marks.append(element("line", { x1: across(x), x2: across(x), y1: top, y2: height - bottom }));
      const isLast = across(x) > width - 30; // the last number is not cut
      const place = { x: isLast ? width - 2 : across(x), "text-anchor": isLast ? "end" : "middle" };
      marks.append(element("text", { ...place, y: height - bottom + 18 }, number(x)));
    }
    for (const y of ticks(least - margin, greatest + margin)) {
      marks.append(element("line", { x1: left, x2: width - right, y1: down(y), y2: down(y) }));
      marks.append(element("text", { x: left - 6, y: down(y) + 4, "text-anchor": "end" }, number(y)));
    }
    const lines = figure.svg.querySelector(".lines");
    lines.replaceChildren();
    for (const each of figure.series) {
      const edge = (values) => each.x.map((x, at) => `${across(x).toFixed(1)},${down(values[at]).toFixed(1)}`);
      if (each.base) {
        const points = [...edge(each.y), ...edge(each.base).reverse()].join(" ");
        lines.append(element("polygon", { class: each.style, points }));
        continue;
      }
      const points = edge(each.y).join(" ");
      lines.append(element("polyline", { class: each.style, points }));
      if (each.x.length === 1)
        lines.append(element("circle", { class: each.style, cx: across(each.x[0]), cy: down(each.y[0]), r: 3 }));
    }
  }

  function show(range) {
    shown = range;
    figures.forEach(draw);
    for (const button of document.querySelectorAll("button.all")) button.hidden = range === null;
  }

  // The step at a pointer's place, inside the plot.
  function stepAt(figure, event) {
    const box = figure.svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * width - left) / (width - left - right);
    const [low, high] = limitsOf(figure);
    return low + Math.min(Math.max(share, 0), 1) * (high - low);
  }

  function read(figure, step) {
    const parts = figure.series.map((each) => {
      let best = 0;
      each.x.forEach((x, at) => {
        if (Math.abs(x - step) < Math.abs(each.x[best] - step)) best = at;
      });
      return `${each.label}: ${number(each.y[best] - (each.base?.[best] ?? 0))} at step ${number(each.x[best])}`;
    });
    figure.svg.closest("figure").querySelector("figcaption").textContent = parts.join(" · ");
    figure.svg.querySelector(".cursor")?.remove();
    const x = placeOf(figure, step);
    figure.svg.append(element("line", { class: "cursor", x1: x, x2: x, y1: top, y2: height - bottom }));
  }

  function onKey(figure, event) {
    const [low, high] = limitsOf(figure);
    const steps = [...new Set(stepsOf(figure))].filter((x) => x >= low && x <= high).sort((a, b) => a - b);
    if (!steps.length) return;
    let at = steps.findIndex((x) => x >= (figure.step ?? low));
    if (at < 0) at = steps.length - 1;
    const jump = Math.max(1, Math.round(steps.length / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -jump, PageDown: jump, Home: -steps.length, End: steps.length };
    if (event.key in moves) {
      const start = figure.step === undefined && event.key === "ArrowRight" ? -1 : at;
      figure.step = steps[Math.min(Math.max(start + moves[event.key], 0), steps.length - 1)];
      read(figure, figure.step);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const half = (high - low) * (event.key === "-" ? 1 : 0.25), middle = figure.step ?? (low + high) / 2;
      if (half >= 0.5) show(event.key === "-" && half * 2 > 1e15 ? null : clipped(figure, middle - half, middle + half));
    } else if (event.key === "Escape" || event.key === "0") {
      show(null);
    } else return;
    event.preventDefault();
  }

  function clipped(figure, low, high) {
    const all = stepsOf(figure), least = Math.min(...all), greatest = Math.max(...all);
    return low <= least && high >= greatest ? null : [Math.max(low, least), Math.min(high, greatest)];
  }

  function listen(figure) {
    let start = null;
    const mark = (from, to) => {
      figure.svg.querySelector(".selection")?.remove();
      if (from === null) return;
      const x = Math.min(placeOf(figure, from), placeOf(figure, to));
      const attributes = { class: "selection", x, y: top, width: Math.abs(placeOf(figure, to) - placeOf(figure, from)) };
      figure.svg.append(element("rect", { ...attributes, height: height - top - bottom }));
    };
    figure.svg.addEventListener("pointerdown", (event) => {
      start = stepAt(figure, event);
    });
    figure.svg.addEventListener("pointermove", (event) => {
      const step = stepAt(figure, event);
      read(figure, step);
      if (start !== null) mark(start, step);
    });
    figure.svg.addEventListener("pointerleave", () => {
      start = null;
      mark(null);
      figure.svg.querySelector(".cursor")?.remove();
    });
    figure.svg.addEventListener("pointerup", (event) => {
      const end = stepAt(figure, event);
      const [low, high] = limitsOf(figure);
      mark(null);
      if (start !== null && Math.abs(end - start) > (high - low) / 50) show([Math.min(start, end), Math.max(start, end)]);
      start = null;
    });
    figure.svg.addEventListener("dblclick", () => show(null));
    figure.svg.addEventListener("keydown", (event) => onKey(figure, event));
  }

  function start() {
    const data = document.getElementById("data");
    const charts = data === null ? [] : JSON.parse(data.textContent);
    figures = charts.map((series, index) => ({ series, svg: document.getElementById(`chart-${index}`) }));
    first = figures.map(({ svg }) => svg.innerHTML);
    figures.filter(({ series }) => series.length).forEach(listen);
    for (const button of document.querySelectorAll("button.all")) button.addEventListener("click", () => show(null));
    if (shown !== null) show(shown);
  }

  document.addEventListener("paceline:refresh", start);
  start();
})();
