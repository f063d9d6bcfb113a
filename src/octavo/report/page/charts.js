/* The ledger over time, and running and waiting over time. */

const CAUSES = [
  ["memory: full", "--w-full"],
  ["memory: fragmented", "--w-fragmented"],
  ["memory: held", "--w-held"],
  ["behind", "--w-behind"],
  ["slots", "--w-slots"],
  ["step budget", "--w-budget"],
  ["quota", "--w-quota"],
];
const known = new Map(CAUSES);
const others = new Set();
for (const run of runs)
  for (const causes of run.timeline.causes) for (const cause of Object.keys(causes)) if (!known.has(cause)) others.add(cause);
for (const cause of others) CAUSES.push([cause, "--w-other"]);

/* Corners of a staircase: the value at t[i] holds until t[i + 1]. */
function stairs(t, values, x, y, end) {
  const out = [];
  for (let i = 0; i < t.length; i++) {
    const height = y(values[i]).toFixed(1);
    out.push(`${x(t[i]).toFixed(1)} ${height}`, `${x(i + 1 < t.length ? t[i + 1] : end).toFixed(1)} ${height}`);
  }
  return out;
}

function band(run, g, low, high, y) {
  const t = run.timeline.t;
  const top = stairs(t, high, g.x, y, run.end), bottom = stairs(t, low, g.x, y, run.end).reverse();
  return "M" + top.join("L") + "L" + bottom.join("L") + "Z";
}

function hatch(svg, id) {
  const pattern = shape("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(shape("rect", { width: 5, height: 5, style: "fill:var(--reserved_never_used)" }));
  pattern.append(shape("rect", { width: 1.5, height: 5, style: "fill:var(--hatch)" }));
  const defs = shape("defs");
  defs.append(pattern);
  svg.append(defs);
}

function drawLedger(view, g) {
  const { run, svg, height } = view, t = run.timeline.t;
  const y = (value) => height * (1 - Math.min(1, value));
  const id = "never" + runs.indexOf(run);
  hatch(svg, id);
  let low = t.map(() => 0);
  for (const { key } of data.lines) {
    const values = run.timeline[key], high = low.map((value, i) => value + values[i]);
    if (values.some((value) => value > 0) && t.length) {
      const fill = key === "reserved_never_used" ? `url(#${id})` : `var(--${key})`;
      svg.append(shape("path", { d: band(run, g, low, high, y), style: `fill:${fill}` }));
    }
    low = high;
  }
  for (const value of [0, 0.5, 1])
    svg.append(shape("text", { x: LEFT - 6, y: y(value) + (value === 1 ? 9 : value ? 4 : 0), "text-anchor": "end" }, 100 * value + " %"));
}

function ledgerValues(run, t) {
  const at = t === null ? -1 : before(run.timeline.t, t), over = t !== null && t > run.end;
  const caption = t === null ? "mean over the run, tokens" : over ? "the run is over" : `at ${clock(t)}, tokens`;
  const lines = data.lines.map(({ key, name }) => {
    const value = t === null ? run.kv_mean[key] : at < 0 || over ? null : run.timeline[key][at];
    if (value === null) return [key, name, "–", "–", true];
    return [key, name, number(value * run.pool), share(value), value === 0];
  });
  return { caption, lines };
}

/* Running above the line, waiting below it; one scale for all, with a share of the height for each side. */
const top_ = Math.max(1, ...runs.map((run) => Math.max(0, ...run.timeline.running)));
const deep = Math.max(1, ...runs.map((run) => Math.max(0, ...run.timeline.waiting)));

function drawRunning(view, g) {
  const { run, svg, height } = view, line = run.timeline, t = line.t;
  const unit = (height - 12) / (top_ + deep), zero = 10 + top_ * unit;
  const y = (value) => zero - value * unit, zeros = t.map(() => 0);
  if (t.length) svg.append(shape("path", { d: band(run, g, zeros, line.running, y), style: "fill:var(--running)" }));
  let low = zeros;
  for (const [cause, mark] of CAUSES) {
    const values = line.causes.map((causes) => causes[cause] ?? 0);
    if (!values.some((value) => value > 0)) continue;
    const high = low.map((value, i) => value - values[i]);
    svg.append(shape("path", { d: band(run, g, high, low, y), style: `fill:var(${mark})` }));
    low = high;
  }
  svg.append(shape("line", { class: "base", x1: LEFT, x2: LEFT + g.inner, y1: zero, y2: zero }));
  line.preemptions.forEach((count, i) => {
    if (!count) return;
    const x = g.x(t[i]);
    svg.append(shape("path", { d: `M${x - 3.5} 0h7l-3.5 7z`, style: "fill:var(--preempt)" }));
  });
  const { values } = ticks(Math.max(top_, deep), ((top_ + deep) * unit) / 30);
  for (const value of values) {
    for (const sign of value ? [1, -1] : [1]) {
      if (value > (sign > 0 ? top_ : deep)) continue;
      svg.append(shape("line", { class: "tick", x1: LEFT, x2: LEFT + g.inner, y1: y(sign * value), y2: y(sign * value) }));
      svg.append(shape("text", { x: LEFT - 6, y: y(sign * value) + 4, "text-anchor": "end" }, number(value)));
    }
  }
}

function runningValues(run, t) {
  const line = run.timeline, at = t === null ? -1 : before(line.t, t), over = t !== null && t > run.end;
  const used = CAUSES.filter(([cause]) => runs.some((other) => (other.waited[cause] ?? 0) > 0));
  if (t === null) {
    const lines = used.map(([cause, mark]) => {
      const value = run.waited[cause] ?? 0;
      return [mark, "waiting, " + cause, number(value, 1), "", value === 0];
    });
    const preempted = ["--preempt", "preemptions, in all", number(run.preempted), "", run.preempted === 0];
    return { caption: "mean over the run", lines: [["--running", "running", number(run.mean, 1), "", false], ...lines, preempted] };
  }
  const none = at < 0 || over;
  const value = (source) => (none ? "–" : number(source));
  const lines = used.map(([cause, mark]) => {
    const count = none ? 0 : line.causes[at][cause] ?? 0;
    return [mark, "waiting, " + cause, value(count), "", count === 0];
  });
  const so_far = line.preemptions.slice(0, at + 1).reduce((a, b) => a + b, 0);
  return {
    caption: over ? "the run is over" : `at ${clock(t)}`,
    lines: [
      ["--running", "running", none ? "–" : number(line.running[at]), "", none],
      ...lines,
      ["--preempt", "preemptions so far", value(so_far), "", none || so_far === 0],
    ],
  };
}
