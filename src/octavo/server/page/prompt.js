/* Try the model: sends a prompt, shows the text as it streams, how fast it came, and the request's id. */

import { events, getJson, send } from "./api.js";
import { openDetail } from "./detail.js";
import { byId, element, put } from "./dom.js";
import { clock, number, plural, rate } from "./words.js";

let stopper = null, model = null, needKey = () => {};

export function beginPrompt(onKey) {
  needKey = onKey;
  byId("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopper === null) run();
  });
  byId("prompt-stop").addEventListener("click", () => stopper?.abort());
  byId("prompt-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
  });
}

async function run() {
  const [text, tokens, temperature] = ["text", "tokens", "temperature"].map((name) => byId("prompt-" + name).value);
  const asked = { text, tokens: Number(tokens), temperature: Number(temperature) };
  const came = { began: performance.now(), first: null, last: null, tokens: 0, id: null, plain: false };
  stopper = new AbortController();
  busy(true);
  put(byId("prompt-output"), "");
  byId("prompt-figures").replaceChildren();
  put(byId("prompt-status"), "Sent; waiting for the first token.");
  try {
    const finish = await stream(asked, came, stopper.signal);
    const plain = came.plain ? " The model has no chat template: the prompt was sent as it is." : "";
    put(byId("prompt-status"), `Done${finish ? ` (${finish})` : ""}: ${plural(came.tokens, "token")}.${plain}`);
  } catch (error) {
    if (error.name === "AbortError") put(byId("prompt-status"), `Stopped after ${plural(came.tokens, "token")}.`);
    else put(byId("prompt-status"), error.message);
    if (error.kind === "key") needKey(error.message);
  }
  stopper = null;
  figures(came);
  busy(false);
}

function busy(on) {
  byId("prompt-send").disabled = on;
  byId("prompt-stop").disabled = !on;
  byId("prompt-output").setAttribute("aria-busy", String(on));
}

/* The model's name, asked for once. */
async function modelName() {
  if (model === null) model = (await getJson("/v1/models")).data[0].id;
  return model;
}

/* Returns the finish reason. */
async function stream(asked, came, signal) {
  const answer = await ask(asked, came, signal);
  let finish = null;
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    came.id ??= chunk.id ?? null;
    const part = chunk.choices?.[0];
    finish = part?.finish_reason ?? finish;
    const text = part?.delta?.content ?? part?.text ?? "";
    if (text) take(text, came);
    if (chunk.usage) came.tokens = chunk.usage.completion_tokens;
  }
  return finish;
}

async function ask({ text, tokens, temperature }, came, signal) {
  const common = { model: await modelName(), max_tokens: tokens, temperature, stream: true, stream_options: { include_usage: true } };
  came.began = performance.now();
  try {
    return await send("/v1/chat/completions", { body: { ...common, messages: [{ role: "user", content: text }] }, signal });
  } catch (error) {
    const noTemplate = error.kind === "refused" && /template/i.test(`${error.code} ${error.message}`);
    if (!noTemplate) throw error;
  }
  came.plain = true;
  came.began = performance.now();
  return send("/v1/completions", { body: { ...common, prompt: text }, signal });
}

function take(text, came) {
  came.last = performance.now();
  came.first ??= came.last;
  came.tokens++;
  const output = byId("prompt-output"), below = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  output.append(text);
  if (below) output.scrollTop = output.scrollHeight;
  figures(came);
}

function figures(came) {
  const shown = [];
  if (came.first !== null) {
    const taken = (came.last - came.first) / 1000;
    shown.push(["TTFT", clock((came.first - came.began) / 1000)], ["Tokens", number(came.tokens)]);
    if (taken > 0 && came.tokens > 1) shown.push(["Tokens/s", rate((came.tokens - 1) / taken)], ["ITL, mean", clock(taken / (came.tokens - 1))]);
  }
  const nodes = shown.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  if (came.id) nodes.push(element("dt", {}, "Request"), element("dd", {}, idLink(came.id)));
  byId("prompt-figures").replaceChildren(...nodes);
}

let link = null;
function idLink(id) {
  if (link?.textContent === id) return link; // the same button while tokens arrive, so that it can be pressed
  link = element("button", { type: "button", class: "link" }, id);
  link.addEventListener("click", () => openDetail(id, link));
  return link;
}
