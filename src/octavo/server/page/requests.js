/* The list of requests: state, progress, memory, and why each one waits. A row opens the request's detail. */

import { choice, choose, hue, nameFor, onChoice, point } from "./choice.js";
import { openDetail } from "./detail.js";
import { byId, element, put, set, swatch } from "./dom.js";
import { causeWords, clock, counted, nameOf, needs, number, plural, short, stateWords } from "./words.js";

const FEW = 24, MOST = 200; // rows drawn at first, and when the reader wants more
const COLUMNS = ["Request", "State", "Tokens", "Blocks", "Waited", "Why it waits"];
const drawn = new Map(); // id -> the cells of its row
let rows = [], filter = "all", limit = FEW;

export function beginRequests() {
  for (const input of document.querySelectorAll("#filter input"))
    input.addEventListener("change", () => {
      filter = input.value;
      list();
    });
  byId("requests-all").addEventListener("click", () => {
    limit = limit === FEW ? MOST : FEW;
    list();
  });
  byId("requests-body").addEventListener("keydown", walk);
  onChoice(mark);
}

/* Those that wait come first, in the order of the queue: they are what the list is for. */
export function showRequests(all) {
  rows = [...all.filter((row) => row.state === "waiting"), ...all.filter((row) => row.state !== "waiting")];
  for (const name of ["all", "running", "waiting", "finished"])
    put(byId("count-" + name), number(name === "all" ? rows.length : rows.filter((row) => row.state === name).length));
  list();
}

function list() {
  const wanted = rows.filter((row) => filter === "all" || row.state === filter);
  const body = byId("requests-body"), focus = document.activeElement, shownRows = wanted.slice(0, limit);
  const ids = new Set(shownRows.map((row) => row.id));
  for (const [id, row] of drawn)
    if (!ids.has(id)) {
      row.tr.remove();
      drawn.delete(id);
    }
  let before = body.firstElementChild;
  for (const row of shownRows) {
    if (!drawn.has(row.id)) drawn.set(row.id, addRow(row.id));
    const view = drawn.get(row.id);
    update(view, row);
    if (view.tr === before) before = before.nextElementSibling;
    else body.insertBefore(view.tr, before);
  }
  if (focus !== document.activeElement && body.contains(focus)) focus.focus(); // moving a row takes the focus from it
  const more = wanted.length - shownRows.length, button = byId("requests-all");
  put(byId("requests-more"), more ? `${plural(more, "more request is", "more requests are")} not shown; /kv/requests has them all.` : "");
  button.hidden = wanted.length <= FEW;
  put(button, limit === FEW ? `Show ${number(Math.min(wanted.length, MOST) - FEW)} more` : "Show fewer");
  byId("requests-none").hidden = wanted.length > 0;
  put(byId("requests-none"), filter === "all" ? "No request is in the engine. Try the model below." : `No request is ${filter}.`);
  mark();
}

function addRow(id) {
  const chip = swatch("r" + hue(id)), name = element("span", { class: "words" });
  const button = element("button", { type: "button", class: "open", "aria-expanded": "false" }, chip, name);
  const who = element("small"), head = element("th", { scope: "row", role: "rowheader" }, button, who);
  const cells = COLUMNS.slice(1).map((label) => element("td", { role: "cell", "data-label": label }));
  const tr = element("tr", { role: "row" }, head, ...cells);
  const [state, tokens, blocks, waited, why] = cells;
  why.className = "why";
  button.addEventListener("click", () => openDetail(id, button));
  button.addEventListener("focus", () => point(id));
  button.addEventListener("blur", () => point(null));
  tr.addEventListener("pointerenter", () => point(id));
  tr.addEventListener("pointerleave", () => point(null));
  tr.addEventListener("click", (event) => {
    if (!event.target.closest("button") && !String(getSelection())) openDetail(id, button);
  });
  const parts = { state: two(state), tokens: two(tokens), blocks: two(blocks), waited: two(waited) };
  return { tr, button, name, who, why, told: "", ...parts };
}

/* A cell of a figure and a note under it. */
function two(cell) {
  const parts = { first: element("span", { class: "figure" }), note: element("small") };
  cell.append(parts.first, parts.note);
  return parts;
}

function say(cell, first, note) {
  put(cell.first, first);
  put(cell.note, note);
}

function update(view, row) {
  put(view.name, nameOf(row));
  const own = row.label && row.label !== row.id ? short(row.id) : "", priority = row.priority ? `priority ${row.priority}` : "";
  put(view.who, [own, row.tenant, priority].filter(Boolean).join(" · "));
  set(view.tr, "data-state", row.phase === "preempted" ? "preempted" : row.state);
  say(view.state, stateWords(row), row.preemptions ? `preempted ${row.preemptions === 1 ? "once" : row.preemptions + " times"}` : "");
  say(view.tokens, `${number(row.prompt_tokens)} + ${number(row.generated_tokens)}`, progress(row));
  say(view.blocks, row.blocks ? number(row.blocks) : "–", held(row));
  say(view.waited, clock(row.waited_s), ahead(row.wait) ?? `${clock(row.age_s)} old`);
  const told = JSON.stringify(row.wait);
  if (told === view.told) return;
  view.told = told;
  // Somebody may be in the middle of following a holder: the focus stays on the button of the same request.
  const following = view.why.contains(document.activeElement) ? document.activeElement.dataset.request : null;
  view.why.replaceChildren(...(row.wait ? reason(row.wait) : []));
  if (following) [...view.why.querySelectorAll("button")].find((button) => button.dataset.request === following)?.focus();
}

/* When the wait will be over, if the server can say. */
export const ahead = (wait) => (typeof wait?.eta_s === "number" ? `at most ${clock(wait.eta_s)} more` : null);

function progress(row) {
  if (row.state === "finished") return "generated";
  if (row.phase === "prefill") return `prefill ${number(row.computed_tokens)} of ${number(row.prompt_tokens)}`;
  return `of at most ${number(row.max_tokens)}`;
}

function held(row) {
  const notes = [];
  if (row.shared_blocks) notes.push(`${number(row.shared_blocks)} shared`);
  if (row.reserved_tokens) notes.push(`${number(row.reserved_tokens)} tokens empty`);
  return notes.join(", ");
}

/* The server's own sentence is shown where the numbers alone do not say it. */
export const tellsMore = (wait) => needs(wait) === null || wait.cause === "memory: fragmented";

/* The cause in words, its numbers, who holds what is needed, and what unblocks it. */
export function reason(wait) {
  const words = causeWords(wait.cause), out = [];
  const title = element("strong", {}, swatch(words.mark), words.headline);
  if (wait.behind) title.append(": ", requestLink(wait.behind));
  out.push(element("span", { class: "cause" }, title));
  const numbers = needs(wait);
  if (numbers) out.push(element("span", {}, numbers));
  if (wait.sentence && tellsMore(wait)) out.push(element("span", {}, wait.sentence));
  if (wait.holders?.length) out.push(holders(wait));
  if (wait.unblocks) out.push(element("span", {}, element("em", {}, "Unblocks: "), wait.unblocks));
  return out;
}

function holders(wait) {
  const named = wait.holders.slice(0, 3), line = element("span", {}, element("em", {}, "Held by: "));
  const much = (amount) => (wait.unit === "blocks" ? ` (${counted(amount, wait.unit)})` : "");
  named.forEach(({ request, amount }, i) => line.append(i ? ", " : "", requestLink(request), much(amount)));
  if (wait.holders.length > 3) line.append(` and ${wait.holders.length - 3} more`);
  return line;
}

function requestLink(id) {
  const link = element("button", { type: "button", class: "link", "data-request": id }, nameFor(id));
  link.addEventListener("click", () => openDetail(id, drawn.get(id)?.button ?? link));
  link.addEventListener("focus", () => point(id));
  link.addEventListener("blur", () => point(null));
  return link;
}

function mark() {
  for (const [id, view] of drawn) {
    view.tr.classList.toggle("chosen", id === choice.chosen);
    view.tr.classList.toggle("pointed", id === choice.pointed);
    set(view.button, "aria-expanded", String(id === choice.chosen && !byId("detail").hidden));
  }
}

/* Up and down go from request to request, Escape lets go of the chosen one. */
function walk(event) {
  if (event.key === "Escape") choose(null);
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const tr = event.target.closest("tr");
  if (!by || !tr) return;
  event.preventDefault();
  const next = by > 0 ? tr.nextElementSibling : tr.previousElementSibling;
  next?.querySelector("button.open").focus();
}
