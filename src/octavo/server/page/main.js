/* Begins: asks the server, hands the answers to the parts of the page, and says how the connection is. */

import { getJson, hasKey, setKey } from "./api.js";
import { beginBlocks, showBlocks } from "./blocks.js";
import { remember } from "./choice.js";
import { beginDetail, refreshDetail } from "./detail.js";
import { byId, put, set } from "./dom.js";
import { beginLatency } from "./latency.js";
import { beginMemory, showMemory } from "./memory.js";
import { redraw, showSamples } from "./plot.js";
import { poll } from "./poll.js";
import { beginPrompt } from "./prompt.js";
import { beginRequests, showRequests } from "./requests.js";
import { showVerdict } from "./verdict.js";
import { beginWhatIf, showSettings } from "./whatif.js";
import { bytes, number, poolBytes } from "./words.js";

const KEPT = 600, RARELY = 5; // samples; rounds between two timelines of a server that always sends all of it
let samples = [], rounds = 0, sendsAll = false, seesBlocks = true, model = null, last = null;

/* One round of questions; what is not on the screen is not asked for. */
async function round() {
  const since = samples.length ? `?since=${samples.at(-1).at}` : "", asked = rounds++ % (sendsAll ? RARELY : 1) === 0;
  const [ledger, requests, timeline, blocks] = await Promise.all([
    getJson("/kv/ledger"),
    getJson("/kv/requests"),
    asked ? getJson("/kv/timeline" + since) : null,
    seesBlocks ? getJson("/kv/blocks") : null,
  ]);
  model ??= (await getJson("/v1/models")).data[0]?.id ?? "";
  if (timeline) merge(timeline.samples.filter((sample) => sample.at <= ledger.at)); // the second that runs is not over
  remember(requests.requests);
  last = new Date();
  put(byId("model"), model);
  const memory = `blocks of ${ledger.block_size} tokens, ${bytes(poolBytes(ledger))} of KV memory`;
  put(byId("facts"), `${ledger.strategy}, ${memory}, sequences of up to ${number(ledger.longest)} tokens`);
  document.body.classList.add("told");
  showVerdict(ledger, samples);
  showMemory(ledger, samples);
  showSamples(samples);
  if (blocks) showBlocks(blocks);
  showRequests(requests.requests);
  showSettings(ledger);
  put(byId("step"), `step ${number(ledger.step)}`);
  byId("key").hidden = true;
  await refreshDetail();
}

/* The samples since the last one, or all of them again. */
function merge(news) {
  sendsAll = samples.length > 1 && news.length > 1 && news[0].at < samples.at(-1).at;
  samples = sendsAll ? news : [...samples, ...news].slice(-KEPT);
}

const STATES = {
  live: "live",
  busy: "busy",
  away: "no answer",
  key: "needs a key",
  refused: "refused",
  broken: "in trouble",
};

function told({ kind, message, next }) {
  set(byId("connection"), "data-kind", kind);
  put(byId("connection-words"), kind === "slow" ? `busy, asked every ${Math.round(next / 1000)} s` : STATES[kind]);
  const banner = byId("banner"), well = kind === "live" || kind === "slow";
  if (kind === "key") askForKey(message);
  banner.hidden = well || kind === "key";
  if (banner.hidden) put(banner, "");
  else {
    const from = last ? ` What you see is from ${last.toLocaleTimeString()}.` : "";
    put(banner, `${bannerWords(kind, message)} Asked again every ${Math.round(next / 1000)} s.${from}`);
  }
  document.body.classList.toggle("stale", !well);
}

function bannerWords(kind, message) {
  if (kind === "busy") return `The server is busy: ${message}`;
  if (kind === "away") return "The server does not answer: it has stopped, or the network is down.";
  return message;
}

function askForKey(message) {
  const box = byId("key");
  put(byId("key-why"), hasKey() ? message : "This server asks for an API key.");
  if (!box.hidden) return;
  box.hidden = false;
  byId("key-input").focus();
}

function begin() {
  beginMemory();
  beginBlocks();
  beginDetail();
  beginRequests();
  beginLatency();
  beginPrompt(askForKey);
  beginWhatIf(askForKey);
  const now = poll(round, told);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key-input").value);
    byId("key-input").value = "";
    byId("key").hidden = true;
    now();
  });
  new IntersectionObserver(([entry]) => {
    seesBlocks = entry.isIntersecting;
  }, { rootMargin: "300px" }).observe(byId("blocks"));
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
}

begin();
