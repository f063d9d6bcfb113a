/* What all plots share: the data, one time axis, one cursor, one chosen request, rows of label, plot and values. */

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const state = { stretch: false, cursor: null, request: null };
const views = []; // every plot: {run, draw(), show()}
const LEFT = 43, RIGHT = 8, AXIS = 30;

/* Ids, not positions: a request has one colour under every strategy, also where others were refused. */
const ordinals = new Map();
for (const run of runs) {
  run.requests.forEach((request, i) => {
    if (!ordinals.has(request[0])) ordinals.set(request[0], ordinals.size);
    request.index = i;
  });
  const t = run.timeline.t;
  run.end = Math.max(t.length ? t[t.length - 1] : 0, ...run.requests.map((request) => request[4] ?? 0));
}
const longest = Math.max(1e-9, ...runs.map((run) => run.end));

function element(name, attributes = {}, text = null) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

function shape(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const span = (run) => (state.stretch ? Math.max(run.end, 1e-9) : longest);
const number = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function clock(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return number(s * 1000) + " ms";
  return number(s, s < 10 ? 2 : 1) + " s";
}

function share(value) {
  if (value > 0 && value < 0.0005) return "<0.1 %";
  return number(100 * value, 1) + " %";
}

/* Round steps of 1, 2 or 5 times a power of ten. */
function ticks(limit, wanted) {
  const rough = limit / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const out = [];
  for (let i = 0; i * step <= limit * 1.0001; i++) out.push(i * step);
  return { step, values: out };
}

/* Index of the last entry of the sorted list that is not after t; -1: before the first. */
function before(list, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/* One strategy's row. make(svg, canvas, geometry) draws; values(table) fills the panel beside it. */
function addRow(box, run, options) {
  const row = element("div", { class: "row" });
  const title = element("h3", {}, run.name);
  const note = element("small");
  title.append(note);
  const plot = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": options.label(run) });
  const canvas = options.canvas ? element("canvas") : null;
  const svg = shape("svg");
  if (canvas) plot.append(canvas);
  plot.append(svg);
  const panel = element("table", { class: "values" });
  row.append(title, plot, panel);
  box.append(row);
  const last = run === runs[runs.length - 1];
  const view = { run, plot, svg, canvas, panel, last, height: options.height(run), marker: null };
  view.geometry = () => {
    const width = Math.max(240, plot.clientWidth);
    const inner = width - LEFT - RIGHT;
    return { width, inner, height: view.height, x: (t) => LEFT + (t / span(run)) * inner };
  };
  view.draw = () => {
    const g = view.geometry(), full = view.height + (last || state.stretch ? AXIS : 6);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${g.width} ${full}`);
    svg.setAttribute("height", full);
    if (canvas) fit(canvas, g.width, full);
    else svg.append(shape("rect", { class: "ground", x: LEFT, y: 0, width: g.inner, height: view.height }));
    options.draw(view, g);
    timeAxis(view, g);
    view.marker = shape("line", { class: "cursor", y1: 0, y2: view.height, visibility: "hidden" });
    svg.append(view.marker);
    note.textContent = options.note(run);
  };
  view.show = () => {
    const g = view.geometry(), t = state.cursor;
    const seen = t !== null && t <= span(run);
    view.marker.setAttribute("visibility", seen ? "visible" : "hidden");
    if (seen) for (const end of ["x1", "x2"]) view.marker.setAttribute(end, g.x(t).toFixed(1));
    fill(panel, options.values(run, t));
  };
  point(view, options);
  views.push(view);
}

function fit(canvas, width, height) {
  const scale = Math.max(1, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.aspectRatio = `${width} / ${height}`;
  canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
}

function timeAxis(view, g) {
  const { values, step } = ticks(span(view.run), g.inner / 90), shown = view.last || state.stretch;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (const t of values) {
    const x = g.x(t).toFixed(1);
    view.svg.append(shape("line", { class: "tick", x1: x, x2: x, y1: 0, y2: view.height }));
    if (shown)
      view.svg.append(shape("text", { x, y: view.height + 14, "text-anchor": "middle" }, number(t, digits)));
  }
  if (shown)
    view.svg.append(
      shape("text", { x: LEFT + g.inner, y: view.height + 27, "text-anchor": "end" }, "seconds since the first arrival"));
  const end = g.x(view.run.end);
  if (g.x(span(view.run)) - end > 90)
    view.svg.append(shape("text", { class: "end", x: end + 6, y: 12 }, view.run.peak ? "done after " + clock(view.run.end) : "nothing ran"));
}

/* rows: {caption, lines: [[colour class or variable, words, figure, figure, dim]]} */
function fill(table, rows) {
  table.replaceChildren(element("caption", {}, rows.caption));
  for (const [mark, words, first, second, dim] of rows.lines) {
    const tr = element("tr", dim ? { class: "nil" } : {});
    const name = element("td");
    const chip = element("i", mark.startsWith("--") ? {} : { class: mark });
    if (mark.startsWith("--")) chip.style.background = `var(${mark})`;
    name.append(chip, words);
    tr.append(name, element("td", {}, first), element("td", {}, second));
    table.append(tr);
  }
}

/* The pointer or the arrow keys move the one cursor; what is under the pointer may choose a request. */
function point(view, options) {
  const { plot, run } = view;
  plot.addEventListener("pointermove", (event) => {
    const g = view.geometry(), area = plot.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * g.width;
    const y = ((event.clientY - area.top) / area.width) * g.width;
    const inside = x >= LEFT && x <= LEFT + g.inner && y <= view.height;
    state.cursor = inside ? ((x - LEFT) / g.inner) * span(run) : null;
    const found = inside && options.pick ? options.pick(view, state.cursor, y) : null;
    tell(event, found ? found.words : null);
    choose(found ? found.request : null);
    refresh();
  });
  const leave = () => {
    state.cursor = null;
    tell(null, null);
    choose(null);
    refresh();
  };
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const from = state.cursor ?? 0;
    state.cursor = Math.min(span(run), Math.max(0, from + (by * span(run)) / 100));
    refresh();
  });
}

let waiting = false, repaint = false;
function refresh() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (repaint) for (const view of views) view.paint?.();
    repaint = false;
    for (const view of views) view.show();
  });
}

function choose(id) {
  if (state.request === id) return;
  state.request = id;
  repaint = true;
}

const tip = document.getElementById("tip");
function tell(event, words) {
  tip.hidden = !words;
  if (!words) return;
  tip.replaceChildren(element("b", {}, words[0]), "\n" + words.slice(1).join("\n"));
  const room = tip.getBoundingClientRect();
  const right = event.clientX + 16 + room.width < window.innerWidth;
  tip.style.left = (right ? event.clientX + 16 : event.clientX - 16 - room.width) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, window.innerHeight - room.height - 6)) + "px";
}

/* What there is to know about a request. */
function life(request) {
  const [, arrival, admitted, first, finished, prompt, output, cached, preemptions, reason] = request;
  const out = [`${number(prompt)} prompt tokens${cached ? ` (${number(cached)} from the cache)` : ""}, ${number(output)} generated`];
  if (admitted === null) return [...out, "never admitted"];
  out.push(`queued ${clock(admitted - arrival)}, first token after ${first === null ? "–" : clock(first - arrival)}`);
  out.push(finished === null ? "not finished" : `done after ${clock(finished - arrival)} (${reason ?? "–"})`);
  if (preemptions) out.push(`preempted ${preemptions === 1 ? "once" : preemptions + " times"}`);
  return out;
}

function drawAll() {
  for (const view of views) view.draw();
  for (const view of views) view.show();
}
