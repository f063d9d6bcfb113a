/* Where the memory is: the device and its KV pool as bars, every line in a table, and the lines over time. */

import { byId, element, put, set, swatch, tip } from "./dom.js";
import { addPlot, band, caption, current, hatch, isNow, onCursor, redraw, ticks, valueAxis } from "./plot.js";
import { bytes, linesOf, poolBytes, share } from "./words.js";

const FIXED_FIRST = ["weights", "activations", "workspace", "padding"];
let ledger = null, samples = [], folded = true;
const bars = {};

export function beginMemory() {
  bars.device = addBar("device-bar", "Device memory by line");
  bars.pool = addBar("pool-bar", "KV pool by line");
  addPlot(byId("memory-plot"), {
    height: 240,
    label: "Memory by line over the last ten minutes; the table of lines has the figures. Arrow keys move the cursor.",
    draw: drawArea,
  });
  onCursor(showTable);
  byId("fold").addEventListener("click", () => {
    folded = !folded;
    set(byId("fold"), "aria-pressed", String(folded));
    put(byId("area-title"), folded ? "The KV pool over time" : "The whole device over time");
    redraw();
  });
}

export function showMemory(now, timeline) {
  ledger = now;
  samples = timeline;
  const lines = linesOf(ledger), pool = lines.filter((line) => line.pool);
  const inPool = poolBytes(ledger);
  const fixed = lines.filter((line) => !line.pool);
  put(byId("device-size"), bytes(ledger.budget));
  put(byId("pool-size"), bytes(inPool));
  put(byId("pool-share"), `${share(inPool / ledger.budget)} of the device`);
  const outside = fixed.filter((line) => !FIXED_FIRST.includes(line.key));
  const first = fixed.filter((line) => FIXED_FIRST.includes(line.key));
  fillBar(bars.device, [...first, ...pool, ...outside], ledger.budget, "the device");
  fillBar(bars.pool, pool, inPool, "the pool");
  showTable();
  if (!byId("meanings").childElementCount)
    byId("meanings").append(...lines.flatMap((line) => [element("dt", {}, swatch(line.mark), line.name), element("dd", {}, line.meaning)]));
}

/* -- bars -------------------------------------------------------------------------------------------------------- */

function addBar(id, name) {
  const box = byId(id), bar = { box, parts: [], at: -1, of: 1, whole: "" };
  set(box, "aria-label", name);
  box.addEventListener("pointermove", (event) => {
    const part = bar.parts.findIndex(({ node }) => node === event.target);
    tell(bar, part, event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", () => tell(bar, -1));
  box.addEventListener("blur", () => tell(bar, -1));
  box.addEventListener("focus", () => step(bar, 0));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") tip(null);
    if (!by) return;
    event.preventDefault();
    step(bar, by);
  });
  return bar;
}

/* The arrow keys go from line to line. */
function step(bar, by) {
  if (!bar.parts.length) return;
  const at = Math.min(bar.parts.length - 1, Math.max(0, bar.at + by));
  const area = bar.parts[at].node.getBoundingClientRect();
  tell(bar, at, area.left + area.width / 2, area.bottom - 10);
  put(byId("memory-told"), wordsFor(bar, bar.parts[at].line).join(". "));
}

function tell(bar, at, x = 0, y = 0) {
  bar.at = at;
  bar.parts.forEach(({ node }, i) => node.classList.toggle("at", i === at));
  tip(at < 0 ? null : wordsFor(bar, bar.parts[at].line), x, y);
}

function wordsFor(bar, line) {
  const value = ledger.lines[line.key];
  return [line.name, `${bytes(value)}, ${share(value / bar.of)} of ${bar.whole}`, line.meaning];
}

function fillBar(bar, lines, of, whole) {
  const there = lines.filter((line) => ledger.lines[line.key] > 0);
  if (there.map((line) => line.key).join() !== bar.parts.map((part) => part.line.key).join()) {
    bar.parts = there.map((line) => ({ line, node: element("i", { class: line.mark }) }));
    bar.box.replaceChildren(...bar.parts.map((part) => part.node));
    bar.at = -1;
  }
  bar.of = of || 1;
  bar.whole = whole;
  for (const { line, node } of bar.parts) node.style.width = (100 * ledger.lines[line.key]) / bar.of + "%";
}

/* -- the table --------------------------------------------------------------------------------------------------- */

const rows = new Map();

/* Every line with its bytes and share: now, or at the plots' cursor. */
function showTable() {
  if (!ledger) return;
  const sample = isNow() ? null : samples[current()];
  const values = sample?.lines ?? ledger.lines;
  put(byId("lines-caption"), `Every line, ${caption()}`);
  for (const line of linesOf(ledger)) {
    if (!rows.has(line.key)) rows.set(line.key, addLine(line));
    const { tr, size, part } = rows.get(line.key), value = values[line.key] ?? 0;
    tr.classList.toggle("nil", value === 0);
    put(size, bytes(value));
    put(part, share(value / ledger.budget));
  }
  put(byId("lines-total"), bytes(ledger.budget));
}

function addLine(line) {
  const size = element("td"), part = element("td");
  const tr = element("tr", {}, element("th", { scope: "row" }, swatch(line.mark), line.name), size, part);
  tr.addEventListener("pointermove", (event) => tip([line.name, line.meaning], event.clientX, event.clientY));
  tr.addEventListener("pointerleave", () => tip(null));
  byId("lines-body").append(tr);
  return { tr, size, part };
}

/* -- over time --------------------------------------------------------------------------------------------------- */

function drawArea(view, g, list) {
  if (!ledger) return;
  const lines = linesOf(ledger), pool = lines.filter((line) => line.pool), fixed = lines.filter((line) => !line.pool);
  const stacked = folded ? pool : [...fixed.filter((line) => line.key !== "outside"), ...pool, ...fixed.filter((line) => line.key === "outside")];
  const limit = folded ? poolBytes(ledger) : ledger.budget;
  const y = (value) => g.height * (1 - Math.min(1, value / (limit || 1)));
  const hatched = hatch(view, "reserved-hatch");
  let low = list.map(() => 0);
  for (const line of stacked) {
    const base = low, high = base.map((value, i) => value + (list[i].lines[line.key] ?? 0));
    if (high.some((value, i) => value > base[i])) band(view, g, low, high, y, line.key === "reserved" ? hatched : line.mark);
    low = high;
  }
  valueAxis(view, g, [...ticks(limit * 0.9, 4, 2), limit], y, bytes);
}
