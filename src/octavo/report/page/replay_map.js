/* The pool over time: whose each block was. Canvases, since they have thousands of cells. */

const INKS = ["r0", "r1", "r2", "r3", "r4", "r6", "r7", "r8"]; // r5 is too near to the colour of cached prefixes
for (const run of runs) {
  run.byId = new Map(run.requests.map((request) => [request[0], request]));
  for (const id of run.map.requests) if (!ordinals.has(id)) ordinals.set(id, ordinals.size);
}
const ink = (id) => ordinals.get(id) % INKS.length;
const chosen = () => state.request ?? state.pinned ?? null;

/* Pale with lines of full ink: reserved for a request and empty. */
function paleInk(context, full) {
  const scale = Math.max(1, window.devicePixelRatio || 1), side = Math.round(6 * scale);
  const tile = element("canvas");
  tile.width = tile.height = side;
  const c = tile.getContext("2d");
  c.fillStyle = c.strokeStyle = full;
  c.globalAlpha = 0.2;
  c.fillRect(0, 0, side, side);
  c.globalAlpha = 0.65;
  c.lineWidth = scale;
  c.beginPath();
  for (const shift of [-side, 0, side]) c.moveTo(shift, side), c.lineTo(shift + side, 0);
  c.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

function paintMap(view) {
  const { run, canvas, height } = view, g = view.geometry(), context = canvas.getContext("2d");
  const { t, rows, columns, requests } = run.map, only = chosen();
  context.clearRect(0, 0, g.width, canvas.height);
  context.fillStyle = colour("plot");
  context.fillRect(LEFT, 0, g.inner, height);
  const inks = INKS.map(colour), kept = colour("cached");
  const pale = inks.map((full) => paleInk(context, full));
  const scale = Math.max(1, window.devicePixelRatio || 1);
  const snap = (value) => Math.round(value * scale) / scale; // no seams between neighbours
  columns.forEach((column, i) => {
    const x = snap(g.x(t[i])), width = Math.max(1 / scale, snap(g.x(i + 1 < t.length ? t[i + 1] : run.end)) - x);
    let row = 0;
    for (let k = 0; k < column.length; k += 2) {
      const code = column[k], y = snap((row / rows) * height);
      row += column[k + 1];
      if (code === -1) continue;
      const id = code < 0 ? null : requests[code >> 1];
      context.globalAlpha = (only === null || only === id ? 1 : 0.14) * (code < 0 ? 0.55 : 1);
      context.fillStyle = code < 0 ? kept : code & 1 ? inks[ink(id)] : pale[ink(id)];
      context.fillRect(x, y, width, snap((row / rows) * height) - y);
    }
  });
  context.globalAlpha = 1;
}

function sideWords(view, first, last, word) {
  const x = LEFT - 6, middle = view.height / 2;
  view.svg.append(shape("text", { x, y: 9, "text-anchor": "end" }, first));
  view.svg.append(shape("text", { x, y: view.height, "text-anchor": "end" }, last));
  view.svg.append(shape("text", { x: 10, y: middle, "text-anchor": "middle", transform: `rotate(-90 10 ${middle})` }, word));
}

function drawMap(view) {
  view.paint = () => paintMap(view);
  view.paint();
  sideWords(view, "0", number(Math.max(0, Math.round(view.run.pool / view.run.block) - 1)), "block");
}

function pickBlock(view, t, y) {
  const { run } = view, { rows, columns, requests } = run.map, column = columns[before(run.map.t, t)];
  if (!column || t > run.end) return null;
  const cell = Math.min(rows - 1, Math.floor((y / view.height) * rows));
  let code = -1;
  for (let k = 0, row = 0; k < column.length && row <= cell; k += 2) (code = column[k]), (row += column[k + 1]);
  const per = run.pool / run.block / rows, from = Math.floor(cell * per), to = Math.max(from, Math.ceil((cell + 1) * per) - 1);
  const place = `${from === to ? "block " + number(from) : `blocks ${number(from)} to ${number(to)}`}, ${clock(t)}`;
  if (code === -2) return { request: null, words: ["A cached prefix", "kept for reuse, given up when memory is asked for", place] };
  if (code < 0) return { request: null, words: ["Free", place] };
  const id = requests[code >> 1], known = run.byId.get(id);
  const words = [id, `${code & 1 ? "holds token states" : "reserved and empty"}: ${place}`];
  return { request: id, words: known ? [...words, ...life(known)] : [...words, "its life was not kept"] };
}

function holders(run, t) {
  const held = new Map(), column = t > run.end ? [] : run.map.columns[before(run.map.t, t)] ?? [];
  for (let k = 0; k < column.length; k += 2) {
    const owner = column[k] < 0 ? column[k] : column[k] >> 1;
    held.set(owner, (held.get(owner) ?? 0) + column[k + 1]);
  }
  return held;
}

function mapValues(run, t) {
  if (!run.map.columns.length) return { caption: "no snapshots were kept", lines: [] };
  if (t === null) {
    if (run !== runs[0]) return { caption: "", lines: [] };
    const keys = [["key full", "token states"], ["key empty", "reserved and empty"], ["key kept", "cached prefix"], ["key nobody", "free"]];
    return { caption: "", lines: keys.map((key) => [...key, "", "", false]) };
  }
  const held = holders(run, t), rows = run.map.rows || 1, part = (cells) => share((cells ?? 0) / rows);
  const most = [...held].filter(([owner]) => owner >= 0).sort((a, b) => b[1] - a[1]);
  const lines = most.slice(0, 6).map(([owner, cells]) => {
    const id = run.map.requests[owner];
    return ["--" + INKS[ink(id)], id.length > 22 ? id.slice(0, 21) + "…" : id, "", part(cells), false];
  });
  const rest = most.slice(6).reduce((sum, entry) => sum + entry[1], 0);
  if (rest) lines.push(["--w-other", `${most.length - 6} more`, "", part(rest), false]);
  lines.push(["--cached", "cached prefixes", "", part(held.get(-2)), !held.get(-2)]);
  lines.push(["--plot", "free", "", part(held.get(-1)), !held.get(-1)]);
  return { caption: t > run.end ? "the run is over" : `blocks at ${clock(t)}`, lines };
}
