/* What if: replays the recent traffic under other settings on the server, and shows now and changed side by side. */

import { postJson } from "./api.js";
import { byId, element, put, set } from "./dom.js";
import { bytes, clock, number, poolBytes, share } from "./words.js";

const MIB = 1024 * 1024;
let needKey = () => {}, asking = false;

/* [name, how it reads, what it is of a summary, better: -1 less, 1 more, 0 neither] */
const FIGURES = [
  ["Requests at once, mean", (value) => number(value, 1), "concurrency_mean", 1],
  ["Requests at once, most", (value) => number(value), "concurrency_max", 1],
  ["TTFT, mean", clock, "ttft_mean", -1],
  ["TTFT, p99", clock, "ttft_p99", -1],
  ["ITL, mean", clock, "itl_mean", -1],
  ["E2E, mean", clock, "e2e_mean", -1],
  ["Preemptions", (value) => number(value), "preemptions", -1],
  ["Refused", (value) => number(value), "refused", -1],
  ["Pool in use, mean", share, "used_share", 0],
];
const SETTINGS = [
  ["Strategy", (value) => value, "strategy"],
  ["Block size", (value) => `${value} tokens`, "block_size"],
  ["KV memory", bytes, "kv_bytes"],
  ["Max sequences", (value) => number(value), "max_num_seqs"],
  ["Tokens in a step", (value) => number(value), "max_num_batched_tokens"],
];

export function beginWhatIf(onKey) {
  needKey = onKey;
  byId("whatif-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!asking) run();
  });
}

/* The fields say what holds now. */
export function showSettings(ledger) {
  put(byId("whatif-now"), `as now (${ledger.strategy})`);
  set(byId("whatif-block"), "placeholder", String(ledger.block_size));
  set(byId("whatif-kv"), "placeholder", number(poolBytes(ledger) / MIB).replaceAll(",", ""));
  set(byId("whatif-seqs"), "placeholder", String(ledger.max_num_seqs));
  set(byId("whatif-tokens"), "placeholder", String(ledger.max_num_batched_tokens));
}

/* Fill the form with a change that the verdict proposes. */
export function propose(change) {
  byId("whatif-form").reset();
  if (change.strategy) byId("whatif-strategy").value = change.strategy;
  if (change.kv_bytes) byId("whatif-kv").value = Math.round(change.kv_bytes / MIB);
  if (change.max_num_seqs) byId("whatif-seqs").value = change.max_num_seqs;
  if (change.max_num_batched_tokens) byId("whatif-tokens").value = change.max_num_batched_tokens;
}

function wanted() {
  const body = {}, strategy = byId("whatif-strategy").value;
  if (strategy) body.strategy = strategy;
  for (const [id, name, unit] of [["block", "block_size", 1], ["kv", "kv_bytes", MIB], ["seqs", "max_num_seqs", 1], ["tokens", "max_num_batched_tokens", 1]]) {
    const value = byId("whatif-" + id).value;
    if (value !== "") body[name] = Math.round(Number(value) * unit);
  }
  return body;
}

async function run() {
  const body = wanted();
  if (!Object.keys(body).length) {
    put(byId("whatif-status"), "Change at least one setting.");
    return;
  }
  asking = true;
  byId("whatif-run").disabled = true;
  set(byId("whatif-result"), "aria-busy", "true");
  put(byId("whatif-status"), "Replaying the recent traffic; under load this can take a minute.");
  try {
    show(await postJson("/kv/what-if", body));
  } catch (error) {
    put(byId("whatif-status"), error.message);
    if (error.kind === "key") needKey(error.message);
  }
  set(byId("whatif-result"), "aria-busy", "false");
  byId("whatif-run").disabled = false;
  asking = false;
}

function show(told) {
  put(byId("whatif-status"), `Replayed ${number(told.requests)} requests of the last ${clock(told.window_s)}.`);
  put(byId("whatif-sentence"), told.sentence);
  put(byId("whatif-fidelity"), told.fidelity);
  const causes = [...new Set([told.now, told.changed].flatMap((side) => Object.keys(side.waiting_by_cause_s ?? {})))];
  const rows = [
    ...SETTINGS.map(([name, words, key]) => row(name, told, (side) => side[key], words, 0)),
    ...FIGURES.map(([name, words, key, better]) => row(name, told, (side) => side[key], words, better)),
    ...causes.map((cause) => row(`Waited, ${cause}`, told, (side) => side.waiting_by_cause_s?.[cause] ?? 0, clock, -1)),
  ];
  byId("whatif-body").replaceChildren(...rows);
  byId("whatif-result").hidden = false;
}

function row(name, told, of, words, better) {
  const now = of(told.now), changed = of(told.changed);
  const say = (value) => (value === null || value === undefined ? "–" : words(value));
  const tr = element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, say(now)), element("td", {}, say(changed)));
  const [text, kind] = difference(now, changed, better);
  tr.append(element("td", { class: kind || null }, text));
  return tr;
}

/* "+38 %, better": the words say what the colour says. */
function difference(now, changed, better) {
  if (typeof now !== "number" || typeof changed !== "number") return [now === changed ? "same" : "changed", ""];
  if (now === changed) return ["same", ""];
  const way = Math.sign(changed - now) * better, ratio = now ? changed / now - 1 : null;
  const text = ratio === null ? "from none" : ratio >= 2 ? `× ${number(changed / now, 1)}` : `${ratio > 0 ? "+" : "−"}${share(Math.abs(ratio))}`;
  if (!way || (ratio !== null && Math.abs(ratio) < 0.005)) return [text, ""];
  return [`${text}, ${way > 0 ? "better" : "worse"}`, way > 0 ? "better" : "worse"];
}
