/* One request in full: facts, why it waits or missed the cache, its block table and its history. */

import { getJson } from "./api.js";
import { choice, choose, hue, onChoice } from "./choice.js";
import { byId, element, put, swatch } from "./dom.js";
import { ahead, reason, tellsMore } from "./requests.js";
import { clock, nameOf, number, plural, stateWords } from "./words.js";

const SHOWN_BLOCKS = 48, SHOWN_EVENTS = 60;
let open = null, origin = null;

export function beginDetail() {
  byId("detail-close").addEventListener("click", close);
  byId("detail").addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  onChoice(() => {
    if (open !== null && choice.chosen !== open) hide();
  });
}

/* `from`: where the focus goes back to. */
export async function openDetail(id, from) {
  open = id;
  origin = from;
  byId("detail").hidden = false;
  choose(null); // the list marks the row anew, also when it was chosen already
  open = id;
  byId("detail").hidden = false;
  choose(id);
  put(byId("detail-title"), "Request");
  byId("detail-body").replaceChildren(element("p", {}, "Asking the server …"));
  const title = byId("detail-title");
  title.focus({ preventScroll: true });
  byId("detail").scrollIntoView({ block: "nearest" });
  await refreshDetail();
}

export async function refreshDetail() {
  const id = open;
  if (id === null) return;
  try {
    const told = await getJson("/kv/requests/" + encodeURIComponent(id));
    if (open === id) show(told);
  } catch (error) {
    if (open !== id) return;
    if (error.status === 404) byId("detail-body").replaceChildren(element("p", {}, `The server does not remember ${id} any more.`));
    else if (error.kind !== "away" && error.kind !== "busy" && error.kind !== "key") throw error;
  }
}

function close() {
  choose(null);
  hide();
  if (origin?.isConnected) origin.focus();
  else byId("requests-title").focus();
}

function hide() {
  open = null;
  byId("detail").hidden = true;
}

let last = "";
function show(told) {
  const now = JSON.stringify(told);
  if (now === last && byId("detail-body").dataset.id === told.id) return;
  last = now;
  const box = byId("detail-body"), focused = box.contains(document.activeElement) ? document.activeElement.dataset.request : null;
  box.dataset.id = told.id;
  byId("detail-title").replaceChildren(swatch("r" + hue(told.id)), nameOf(told));
  box.replaceChildren(element("div", { class: "sides" }, side(told), history(told.history ?? [])));
  if (focused) [...box.querySelectorAll("[data-request]")].find((node) => node.dataset.request === focused)?.focus();
}

function side(told) {
  const out = element("div");
  if (told.wait)
    out.append(element("div", { class: "why boxed" }, ...reason(told.wait), tellsMore(told.wait) ? null : element("small", {}, told.wait.sentence)));
  if (told.error) out.append(element("p", { class: "why boxed" }, element("strong", {}, "Ended with an error: "), String(told.error)));
  const facts = element("dl");
  for (const [name, value] of factsOf(told)) facts.append(element("dt", {}, name), element("dd", {}, value));
  out.append(facts);
  return out;
}

function factsOf(told) {
  const table = (told.block_table ?? []).map(blockWords).filter(Boolean);
  const facts = [
    ["Engine’s id", told.id],
    ["Tenant", told.tenant || "none"],
    ["State", stateWords(told) + (told.finish_reason ? ` (${told.finish_reason})` : "")],
    ["Prompt", `${plural(told.prompt_tokens, "token")}, ${number(told.cached_tokens)} of them from the cache`],
    ["Generated", `${number(told.generated_tokens)} of at most ${plural(told.max_tokens, "token")}`],
    ["Memory", `${plural(told.blocks, "block")}, ${number(told.shared_blocks)} shared`],
    ["Empty in it", `${number(told.slack_tokens)} slots of slack, ${number(told.reserved_tokens)} reserved`],
    ["Time", `${clock(told.age_s)} old, waited ${clock(told.waited_s)}${ahead(told.wait) ? `, ${ahead(told.wait)} by an estimate` : ""}`],
    ["Preempted", told.preemptions ? plural(told.preemptions, "time") : "never"],
  ];
  if (told.miss?.sentence) facts.push(["Cache miss", told.miss.sentence]);
  if (table.length) facts.push(["Block table", table.join(" | ")]);
  return facts;
}

/* Consecutive blocks as ranges: "12–19, 40, 42–44". */
function blockWords(table) {
  const runs = [];
  for (const block of table) {
    const run = runs.at(-1);
    if (run && block === run[1] + 1) run[1] = block;
    else runs.push([block, block]);
  }
  const words = runs.slice(0, SHOWN_BLOCKS).map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  return words.join(", ") + (runs.length > SHOWN_BLOCKS ? ` and ${plural(runs.length - SHOWN_BLOCKS, "more run")}` : "");
}

function history(events) {
  const shown = events.slice(-SHOWN_EVENTS), first = events[0]?.at ?? 0;
  const rows = shown.map(({ step, at, event, text }) =>
    element(
      "tr",
      {},
      element("td", {}, clock(Math.max(0, at - first))),
      element("td", {}, number(step)),
      element("th", { scope: "row" }, event),
      element("td", {}, text)));
  const head = ["After", "Step", "Event", "What happened"].map((name) => element("th", { scope: "col" }, name));
  const left = events.length - shown.length;
  const caption = element("caption", {}, left ? `History, without the first ${plural(left, "event")}` : "History");
  const table = element("table", { class: "history" }, caption, element("thead", {}, element("tr", {}, ...head)));
  table.append(element("tbody", {}, ...rows));
  return element("div", { class: "scroll" }, table);
}
