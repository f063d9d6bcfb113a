/* Which plots there are, the time of a step; then: begin. */

const slowest = Math.max(1e-9, ...runs.flatMap((run) => run.timeline.step));

function drawSteps(view, g) {
  const { run, svg, height } = view, t = run.timeline.t, { step } = ticks(slowest, 2), many = Math.ceil(slowest / step - 1e-9);
  const y = (value) => height - (value / (many * step)) * (height - 5);
  if (t.length) svg.append(shape("path", { d: band(run, g, t.map(() => 0), run.timeline.step, y), style: "fill:var(--running);opacity:.8" }));
  for (const value of Array.from({ length: many + 1 }, (_, i) => i * step)) {
    svg.append(shape("line", { class: "tick", x1: LEFT, x2: LEFT + g.inner, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: LEFT - 6, y: Math.max(9, y(value) + (value ? 4 : 0)), "text-anchor": "end" }, stepWords(value)));
  }
}

const stepWords = (value) => (value === 0 ? "0" : value < 1 ? number(value * 1000, value < 0.001 ? 2 : 0) + " ms" : number(value, 1) + " s");

function stepValues(run, t) {
  const line = run.timeline, at = t === null ? -1 : before(line.t, t), over = t !== null && t > run.end;
  if (t !== null) {
    const value = at < 0 || over ? "–" : number(line.step[at] * 1000, 2) + " ms";
    return { caption: over ? "the run is over" : `at ${clock(t)}`, lines: [["--running", "mean of the stretch", value, "", over]] };
  }
  const there = line.step.filter((value) => value > 0);
  const worst = there.length ? number(Math.max(...there) * 1000, 2) + " ms" : "–";
  return { caption: "over the run", lines: [["--running", "slowest stretch", worst, "", false]] };
}

const PLOTS = {
  map: {
    height: () => 150, draw: drawMap, values: mapValues, canvas: true, pick: pickBlock,
    note: (run) => `${number(run.pool / run.block)} blocks`,
    label: (run) => `Owners of the blocks over time under ${run.name}`,
  },
  running: {
    height: () => 148, draw: drawRunning, values: runningValues,
    note: (run) => `at most ${number(run.peak)} at once`,
    label: (run) => `Running and waiting requests over time under ${run.name}`,
  },
  ledger: {
    height: () => 120, draw: drawLedger, values: ledgerValues,
    note: (run) => `${share(run.kv_mean.live + run.kv_mean.cached)} held token states, mean`,
    label: (run) => `Shares of the KV pool over time under ${run.name}`,
  },
  step: {
    height: () => 62, draw: drawSteps, values: stepValues,
    note: () => "",
    label: (run) => `Time of a step over time under ${run.name}`,
  },
  waterfall: {
    height: (run) => Math.min(200, Math.max(60, 2.4 * run.requests.length)), draw: drawWaterfall, values: waterfallValues,
    canvas: true, pick: pickRequest,
    note: (run) => `${number(run.requests.length)} ${run.requests.length === 1 ? "request" : "requests"}`,
    label: (run) => `Queued, prefill, decode and preempted time of each request under ${run.name}`,
  },
};

/* A click follows what is under the pointer; a second one lets go of it. */
function clickable(view) {
  view.plot.addEventListener("click", () => pin(view.run, state.request === state.pinned ? null : state.request));
}

function beginLives() {
  const of = document.getElementById("of"), by = document.getElementById("by");
  if (!of) return;
  const fill = () => fillLives(runs[of.selectedIndex], by.selectedIndex);
  for (const run of runs) of.append(element("option", {}, run.name));
  of.selectedIndex = Math.max(0, runs.findIndex((run) => run.name === data.main));
  for (const [name] of ORDERS) by.append(element("option", {}, name));
  for (const select of [of, by]) select.addEventListener("change", fill);
  fill();
}

function draw() {
  drawAll();
  for (const graph of graphs) graph();
}

function begin() {
  state.pinned = null;
  document.documentElement.classList.add("on");
  for (const box of document.querySelectorAll("[data-plots]"))
    for (const run of runs) {
      addRow(box, run, PLOTS[box.dataset.plots]);
      if (PLOTS[box.dataset.plots].pick) clickable(views.at(-1));
    }
  beginRates();
  beginLives();
  draw();
  const buttons = document.querySelectorAll("button.axis");
  const label = () => buttons.forEach((button) => {
    button.setAttribute("aria-pressed", String(state.stretch));
    button.textContent = state.stretch ? "Put all runs on one time axis" : "Stretch each run to full width";
    button.hidden = runs.length < 2;
  });
  label();
  for (const button of buttons)
    button.addEventListener("click", () => {
      const top = button.getBoundingClientRect().top;
      state.stretch = !state.stretch;
      label();
      draw();
      window.scrollBy(0, button.getBoundingClientRect().top - top);
    });
  document.addEventListener("keydown", (event) => event.key === "Escape" && pin(runs[0], null));
  window.addEventListener("resize", draw);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
}

begin();
