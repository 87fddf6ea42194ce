"use strict";
// Draws the charts of a report with BokehJS, from the numbers of the element #data: one list of series for each chart.
// All charts share the range of steps. No text of a run is given to Bokeh as markup or as a label, which it could read as
// TeX: names stand in the page's own legend, and in columns of the data that tooltips show as text.
(() => {
  const MOST_NAME = 30; // characters of a name in a tooltip, which does not wrap
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const charts = JSON.parse(document.getElementById("data").textContent)
    .map((series, index) => ({ series, place: document.getElementById(`chart-${index}`), hidden: new Set() }))
    .filter(({ series }) => series.length);
  if (!charts.length) return;
  const steps = charts.flatMap(({ series }) => series.flatMap(({ x }) => [x[0], x[x.length - 1]]));
  let [low, high] = [Math.min(...steps), Math.max(...steps)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const range = new Bokeh.Range1d({ start: low, end: high, bounds: [low, high] });
  const buttons = [...document.querySelectorAll("button.all")];
  const paints = []; // set the colours, which depend on the light or dark mode

  const number = (value) => {
    if (Number.isInteger(value) && Math.abs(value) >= 1e4 && Math.abs(value) < 1e15) return value.toLocaleString("en");
    const text = value.toPrecision(4);
    return text.includes("e") ? Number(text).toExponential() : String(Number(text));
  };
  const show = (start, end) => range.setv({ start: Math.max(start, low), end: Math.min(end, high) });

  // Sets colours of a glyph now and when the mode changes, also of the variants that are drawn under the pointer.
  function colour(renderer, name, properties) {
    const variants = ["glyph", "hover_glyph", "selection_glyph", "nonselection_glyph", "muted_glyph"];
    paints.push(() => {
      const colours = Object.fromEntries(properties.map((property) => [property, style(name)]));
      for (const variant of variants) renderer[variant]?.setv?.(colours);
    });
  }

  // Adds a line, or an area of a stacked chart. Returns its glyphs, and the one that tells its values.
  function add(figure, { label, style: names, x, y, base }) {
    const own = `run${/colour(\d)/.exec(names)[1]}`;
    const shown = y.map((value, at) => number(value - (base?.[at] ?? 0)));
    const name = label.length > MOST_NAME ? `${label.slice(0, MOST_NAME)}…` : label;
    const data = { x, y, base: base ?? y, shown, label: x.map(() => name) };
    const source = new Bokeh.ColumnDataSource({ data });
    const of = { x: { field: "x" }, y: { field: "y" }, source };
    const isFaint = names.includes("faint"), width = base ? 0.5 : 1.8;
    const line = figure.line({
      ...of,
      line_width: isFaint ? 1 : width,
      line_alpha: isFaint ? 0.35 : 1,
      line_dash: names.includes("dashed") ? [5, 3] : [],
    });
    const glyphs = [line];
    if (base) {
      const area = figure.varea({ x: of.x, y1: { field: "base" }, y2: of.y, source, fill_alpha: 0.55 });
      glyphs.push(area);
      colour(area, own, ["fill_color"]);
    }
    if (x.length === 1) {
      const dot = figure.scatter({ ...of, size: 6 });
      glyphs.push(dot);
      colour(dot, own, ["fill_color", "line_color"]);
    }
    colour(line, own, ["line_color"]);
    return { glyphs, told: x.length === 1 ? glyphs.at(-1) : line };
  }

  function make(chart) {
    const { series } = chart;
    const tops = series.flatMap(({ base, y }) => (base ? y : []));
    const figure = Bokeh.Plotting.figure({
      height: 270,
      sizing_mode: "stretch_width",
      tools: "xpan,reset,save",
      toolbar_location: "above",
      x_range: range,
      window_axis: "x",
      ...(tops.length ? { y_range: new Bokeh.Range1d({ start: 0, end: Math.max(...tops) || 1 }) } : {}),
      outline_line_color: null,
    });
    // not transparent, so that a picture that is saved has the colours of the page
    paints.push(() => figure.setv({ background_fill_color: style("card"), border_fill_color: style("card") }));
    if (!tops.length) figure.y_range.only_visible = true;
    for (const axis of [...figure.xaxes, ...figure.yaxes]) {
      axis.setv({ axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null });
      axis.setv({ major_label_text_font_size: "12px" });
      paints.push(() => axis.setv({ major_label_text_color: style("dim") }));
    }
    for (const axis of figure.xaxes) axis.formatter = new Bokeh.NumeralTickFormatter({ format: "0,0" });
    for (const grid of [...figure.xgrids, ...figure.ygrids]) {
      paints.push(() => grid.setv({ grid_line_color: style("line") }));
    }
    chart.lines = series.map((each) => add(figure, each));
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    const tooltips = [["line", "@label"], ["step", "@x{0,0}"], ["value", "@shown"]];
    const hover = new Bokeh.HoverTool({ tooltips, mode: "vline", renderers: chart.lines.map(({ told }) => told) });
    figure.add_tools(zoom, hover);
    figure.toolbar.setv({ logo: null, autohide: false });
    // a finger that is dragged scrolls the page; the tool can be chosen from the toolbar
    figure.toolbar.active_drag = matchMedia("(pointer: coarse)").matches ? null : zoom;
    return figure;
  }

  function hide({ lines, hidden }) {
    lines.forEach(({ glyphs }, at) => {
      for (const glyph of glyphs) glyph.visible = !hidden.has(at);
    });
  }

  // Makes the entries of a chart's legend buttons that hide and show their lines.
  function listenToLegend(chart) {
    chart.place.closest("figure").querySelectorAll(".legend li").forEach((item, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(...item.childNodes);
      item.append(button);
      button.addEventListener("click", () => {
        if (!chart.hidden.delete(at)) chart.hidden.add(at);
        button.setAttribute("aria-pressed", String(!chart.hidden.has(at)));
        hide(chart);
      });
    });
  }

  function onKey(event) {
    const half = (range.end - range.start) / 2, middle = range.start + half;
    const moves = { ArrowLeft: -half / 2, ArrowRight: half / 2 };
    if (event.key in moves) {
      const by = Math.min(Math.max(moves[event.key], low - range.start), high - range.end);
      show(range.start + by, range.end + by);
    } else if (event.key === "+" || event.key === "=") show(middle - half / 2, middle + half / 2);
    else if (event.key === "-") show(middle - half * 2, middle + half * 2);
    else if (event.key === "Escape" || event.key === "0") show(low, high);
    else return;
    event.preventDefault();
  }

  const page = new Bokeh.Document();
  for (const chart of charts) {
    page.add_root(make(chart));
    listenToLegend(chart);
    chart.place.addEventListener("keydown", onKey);
  }
  const paint = () => paints.forEach((each) => each());
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  for (const button of buttons) button.addEventListener("click", () => show(low, high));
  range.change.connect(() => {
    for (const button of buttons) button.hidden = range.start <= low && range.end >= high;
  });
  const places = charts.map(({ place }) => place);
  window.pacelineCharts = { range, ready: Bokeh.embed.add_document_standalone(page, document.body, places) };
})();
