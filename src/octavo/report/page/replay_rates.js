/* Goodput, requests within the SLO, concurrency and first token over the offered rate. */

const LOW = { left: 52, right: 14, top: 12, bottom: 36 };

const shown = (key) => data.curves.some((curve) => curve[key].some((value) => value !== null));
const most = (key) => Math.max(1e-9, ...data.curves.flatMap((curve) => curve[key].map((value) => value ?? 0)));
const fastest = Math.max(1e-9, ...data.curves.flatMap((curve) => curve.rates));
const paint = (curve) => `var(--r${data.curves.indexOf(curve) % 9})`;

const GRAPHS = [
  { key: "goodput", title: "Goodput", unit: "requests a second within the SLO", words: (v) => number(v, v < 10 ? 1 : 0), ideal: true },
  { key: "attained", title: "Within the SLO", unit: "share of the requests", words: (v) => number(100 * v) + " %", top: 1 },
  { key: "running", title: "Concurrency", unit: "requests running, mean", words: (v) => number(v) },
  { key: "ttft", title: "First token, p99", unit: "seconds, logarithmic", words: (v) => (v < 1 ? number(v * 1000) + " ms" : number(v) + " s"), log: true },
];

/* y of a value, and where to put figures beside the axis. */
function scaleOf(graph, height) {
  const room = height - LOW.top - LOW.bottom, bottom = LOW.top + room;
  if (!graph.log) {
    const { values, step } = ticks(graph.top ?? most(graph.key), 4), top = graph.top ?? Math.ceil(most(graph.key) / step - 1e-9) * step;
    const marks = values.includes(top) ? values : [...values, top];
    return { y: (value) => bottom - (value / top) * room, marks, top };
  }
  const all = data.curves.flatMap((curve) => curve.ttft).filter((value) => value > 0);
  if (data.ttft_bound) all.push(data.ttft_bound);
  const low = Math.floor(Math.log10(Math.min(...all))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...all)) - 1e-9));
  const marks = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
  return { y: (value) => bottom - ((Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)) * room, marks };
}

function drawGraph(figure, graph) {
  const svg = figure.querySelector("svg"), width = Math.max(260, figure.clientWidth), height = 236;
  const inner = width - LOW.left - LOW.right, bottom = height - LOW.bottom, x = (rate) => LOW.left + (rate / fastest) * inner;
  const { y, marks, top } = scaleOf(graph, height);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.append(shape("rect", { class: "ground", x: LOW.left, y: LOW.top, width: inner, height: bottom - LOW.top }));
  for (const value of marks) {
    svg.append(shape("line", { class: "tick", x1: LOW.left, x2: LOW.left + inner, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: LOW.left - 6, y: y(value) + 4, "text-anchor": "end" }, graph.words(value)));
  }
  const { values, step } = ticks(fastest, inner / 70), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (const rate of values) svg.append(shape("text", { x: x(rate), y: bottom + 15, "text-anchor": "middle" }, number(rate, digits)));
  svg.append(shape("text", { x: LOW.left + inner, y: bottom + 30, "text-anchor": "end" }, "requests offered a second"));
  if (graph.ideal) {
    const end = Math.min(fastest, top);
    svg.append(shape("line", { class: "ideal", x1: x(0), y1: y(0), x2: x(end), y2: y(end) }));
  }
  if (graph.log && data.ttft_bound) {
    const at = y(data.ttft_bound);
    svg.append(shape("line", { class: "bound", x1: LOW.left, x2: LOW.left + inner, y1: at, y2: at }));
  }
  for (const curve of data.curves) drawCurve(svg, graph, curve, x, y, bottom);
  if (graph.log && data.ttft_bound)
    svg.append(shape("text", { class: "named", x: LOW.left + 6, y: y(data.ttft_bound) - 6 }, "SLO " + clock(data.ttft_bound)));
}

function drawCurve(svg, graph, curve, x, y, bottom) {
  const there = curve.rates.map((rate, i) => [rate, curve[graph.key][i]]).filter(([, value]) => value !== null);
  if (curve.knee !== null)
    svg.append(shape("line", { class: "knee", x1: x(curve.knee), x2: x(curve.knee), y1: LOW.top, y2: bottom, style: "stroke:" + paint(curve) }));
  const path = there.map(([rate, value]) => `${x(rate).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
  if (there.length > 1) svg.append(shape("path", { class: "line", d: "M" + path, style: "stroke:" + paint(curve) }));
  for (const [rate, value] of there) {
    const dot = shape("circle", { class: "dot", cx: x(rate), cy: y(value), r: 3.5, style: "fill:" + paint(curve) });
    const words = graph.key === "ttft" ? clock(value) : graph.key === "attained" ? share(value) : number(value, 2);
    dot.append(shape("title", {}, `${curve.name} at ${number(rate, 2)} requests/s: ${words}`));
    svg.append(dot);
  }
}

const graphs = [];
function beginRates() {
  const box = document.getElementById("curves");
  if (!box) return;
  for (const graph of GRAPHS.filter(({ key }) => shown(key))) {
    const figure = element("figure"), caption = element("figcaption", {}, graph.title), svg = shape("svg", { role: "img" });
    svg.setAttribute("aria-label", `${graph.title}, ${graph.unit}, over the offered rate; the numbers are in the table below`);
    caption.append(element("small", {}, graph.unit));
    const legend = element("ul", { class: "legend" });
    for (const curve of data.curves) {
      const item = element("li"), chip = element("i");
      chip.style.background = paint(curve);
      item.append(chip, curve.name);
      legend.append(item);
    }
    figure.append(caption, legend, svg);
    box.append(figure);
    graphs.push(() => drawGraph(figure, graph));
  }
}
