/* Over time: TTFT and ITL, and who ran and who waited, by cause. */

import { byId } from "./dom.js";
import { addPlot, band, current, curve, most, ticks, total, valueAxis } from "./plot.js";
import { causeOrder, causeWords, clock, number, rate } from "./words.js";

export function beginLatency() {
  const box = byId("latency-plots");
  for (const [name, title] of [["ttft", "TTFT"], ["itl", "ITL"]])
    addPlot(box, {
      title,
      height: 110,
      label: `${title}, median and 99th percentile, over the last ten minutes. Arrow keys move the cursor.`,
      note: () => (name === "ttft" ? "time to the first token" : "time between two tokens"),
      draw: (view, g, samples) => drawTimes(view, g, samples, name),
      values: (samples, at) => [
        ["line-p50", "p50, solid", clock(samples[at][name + "_p50"]), samples[at][name + "_p50"] === null],
        ["line-p99", "p99, dashed", clock(samples[at][name + "_p99"]), samples[at][name + "_p99"] === null],
      ],
    });
  addPlot(byId("waiting-plot"), {
    title: "Requests",
    height: 200,
    label: "Requests running, above the line, and waiting by cause, below it, over the last ten minutes. Arrow keys move the cursor.",
    note: (samples) => `${number(samples[current()].running)} running, ${number(samples[current()].waiting)} waiting`,
    draw: drawWaiting,
    values: waitingValues,
  });
  addPlot(byId("waiting-plot"), {
    title: "Output",
    height: 80,
    label: "Generated tokens a second over the last ten minutes. Arrow keys move the cursor.",
    note: () => "generated tokens a second",
    draw: drawRate,
    values: (samples, at) => [["running", "tokens/s", rate(samples[at].tokens_per_s), !samples[at].tokens_per_s]],
  });
}

function drawTimes(view, g, samples, name) {
  const medians = samples.map((sample) => sample[name + "_p50"]), tails = samples.map((sample) => sample[name + "_p99"]);
  const limit = Math.max(1e-3, most([medians, tails])) * 1.08;
  const y = (value) => g.height * (1 - value / limit);
  valueAxis(view, g, ticks(limit, 3), y, (value) => (value ? clock(value) : "0"));
  curve(view, g, tails, y, "p99");
  curve(view, g, medians, y, "p50");
}

/* The causes that anybody waited for, in order of precedence; ones that this page does not know come last. */
function causesOf(samples) {
  const seen = new Set(samples.flatMap((sample) => Object.keys(sample.waiting_by_cause)));
  return [...causeOrder.filter((cause) => seen.has(cause)), ...[...seen].filter((cause) => !causeOrder.includes(cause))];
}

function drawWaiting(view, g, samples) {
  const running = samples.map((sample) => sample.running), waiting = samples.map((sample) => sample.waiting);
  const top = Math.max(1, most([running])), deep = Math.max(1, most([waiting]));
  const unit = (g.height - 8) / (top + deep), zero = 4 + top * unit;
  const y = (value) => zero - value * unit, zeros = samples.map(() => 0);
  band(view, g, zeros, running, y, "running");
  let low = zeros;
  for (const cause of causesOf(samples)) {
    const base = low, high = base.map((value, i) => value - (samples[i].waiting_by_cause[cause] ?? 0));
    band(view, g, high, low, y, causeWords(cause).mark);
    low = high;
  }
  const above = ticks(top, (top * unit) / 28), below = ticks(deep, (deep * unit) / 28).slice(1);
  valueAxis(view, g, [...above, ...below.map((value) => -value)], y, (value) => number(Math.abs(value)));
}

function waitingValues(samples, at) {
  const { running, waiting, waiting_by_cause: causes } = samples[at];
  return [
    ["running", "running", number(running), !running],
    ...causesOf(samples).map((cause) => [causeWords(cause).mark, cause, number(causes[cause] ?? 0), !causes[cause]]),
    ["none", "waiting in all", Object.keys(causes).length ? total(causes) : number(waiting), !waiting],
  ];
}

function drawRate(view, g, samples) {
  const values = samples.map((sample) => sample.tokens_per_s ?? 0), limit = Math.max(1, most([values])) * 1.08;
  const y = (value) => g.height * (1 - value / limit);
  band(view, g, values.map(() => 0), values, y, "running");
  valueAxis(view, g, ticks(limit, 2), y, (value) => number(value));
}
