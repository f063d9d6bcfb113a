/* The block map and the waterfall of requests: canvases, since they have thousands of cells. Then: begin. */

const COLOURS = 9;
const hue = (id) => "r" + (ordinals.get(id) % COLOURS);

/* Pale and hatched: reserved for a request and empty. */
function emptyPattern(context, ink) {
  const scale = Math.max(1, window.devicePixelRatio || 1), size = Math.round(6 * scale);
  const tile = element("canvas");
  tile.width = tile.height = size;
  const c = tile.getContext("2d");
  c.globalAlpha = 0.2;
  c.fillStyle = ink;
  c.fillRect(0, 0, size, size);
  c.globalAlpha = 0.65;
  c.strokeStyle = ink;
  c.lineWidth = scale;
  c.beginPath();
  for (const shift of [-size, 0, size]) {
    c.moveTo(shift, size);
    c.lineTo(shift + size, 0);
  }
  c.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

function paintMap(view) {
  const { run, canvas, height } = view, g = view.geometry(), context = canvas.getContext("2d");
  const { t, rows, columns } = run.map;
  context.clearRect(0, 0, g.width, canvas.height);
  context.fillStyle = colour("plot");
  context.fillRect(LEFT, 0, g.inner, height);
  const inks = Array.from({ length: COLOURS }, (_, i) => colour("r" + i));
  const pale = inks.map((ink) => emptyPattern(context, ink));
  const chosen = state.request;
  const scale = Math.max(1, window.devicePixelRatio || 1);
  const snap = (value) => Math.round(value * scale) / scale; // no seams between neighbours
  columns.forEach((column, i) => {
    const x = snap(g.x(t[i])), width = Math.max(1 / scale, snap(g.x(i + 1 < t.length ? t[i + 1] : run.end)) - x);
    let row = 0;
    for (let k = 0; k < column.length; k += 2) {
      const code = column[k], cells = column[k + 1], y = snap((row / rows) * height);
      row += cells;
      if (code < 0) continue;
      const id = run.requests[code >> 1]?.[0], index = ordinals.get(id) % COLOURS;
      context.globalAlpha = chosen === null || chosen === id ? 1 : 0.16;
      context.fillStyle = code & 1 ? inks[index] : pale[index];
      context.fillRect(x, y, width, snap((row / rows) * height) - y);
    }
  });
  context.globalAlpha = 1;
}

function drawMap(view) {
  view.paint = () => paintMap(view);
  view.paint();
  const last = Math.max(0, Math.round(view.run.pool / data.block) - 1), x = LEFT - 6;
  view.svg.append(shape("text", { x, y: 9, "text-anchor": "end" }, "0"));
  view.svg.append(shape("text", { x, y: view.height, "text-anchor": "end" }, number(last)));
  const words = { x: 10, y: view.height / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${view.height / 2})` };
  view.svg.append(shape("text", words, "block"));
}

function cellAt(run, t, fraction) {
  const i = before(run.map.t, t), column = run.map.columns[i];
  if (!column || t > run.end) return null;
  const cell = Math.min(run.map.rows - 1, Math.floor(fraction * run.map.rows));
  let row = 0;
  for (let k = 0; k < column.length; k += 2) {
    row += column[k + 1];
    if (cell < row) return { cell, code: column[k] };
  }
  return null;
}

function pickBlock(view, t, y) {
  const { run } = view, found = cellAt(run, t, y / view.height);
  if (!found) return null;
  const blocks = run.pool / data.block, per = blocks / run.map.rows;
  const from = Math.floor(found.cell * per), to = Math.max(from, Math.ceil((found.cell + 1) * per) - 1);
  const place = `${from === to ? "block " + number(from) : `blocks ${number(from)} to ${number(to)}`}, ${clock(t)}`;
  if (found.code < 0) return { request: null, words: ["Nobody's", "free, or a cached prefix", place] };
  const request = run.requests[found.code >> 1];
  const full = found.code & 1 ? "holds token states" : "reserved and empty";
  return { request: request[0], words: [request[0], `${full}: ${place}`, ...life(request)] };
}

function ownersAt(run, t) {
  const held = new Map();
  const column = run.map.columns[before(run.map.t, t)] ?? [];
  let nobody = t > run.end ? run.map.rows : 0;
  for (let k = 0; k < column.length && t <= run.end; k += 2) {
    if (column[k] < 0) nobody += column[k + 1];
    else held.set(column[k] >> 1, (held.get(column[k] >> 1) ?? 0) + column[k + 1]);
  }
  return { held, nobody };
}

function mapValues(run, t) {
  if (t === null) {
    const lines = [["key full", "token states"], ["key empty", "reserved and empty"], ["key nobody", "nobody's"]];
    return { caption: "", lines: lines.map((line) => [...line, "", "", false]) };
  }
  const { held, nobody } = ownersAt(run, t), most = [...held].sort((a, b) => b[1] - a[1]), rows = run.map.rows || 1;
  const lines = most.slice(0, 7).map(([owner, cells]) => {
    const id = run.requests[owner][0];
    return ["--" + hue(id), id.length > 22 ? id.slice(0, 21) + "…" : id, "", share(cells / rows), false];
  });
  const rest = most.slice(7).reduce((sum, entry) => sum + entry[1], 0);
  if (rest) lines.push(["--w-other", `${most.length - 7} more`, "", share(rest / rows), false]);
  lines.push(["--plot", "nobody's", "", share(nobody / rows), true]);
  return { caption: t > run.end ? "the run is over" : `blocks at ${clock(t)}`, lines };
}

const PHASES = [["queued", 1, 2], ["prefill", 2, 3], ["decode", 3, 4]];

function paintWaterfall(view) {
  const { run, canvas, height } = view, g = view.geometry(), context = canvas.getContext("2d");
  const colours = Object.fromEntries(PHASES.map(([phase]) => [phase, colour(phase)]));
  context.clearRect(0, 0, g.width, canvas.height);
  context.fillStyle = colour("plot");
  context.fillRect(LEFT, 0, g.inner, height);
  const step = height / Math.max(1, run.requests.length), thick = Math.max(0.8, step > 3 ? step - 1 : step);
  run.requests.forEach((request, i) => {
    context.globalAlpha = state.request === null || state.request === request[0] ? 1 : 0.2;
    for (const [phase, from, to] of PHASES) {
      if (request[from] === null) break;
      const stop = request[to] ?? run.end;
      context.fillStyle = colours[phase];
      context.fillRect(g.x(request[from]), i * step, Math.max(0.7, g.x(stop) - g.x(request[from])), thick);
      if (request[to] === null) break;
    }
  });
  context.globalAlpha = 1;
}

function drawWaterfall(view) {
  view.paint = () => paintWaterfall(view);
  view.paint();
  const x = LEFT - 6, count = view.run.requests.length;
  view.svg.append(shape("text", { x, y: 9, "text-anchor": "end" }, "1"));
  if (count > 1) view.svg.append(shape("text", { x, y: view.height, "text-anchor": "end" }, number(count)));
  const words = { x: 10, y: view.height / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${view.height / 2})` };
  view.svg.append(shape("text", words, "request"));
}

function pickRequest(view, t, y) {
  const request = view.run.requests[Math.floor((y / view.height) * view.run.requests.length)];
  return request ? { request: request[0], words: [request[0], ...life(request)] } : null;
}

function waterfallValues(run, t) {
  const counts = { queued: 0, prefill: 0, decode: 0 };
  const sums = { queued: 0, prefill: 0, decode: 0 };
  for (const request of run.requests) {
    for (const [phase, from, to] of PHASES) {
      if (request[from] === null) continue;
      const stop = request[to] ?? run.end;
      sums[phase] += stop - request[from];
      if (t !== null && t >= request[from] && t < stop) counts[phase] += 1;
    }
  }
  const many = Math.max(1, run.requests.length);
  const lines = PHASES.map(([phase]) => {
    const figure = t === null ? clock(sums[phase] / many) : number(counts[phase]);
    return ["--" + phase, phase, figure, "", t !== null && counts[phase] === 0];
  });
  return { caption: t === null ? "mean for a request" : `requests at ${clock(t)}`, lines };
}

const PLOTS = {
  ledger: {
    height: () => 128, draw: drawLedger, values: ledgerValues,
    note: (run) => `${share(run.kv_mean.live + run.kv_mean.cached)} held token states, mean`,
    label: (run) => `Shares of the KV pool over time under ${run.name}`,
  },
  running: {
    height: () => 148, draw: drawRunning, values: runningValues,
    note: (run) => `at most ${number(run.peak)} at once`,
    label: (run) => `Running and waiting requests over time under ${run.name}`,
  },
  map: {
    height: () => 150, draw: drawMap, values: mapValues, canvas: true, pick: pickBlock,
    note: (run) => `${number(run.pool / data.block)} blocks`,
    label: (run) => `Owners of the blocks over time under ${run.name}`,
  },
  waterfall: {
    height: (run) => Math.min(260, Math.max(60, 2.4 * run.requests.length)), draw: drawWaterfall, values: waterfallValues,
    canvas: true, pick: pickRequest,
    note: (run) => `${number(run.requests.length)} requests`,
    label: (run) => `Queued, prefill and decode time of each request under ${run.name}`,
  },
};

function begin() {
  document.documentElement.classList.add("on");
  for (const box of document.querySelectorAll("[data-plots]"))
    for (const run of runs) addRow(box, run, PLOTS[box.dataset.plots]);
  drawAll();
  const buttons = document.querySelectorAll("button.axis");
  const label = () => buttons.forEach((button) => {
    button.setAttribute("aria-pressed", String(state.stretch));
    button.textContent = state.stretch ? "Put all runs on one time axis" : "Stretch each run to full width";
  });
  label();
  for (const button of buttons)
    button.addEventListener("click", () => {
      const before = button.getBoundingClientRect().top;
      state.stretch = !state.stretch;
      label();
      drawAll();
      window.scrollBy(0, button.getBoundingClientRect().top - before);
    });
  window.addEventListener("resize", drawAll);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
}

begin();
