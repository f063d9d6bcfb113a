/* Plots over time: rows of title, plot and figures that share one time axis and one cursor. */

import { element, put, shape, swatch } from "./dom.js";
import { clock, number } from "./words.js";

export const LEFT = 56, RIGHT = 10, AXIS = 22;
const SHORTEST = 60; // seconds on the axis even if fewer have passed
const views = [];
let samples = [], cursor = null; // cursor: a moment of the server's clock, or null for now

/* options: {title, height, label, note?(samples), draw(view, g, samples), values(samples, index)}; returns the view. */
export function addPlot(box, options) {
  const plot = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": options.label });
  const svg = shape("svg", { "aria-hidden": "true" });
  plot.append(svg);
  const panel = element("table", { class: "values" });
  const row = element("div", { class: "row" });
  const view = { options, plot, svg, panel, note: element("small"), seen: false, drawn: false, marker: null };
  plot.style.minHeight = options.height + AXIS + "px"; // nothing below moves when it is drawn
  if (options.title) row.append(element("h3", {}, options.title, view.note));
  else row.classList.add("bare");
  row.append(plot);
  if (options.values) row.append(panel);
  box.append(row);
  follow(view);
  new IntersectionObserver(([entry]) => {
    view.seen = entry.isIntersecting;
    if (view.seen) draw(view);
  }).observe(plot);
  views.push(view);
  return view;
}

/* New samples: what is on the screen is drawn anew. */
export function showSamples(list) {
  samples = list;
  redraw();
}

export function redraw() {
  for (const view of views) if (view.seen || !view.drawn) draw(view);
}

/* The sample under the cursor, or the last one. */
export function current() {
  if (cursor === null || !samples.length) return samples.length - 1;
  let low = 0, high = samples.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (samples[middle].at <= cursor) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

export const isNow = () => cursor === null;

export function caption() {
  if (isNow() || !samples.length) return "now";
  const ago = samples[samples.length - 1].at - samples[current()].at;
  return ago < 0.5 ? "now" : clock(Math.round(ago)) + " ago";
}

function geometry(view) {
  const width = Math.max(200, view.plot.clientWidth), inner = width - LEFT - RIGHT;
  const last = samples.length ? samples[samples.length - 1].at : 0;
  const span = Math.max(SHORTEST, samples.length ? last - samples[0].at : 0);
  return { width, inner, height: view.options.height, last, span, x: (t) => LEFT + inner * (1 - (last - t) / span) };
}

function draw(view) {
  const g = geometry(view), { svg, options } = view;
  view.drawn = samples.length > 0;
  const full = options.height + AXIS;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${g.width} ${full}`);
  svg.setAttribute("height", full);
  svg.append(shape("rect", { class: "ground", x: LEFT, y: 0, width: g.inner, height: options.height }));
  if (samples.length) options.draw(view, g, samples);
  else svg.append(shape("text", { x: LEFT + g.inner / 2, y: options.height / 2, "text-anchor": "middle" }, "nothing recorded yet"));
  timeAxis(view, g);
  view.marker = shape("line", { class: "cursor", y1: 0, y2: options.height, visibility: "hidden" });
  svg.append(view.marker);
  if (options.note) put(view.note, samples.length ? options.note(samples) : "");
  show(view, g);
}

/* The cursor and the figures beside the plot. */
function show(view, g = geometry(view)) {
  if (view.marker) {
    view.marker.setAttribute("visibility", isNow() ? "hidden" : "visible");
    if (!isNow()) for (const end of ["x1", "x2"]) view.marker.setAttribute(end, g.x(cursor).toFixed(1));
  }
  if (view.options.values) fill(view.panel, samples.length ? view.options.values(samples, current()) : []);
}

function timeAxis(view, g) {
  const step = [10, 15, 30, 60, 120, 300].find((one) => (one / g.span) * g.inner >= 76) ?? 600;
  for (let ago = 0; ago <= g.span; ago += step) {
    const x = g.x(g.last - ago).toFixed(1);
    view.svg.append(shape("line", { class: "tick", x1: x, x2: x, y1: 0, y2: view.options.height }));
    const words = ago === 0 ? "now" : ago < 60 ? `−${ago} s` : `−${ago / 60} min`;
    view.svg.append(shape("text", { x, y: view.options.height + 16, "text-anchor": ago === 0 ? "end" : "middle" }, words));
  }
}

/* lines: [[class of the swatch, words, figure, is nothing]] */
function fill(table, lines) {
  const rows = lines.map(([mark, words, figure, nil]) =>
    element("tr", { class: nil ? "nil" : null }, element("th", { scope: "row" }, swatch(mark), words), element("td", {}, figure)));
  table.replaceChildren(element("caption", {}, caption()), element("tbody", {}, ...rows));
}

/* The pointer or the arrow keys move the one cursor of all plots. */
function follow(view) {
  const { plot } = view;
  const move = (event) => {
    const g = geometry(view), area = plot.getBoundingClientRect();
    const x = Math.min(LEFT + g.inner, Math.max(LEFT, event.clientX - area.left));
    cursor = samples.length ? g.last - g.span * (1 - (x - LEFT) / g.inner) : null;
    moved();
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  for (const name of ["pointerleave", "blur"])
    plot.addEventListener(name, () => {
      cursor = null;
      moved();
    });
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1000, End: 1000 }[event.key];
    if (!by || !samples.length) return;
    event.preventDefault();
    const last = samples[samples.length - 1].at, g = geometry(view);
    cursor = Math.min(last, Math.max(samples[0].at, (cursor ?? last) + (by * g.span) / 60));
    moved();
  });
}

const watchers = [];
export const onCursor = (watcher) => watchers.push(watcher);
let waiting = false;
function moved() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const view of views) if (view.seen) show(view);
    for (const watcher of watchers) watcher();
  });
}

/* -- shapes ------------------------------------------------------------------------------------------------------ */

/* The area between two lists of values, each holding until the next sample. */
export function band(view, g, low, high, y, fill) {
  const d = `M${stairs(g, high, y).join("L")}L${stairs(g, low, y).reverse().join("L")}Z`;
  view.svg.append(shape("path", { d, class: fill.startsWith("url") ? null : "fill " + fill, fill: fill.startsWith("url") ? fill : null }));
}

function stairs(g, values, y) {
  const out = [];
  samples.forEach(({ at }, i) => {
    const height = y(values[i]).toFixed(1);
    if (i > 0) out.push(`${g.x(at).toFixed(1)} ${y(values[i - 1]).toFixed(1)}`);
    out.push(`${g.x(at).toFixed(1)} ${height}`);
  });
  if (samples.length === 1) out.push(`${(g.x(samples[0].at) + 1).toFixed(1)} ${y(values[0]).toFixed(1)}`);
  return out;
}

/* A line with gaps where nothing happened; a value without neighbours is a dot. */
export function curve(view, g, values, y, kind) {
  const there = (i) => typeof values[i] === "number";
  let line = "", dots = "";
  values.forEach((value, i) => {
    if (!there(i)) return;
    const point = `${g.x(samples[i].at).toFixed(1)} ${y(value).toFixed(1)}`;
    if (there(i - 1)) line += "L" + point;
    else if (there(i + 1)) line += "M" + point;
    else dots += `M${point}h.01`;
  });
  view.svg.append(shape("path", { d: line, class: "curve " + kind }), shape("path", { d: dots, class: `curve dots ${kind}` }));
}

/* Lines and labels of the value axis; words(value) says them. */
export function valueAxis(view, g, values, y, words) {
  for (const value of values) {
    const at = y(value);
    view.svg.append(shape("line", { class: "tick", x1: LEFT, x2: LEFT + g.inner, y1: at, y2: at }));
    const text = { x: LEFT - 6, y: Math.min(g.height, Math.max(9, at + 4)), "text-anchor": "end" };
    view.svg.append(shape("text", text, words(value)));
  }
}

/* Round steps of 1, 2 or 5 times a power of ten (of two where `base` is 2), from 0 to the limit. */
export function ticks(limit, wanted, base = 10) {
  const rough = limit / Math.max(1, wanted), power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = base === 2 ? [1, 2] : [1, 2, 5, 10];
  const step = power * (factors.find((factor) => factor * power >= rough * 0.999) ?? base);
  return Array.from({ length: Math.floor(limit / step + 1.0001) }, (_, i) => i * step);
}

/* Hatched like the reserved memory in bars and map. */
export function hatch(view, id) {
  const pattern = shape("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(shape("rect", { width: 5, height: 5, class: "fill reserved" }), shape("rect", { width: 1.5, height: 5, class: "fill stripe" }));
  const defs = shape("defs");
  defs.append(pattern);
  view.svg.append(defs);
  return `url(#${id})`;
}

export const most = (lists) => lists.flat().reduce((high, value) => Math.max(high, value ?? 0), 0);
export const total = (causes) => number(Object.values(causes).reduce((sum, count) => sum + count, 0));
