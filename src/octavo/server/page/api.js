/* Talking to the server: JSON in and out, the API key, and failures as what they mean to a reader. */

const KEY = "octavo-key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch (error) {
  console.info("Keys are not remembered:", error.message);
}

export class Failure extends Error {
  /* kind: "key" (401), "busy" (429, 503), "away" (no answer), "refused" (other 4xx), "broken" (5xx) */
  constructor(kind, message, { status = 0, code = null, after = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, after });
  }
}

export function setKey(value) {
  key = value.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch (error) {
    console.info("The key lasts as long as this page:", error.message);
  }
}

export const hasKey = () => key !== "";

/* A response with a good status. Throws Failure for everything else, and AbortError where `signal` says so. */
export async function send(path, { body = null, signal = null } = {}) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  if (body !== null) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Failure("busy", "The server took too long to answer.");
    throw new Failure("away", "The server does not answer.");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

async function failure(answer) {
  const { status } = answer;
  const said = await answer.json().then((told) => told.error ?? {}).catch(() => ({})); // a proxy's page is no JSON
  const message = typeof said.message === "string" ? said.message : `The server answered ${status}.`;
  const kind = status === 401 ? "key" : [429, 503].includes(status) ? "busy" : status >= 500 ? "broken" : "refused";
  const after = Number(answer.headers.get("Retry-After")) || null;
  return new Failure(kind, message, { status, code: said.code ?? null, after });
}

export const getJson = async (path, patience = 10_000) =>
  (await send(path, { signal: AbortSignal.timeout(patience) })).json();

export const postJson = async (path, body, signal = null) => (await send(path, { body, signal })).json();

/* The data of each server-sent event of a response, parsed; ends at [DONE]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const text = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (text === "[DONE]") return;
      if (text) yield JSON.parse(text);
    }
  }
}
