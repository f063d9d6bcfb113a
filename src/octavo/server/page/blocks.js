/* The block map: every block of the pool as a cell, coloured by request; pointer, tap and arrow keys ask whose it is. */

import { choose, hue, nameFor, onChoice, point, shown } from "./choice.js";
import { byId, colour, element, fit, put, tip } from "./dom.js";
import { BLOCK_STATES, number, plural } from "./words.js";

const SMALLEST = 3, LARGEST = 24, COLOURS = 9;
let map = null, cells = null, at = -1, canvas = null;

export function beginBlocks() {
  canvas = byId("blocks-canvas");
  onChoice(paint);
  document.addEventListener("octavo-theme", paint);
  new ResizeObserver(paint).observe(canvas.parentElement);
  canvas.addEventListener("pointermove", (event) => ask(under(event), event.clientX, event.clientY));
  canvas.addEventListener("pointerdown", (event) => {
    ask(under(event), event.clientX, event.clientY);
    choose(ownerOf(at));
  });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", step);
}

export function showBlocks(answer) {
  map = { ...answer, state: new Array(answer.pages), owner: new Int32Array(answer.pages) };
  let page = 0;
  for (const [length, state, owner] of answer.runs) {
    map.state.fill(state, page, page + length);
    map.owner.fill(owner, page, page + length);
    page += length;
  }
  byId("blocks-none").hidden = answer.pages > 0;
  put(byId("blocks-text"), inWords());
  paint();
}

function inWords() {
  const counts = count(0, map.pages);
  const said = Object.entries(counts).map(([state, blocks]) => `${number(blocks)} ${state}`);
  const holders = plural(map.owners.length, "request holds", "requests hold");
  return `${plural(map.pages, "block")} of ${map.block_size} tokens: ${said.join(", ")}; ${holders} blocks.`;
}

/* {state: blocks}, in the order of BLOCK_STATES. */
function count(from, to) {
  const counts = {};
  for (let page = from; page < to; page++) counts[map.state[page]] = (counts[map.state[page]] ?? 0) + 1;
  return Object.fromEntries(Object.keys(BLOCK_STATES).filter((state) => counts[state]).map((state) => [state, counts[state]]));
}

/* -- drawing ----------------------------------------------------------------------------------------------------- */

/* Cells as large as fit; in a large pool a cell is several consecutive blocks. */
function layout(width) {
  const height = width < 500 ? 240 : 210;
  const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt((width * height) / Math.max(1, map.pages)))));
  const columns = Math.max(1, Math.floor(width / size)), most = columns * Math.floor(320 / size);
  const per = Math.max(1, Math.ceil(map.pages / most)), many = Math.ceil(map.pages / per);
  return { size, columns, per, many, rows: Math.max(1, Math.ceil(many / columns)), gap: size >= 6 ? 1 : 0 };
}

function paint() {
  if (!map) return;
  cells = layout(Math.max(120, canvas.parentElement.clientWidth));
  const context = fit(canvas, cells.columns * cells.size, cells.rows * cells.size);
  canvas.style.width = cells.columns * cells.size + "px";
  const inks = Array.from({ length: COLOURS }, (_, i) => colour("r" + i));
  const pale = inks.map((ink) => emptyPattern(context, ink));
  const plain = { cached: colour("cached"), free: colour("free"), quarantined: colour("quarantined") };
  const standing = shown(), within = standing !== null && map.owners.includes(standing);
  for (let cell = 0; cell < cells.many; cell++) {
    const page = leader(cell), state = map.state[page], owner = map.owner[page];
    const id = owner >= 0 ? map.owners[owner] : null;
    context.globalAlpha = within && id !== standing ? 0.2 : state === "slack" ? 0.5 : 1;
    const owned = id === null ? plain.free : state === "reserved" ? pale[hue(id)] : inks[hue(id)];
    context.fillStyle = plain[state] ?? owned;
    const { x, y, side } = place(cell);
    if (state === "cached") paintCached(context, x, y, side, plain);
    else context.fillRect(x, y, side, side);
  }
  context.globalAlpha = 1;
  if (at >= 0 && at < cells.many) ring(context);
  put(byId("blocks-scale"), cells.per > 1 ? `One cell is ${cells.per} consecutive blocks; it shows one that is in use, if any is.` : "");
}

/* A smaller square on free ground: it is there, and gives way when somebody needs the room. */
function paintCached(context, x, y, side, plain) {
  const inset = side >= 6 ? 2 : 0;
  context.fillStyle = plain.free;
  context.fillRect(x, y, side, side);
  context.fillStyle = plain.cached;
  context.fillRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
}

function place(cell) {
  const { size, columns, gap } = cells;
  return { x: (cell % columns) * size, y: Math.floor(cell / columns) * size, side: size - gap };
}

/* The block a cell shows: its first that somebody holds, else its first. */
function leader(cell) {
  const from = cell * cells.per, to = Math.min(map.pages, from + cells.per);
  for (let page = from; page < to; page++) if (map.owner[page] >= 0) return page;
  return from;
}

function ring(context) {
  const { x, y, side } = place(at);
  context.strokeStyle = colour("ink");
  context.lineWidth = 2;
  context.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
}

/* Pale and hatched: reserved for a request and empty. */
function emptyPattern(context, ink) {
  const tile = element("canvas"), size = 6;
  tile.width = tile.height = size;
  const c = tile.getContext("2d");
  c.globalAlpha = 0.22;
  c.fillStyle = ink;
  c.fillRect(0, 0, size, size);
  c.globalAlpha = 0.8;
  c.strokeStyle = ink;
  c.beginPath();
  for (const shift of [-size, 0, size]) {
    c.moveTo(shift, size);
    c.lineTo(shift + size, 0);
  }
  c.stroke();
  return context.createPattern(tile, "repeat");
}

/* -- asking ------------------------------------------------------------------------------------------------------ */

function under(event) {
  if (!cells) return -1;
  const area = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - area.left) / cells.size), row = Math.floor((event.clientY - area.top) / cells.size);
  const cell = row * cells.columns + column;
  return column >= 0 && column < cells.columns && cell >= 0 && cell < cells.many ? cell : -1;
}

function ownerOf(cell) {
  if (cell < 0) return null;
  const owner = map.owner[leader(cell)];
  return owner >= 0 ? map.owners[owner] : null;
}

/* [which block, whose and in what state] */
function wordsFor(cell) {
  const from = cell * cells.per, to = Math.min(map.pages, from + cells.per), page = leader(cell);
  const title = to - from > 1 ? `Blocks ${number(from)} to ${number(to - 1)}` : `Block ${number(page)}`;
  const owner = ownerOf(cell), state = BLOCK_STATES[map.state[page]] ?? map.state[page];
  const lines = [owner === null ? state : `${state} ${nameFor(owner)}`];
  if (to - from > 1) lines.push(Object.entries(count(from, to)).map(([name, blocks]) => `${blocks} ${name}`).join(", "));
  if (owner !== null) lines.push(`${plural(map.owner.reduce((sum, one) => sum + (map.owners[one] === owner), 0), "block")} in all`);
  return [title, ...lines];
}

function ask(cell, x, y) {
  at = cell;
  if (cell < 0) {
    leave();
    return;
  }
  tip(wordsFor(cell), x, y);
  point(ownerOf(cell));
  paint();
}

function leave() {
  at = -1;
  tip(null);
  point(null);
  paint();
}

function step(event) {
  if (!cells) return;
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -cells.columns, ArrowDown: cells.columns, Home: -cells.many, End: cells.many }[event.key];
  if (event.key === "Enter" || event.key === " ") choose(ownerOf(at));
  else if (event.key === "Escape") choose(null);
  else if (!by) return;
  event.preventDefault();
  if (!by) return;
  const cell = at < 0 ? 0 : Math.min(cells.many - 1, Math.max(0, at + by));
  at = cell;
  const { x, y } = place(cell), area = canvas.getBoundingClientRect();
  ask(cell, area.left + x + cells.size, area.top + y + cells.size);
  put(byId("blocks-told"), wordsFor(cell).join(". "));
}
