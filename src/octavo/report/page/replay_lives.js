/* Lives of requests: the waterfall, the table, and the card of the chosen one. */

const PARTS = 12, WAITED = 11, RECOMPUTED = 10;
const parts = (request) => {
  const out = [];
  for (let k = 0, from = request[1]; k < request[PARTS].length; from = request[PARTS][k + 1], k += 2)
    out.push([data.phases[request[PARTS][k]], from, request[PARTS][k + 1]]);
  return out;
};

function paintWaterfall(view) {
  const { run, canvas, height } = view, g = view.geometry(), context = canvas.getContext("2d"), only = chosen();
  const inks = Object.fromEntries(data.phases.map((phase) => [phase, colour(phase)]));
  context.clearRect(0, 0, g.width, canvas.height);
  context.fillStyle = colour("plot");
  context.fillRect(LEFT, 0, g.inner, height);
  const step = height / Math.max(1, run.requests.length), thick = Math.max(0.8, step > 3 ? step - 1 : step);
  run.requests.forEach((request, i) => {
    const it = only === request[0];
    context.globalAlpha = only === null || it ? 1 : 0.2;
    for (const [phase, from, to] of parts(request)) {
      context.fillStyle = inks[phase];
      context.fillRect(g.x(from), i * step - (it && step < 3 ? 1 : 0), Math.max(0.7, g.x(to) - g.x(from)), it ? Math.max(3, thick) : thick);
    }
  });
  context.globalAlpha = 1;
}

function drawWaterfall(view) {
  view.paint = () => paintWaterfall(view);
  view.paint();
  const many = view.run.requests.length;
  sideWords(view, many ? "1" : "", many > 1 ? number(many) : "", "request");
}

function pickRequest(view, t, y) {
  const request = view.run.requests[Math.floor((y / view.height) * view.run.requests.length)];
  return request ? { request: request[0], words: [request[0], ...life(request)] } : null;
}

function waterfallValues(run, t) {
  const counts = {}, sums = {};
  for (const phase of data.phases) counts[phase] = sums[phase] = 0;
  for (const request of run.requests)
    for (const [phase, from, to] of parts(request)) {
      sums[phase] += to - from;
      if (t !== null && t >= from && t < to) counts[phase] += 1;
    }
  const many = Math.max(1, run.requests.length);
  const lines = data.phases.map((phase) => {
    const figure = t === null ? clock(sums[phase] / many) : number(counts[phase]);
    return ["--" + phase, phase, figure, "", t === null ? sums[phase] === 0 : counts[phase] === 0];
  });
  return { caption: t === null ? "mean for a request" : `requests at ${clock(t)}`, lines };
}

const queued = (request) => parts(request).reduce((sum, [phase, from, to]) => sum + (phase === "queued" ? to - from : 0), 0);
const chief = (request) => Object.entries(request[WAITED]).sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";
const ended = (request) => parts(request).at(-1)?.[2] ?? request[1];
const ORDERS = [
  ["longest queued", (request) => -queued(request)],
  ["slowest first token", (request) => -((request[3] ?? Infinity) - request[1])],
  ["longest in all", (request) => -(ended(request) - request[1])],
  ["most recomputed", (request) => -request[RECOMPUTED]],
  ["earliest", (request) => request[1]],
];
const MOST = 200;

function strip(request, low, high) {
  const box = element("span", { class: "strip", "aria-hidden": "true" }), wide = Math.max(1e-9, high - low);
  box.append(element("i", { style: `width:${(100 * (request[1] - low)) / wide}%` }));
  for (const [phase, from, to] of parts(request))
    box.append(element("i", { class: "i-" + phase, style: `width:${(100 * (to - from)) / wide}%`, title: `${phase} ${clock(to - from)}` }));
  return box;
}

const CELLS = [
  ["arrived", (r) => clock(r[1])],
  ["prompt", (r) => number(r[5])],
  ["cached", (r) => number(r[7])],
  ["output", (r) => number(r[6])],
  ["queued", (r) => clock(queued(r))],
  ["chiefly for", chief, "text"],
  ["TTFT", (r) => (r[3] === null ? "–" : clock(r[3] - r[1]))],
  ["TPOT", (r) => (r[3] === null || r[4] === null || r[6] < 2 ? "–" : clock((r[4] - r[3]) / (r[6] - 1)))],
  ["E2E", (r) => (r[4] === null ? "–" : clock(r[4] - r[1]))],
  ["preempted", (r) => number(r[8])],
  ["recomputed", (r) => number(r[RECOMPUTED])],
  ["ended", (r) => (r[9] ?? "unfinished").slice(0, 24), "text"],
];

function fillLives(run, order) {
  const table = document.getElementById("lives"), head = element("tr"), body = element("tbody");
  for (const [name, , kind] of [["request"], ...CELLS, ["its time", null, "text"]])
    head.append(element("th", kind ? { scope: "col", class: kind } : { scope: "col" }, name));
  const key = ORDERS[order][1], sorted = [...run.requests].sort((a, b) => key(a) - key(b)).slice(0, MOST);
  const low = Math.min(...sorted.map((r) => r[1])), high = Math.max(...sorted.map(ended));
  for (const request of sorted) {
    const row = element("tr"), name = element("th", { scope: "row" }), button = element("button", { type: "button", title: request[0] }, request[0]);
    button.addEventListener("click", () => pin(run, request[0], true));
    name.append(button);
    row.append(name);
    for (const [, cell, kind] of CELLS) row.append(element("td", kind ? { class: kind } : {}, cell(request)));
    const last = element("td", { class: "text" });
    last.append(strip(request, low, high));
    row.append(last);
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.replaceChildren(top, body);
  const many = run.requests.length;
  document.getElementById("many").textContent = `${number(sorted.length)} of ${number(many)} ${many === 1 ? "life" : "lives"} kept`;
}

/* Follow a request on the whole page; null: nobody. */
function pin(run, id, scroll) {
  state.pinned = id;
  const card = document.getElementById("life"), request = id === null ? null : run.byId.get(id);
  card.hidden = !request;
  if (request) {
    const close = element("button", { type: "button" }, "Let go");
    close.addEventListener("click", () => pin(run, null));
    const list = element("ul");
    for (const [phase, from, to] of parts(request)) list.append(element("li", {}, `${phase} for ${clock(to - from)}, from ${clock(from)} to ${clock(to)}`));
    const waits = Object.entries(request[WAITED]).sort((a, b) => b[1] - a[1]).map(([cause, spent]) => `${cause} ${clock(spent)}`);
    const said = [...life(request)];
    if (waits.length) said.push("waited for " + waits.join(", "));
    if (request[RECOMPUTED]) said.push(`${number(request[RECOMPUTED])} tokens computed again`);
    card.replaceChildren(close, element("h3", {}, `${id} under ${run.name}`), strip(request, request[1], ended(request)), ...said.map((words) => element("p", {}, words)), list);
    if (scroll) card.scrollIntoView({ block: "nearest" });
  }
  repaint = true;
  refresh();
}
