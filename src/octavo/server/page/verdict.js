/* The answer: is anybody waiting, for what, and what would help; and the few figures that go with it. */

import { byId, element, put, set } from "./dom.js";
import { bytes, causeOrder, causeWords, clock, number, plural, poolBytes, rate, share } from "./words.js";
import { propose } from "./whatif.js";

const QUIET = 15_000; // ms: a screen reader is told at most this often, and only what kind of answer has changed
const RECENT = 20; // samples
const NAMED = 3; // causes in the sentence; the list of requests has them all
const ROOMY = 0.1; // with less than this share of the pool to be had, more slots alone help nobody
const RESOURCES = { memory: "memory", slots: "slots", tokens: "step budget", quota: "quota" }; // and how its causes begin
let saidKind = "", saidAt = -QUIET, proposal = "";

export function showVerdict(ledger, samples) {
  const kind = kindOf(ledger), help = helpFor(ledger, kind);
  set(byId("verdict"), "data-kind", kind === "none" ? "well" : "waits");
  put(byId("verdict-mark"), kind === "none" ? "Nobody waits" : "Somebody waits");
  put(byId("verdict-text"), headline(ledger));
  put(byId("verdict-why"), ledger.limiting.sentence);
  showHelp(help);
  announce(kind, `${headline(ledger)} ${help?.words ?? ""}`);
  showFigures(ledger, samples);
}

/* The cause that most waits are for; those behind a request wait for what it waits for. */
function kindOf(ledger) {
  const { waiting, waiting_by_cause: causes, limiting } = ledger;
  if (!waiting || Object.keys(causes).every((cause) => cause === "next step")) return "none";
  const own = Object.entries(causes).filter(([cause]) => !["behind", "next step"].includes(cause));
  own.sort((a, b) => b[1] - a[1]);
  const about = RESOURCES[limiting.resource] ?? "";
  return (own.find(([cause]) => about && cause.startsWith(about)) ?? own[0] ?? ["behind"])[0];
}

export function headline(ledger) {
  const { running, waiting } = ledger, room = available(ledger);
  if (!waiting && !running) return `Nothing runs and nobody waits: ${share(room)} of the KV pool can be had.`;
  const run = `${plural(running, "request runs", "requests run")}`;
  if (!waiting) return `Nobody waits: ${run}, and ${share(room)} of the KV pool can still be had.`;
  const all = Object.entries(ledger.waiting_by_cause).filter(([, count]) => count > 0);
  const causes = all.filter(([cause]) => cause !== "next step" || all.length === 1);
  const last = ([cause]) => cause === "behind"; // they wait for what the others wait for
  causes.sort((a, b) => last(a) - last(b) || b[1] - a[1] || causeOrder.indexOf(a[0]) - causeOrder.indexOf(b[0]));
  const parts = causes.slice(0, NAMED).map(([cause, count]) => `${causes.length > 1 ? number(count) + " " : ""}${causeWords(cause).aim}`);
  const rest = waiting - causes.slice(0, NAMED).reduce((sum, [, count]) => sum + count, 0);
  if (rest > 0) parts.push(`${number(rest)} for other reasons`);
  return `${plural(waiting, "request waits", "requests wait")} while ${run.replace(/ requests?/, "")}: ${list(parts)}.`;
}

const list = (parts) => (parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`);

/* The share of the pool that a newcomer could get: free blocks, and cached ones given up. */
const available = ({ pool }) => (pool.blocks ? (pool.free + pool.cached) / pool.blocks : 0);

/* {words, change: what the what-if form should try, or null} */
function helpFor(ledger, kind) {
  const { strategy, lines } = ledger, room = available(ledger);
  const more = { kv_bytes: Math.round(poolBytes(ledger) * 1.5) };
  const reserves = strategy !== "paged" && strategy !== "growing";
  if (kind === "none") return null;
  if (kind === "slots") return moreSlots(ledger.max_num_seqs, room, more);
  if (kind === "memory: full" && reserves)
    return advice(
      `Change the strategy: ${strategy} keeps ${bytes(lines.reserved)} reserved and empty; paged hands out blocks as tokens arrive.`,
      { strategy: "paged" });
  if (kind === "memory: fragmented" && strategy !== "paged")
    return advice(
      `Change the strategy: ${bytes(lines.reserved + lines.fragmented)} are empty but in pieces or reserved; ` +
        "paged needs no piece larger than a block.",
      { strategy: "paged" });
  if (kind === "memory: held")
    return advice(
      "Free blocks are kept for requests that already run. More KV memory, or lower max_tokens, lets more in without preempting.",
      more);
  if (kind.startsWith("memory"))
    return advice("The pool is full of token states: give it more memory, store KV in fewer bits, or lower max_tokens.", more);
  if (kind === "step budget") return moreTokens(ledger.max_num_batched_tokens);
  if (kind === "quota") return advice(`Raise the tenant’s quota: ${share(room)} of the pool can be had.`);
  if (kind === "no step") return advice("Look at /health and the server’s log: the engine takes no step.");
  return advice("The requests below say what each of them waits for.");
}

const advice = (words, change = null) => ({ words, change });

function moreSlots(seqs, room, more) {
  const change = { max_num_seqs: seqs * 2 };
  if (room >= ROOMY)
    return advice(`Raise max_num_seqs (now ${number(seqs)}): ${share(room)} of the KV pool can still be had.`, change);
  return advice(
    `More slots than ${number(seqs)} need more KV memory too: only ${share(room)} of the pool can still be had.`,
    { ...change, ...more });
}

const moreTokens = (tokens) =>
  advice(
    `Raise max_num_batched_tokens (now ${number(tokens)}): prompts start sooner, and steps take longer (ITL).`,
    { max_num_batched_tokens: tokens * 2 });

function showHelp(help) {
  const now = JSON.stringify(help), box = byId("verdict-help");
  if (now === proposal) return;
  proposal = now;
  box.replaceChildren();
  if (!help) return;
  box.append(element("strong", {}, "What would help: "), help.words);
  if (!help.change) return;
  const link = element("a", { href: "#whatif" }, "Try it on the recent traffic");
  link.addEventListener("click", () => propose(help.change));
  box.append(" ", link);
}

function announce(kind, words) {
  if (kind === saidKind || performance.now() - saidAt < QUIET) return;
  saidKind = kind;
  saidAt = performance.now();
  put(byId("verdict-said"), words);
}

/* Latencies are those of the last second in which there were any. */
function showFigures(ledger, samples) {
  const recent = samples.slice(-RECENT), last = recent.at(-1);
  const ttft = recent.findLast((sample) => sample.ttft_p50 !== null), itl = recent.findLast((sample) => sample.itl_p50 !== null);
  const figures = {
    running: [number(ledger.running), `of at most ${number(ledger.max_num_seqs)}`],
    waiting: [number(ledger.waiting), ledger.waiting ? "in the queue" : "nobody"],
    tokens: [rate(last ? last.tokens_per_s ?? 0 : null), "generated each second"],
    ttft: [clock(ttft?.ttft_p50), `p50 · p99 ${clock(ttft?.ttft_p99)}`],
    itl: [clock(itl?.itl_p50), `p50 · p99 ${clock(itl?.itl_p99)}`],
  };
  for (const [name, [value, note]] of Object.entries(figures)) {
    put(byId("figure-" + name), value);
    put(byId("note-" + name), note);
  }
}
