/* Numbers as a reader wants them; the ledger's lines, states and causes in plain words. */

export const number = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const plural = (count, one, many = one + "s") => `${number(count)} ${count === 1 ? one : many}`;

/* counted(1, "slots") is "1 slot". */
export const counted = (count, unit) => plural(count, unit.replace(/s$/, ""), unit);

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1023.5 && at < units.length - 1) {
    value /= 1024;
    at++;
  }
  return `${number(value, at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${units[at]}`;
}

/* A duration in seconds: "850 ms", "12.4 s", "3 min 5 s". */
export function clock(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.9995) return number(s * 1000, s > 0 && s < 0.00995 ? 1 : 0) + " ms";
  if (s < 119.5) return number(s, s < 9.995 ? 2 : s < 99.95 ? 1 : 0) + " s";
  const whole = Math.round(s);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function share(value) {
  if (value > 0 && value < 0.0005) return "<0.1 %";
  if (value > 0.9995 && value < 1) return ">99.9 %";
  return number(100 * value, value > 0 && value < 0.0995 ? 1 : 0) + " %";
}

export const rate = (value) => (value === null || value === undefined ? "–" : number(value, value < 9.95 ? 1 : 0));

/* The ledger's lines, in the order in which bars and plots stack them: [key, class, name, meaning, part of the pool]. */
const LINES = [
  ["live", "live", "live", "token states of requests that run; shared blocks count once", true],
  ["cached", "cached", "cached prefixes", "token states of earlier requests, kept for reuse and given up when needed", true],
  ["slack", "slack", "slack in tail blocks", "unwritten slots of blocks that hold at least one token", true],
  ["reserved", "reserved", "reserved, empty", "allocated to a request and not written yet; nobody else can use it", true],
  ["lookahead", "lookahead", "lookahead", "slots for tokens that are drafted or computed ahead", true],
  ["quarantined", "quarantined", "quarantined", "source blocks of copies that have not run yet", true],
  ["fragmented", "fragmented", "fragmented", "free, but in no run long enough for the request that waits first", true],
  ["held back", "held", "held back", "kept free by admission for requests that already run", true],
  ["free", "free", "free", "free for anyone", true],
  ["padding", "padding", "padding", "pool memory too small for a block, and the pool's own bookkeeping", false],
  ["weights", "weights", "weights", "the model's parameters", false],
  ["activations", "activations", "activations", "intermediate results of the largest step", false],
  ["workspace", "workspace", "workspace", "scratch memory of kernels and libraries", false],
  ["outside", "outside", "outside", "memory of the device that the engine leaves alone", false],
];

/* The lines of a ledger as {key, mark, name, meaning, pool}; one that this page does not know is shown by its key. */
export function linesOf(ledger) {
  const known = LINES.map(([key, mark, name, meaning, pool]) => ({ key, mark, name, meaning, pool }));
  const others = Object.keys(ledger.lines)
    .filter((key) => !LINES.some((line) => line[0] === key))
    .map((key) => ({ key, mark: "outside", name: key, meaning: "a line of this server's ledger", pool: false }));
  return [...known, ...others].filter((line) => line.key in ledger.lines);
}

export const poolBytes = (ledger) =>
  LINES.filter(([, , , , pool]) => pool).reduce((sum, [key]) => sum + (ledger.lines[key] ?? 0), 0);

export const BLOCK_STATES = {
  live: "live: holds token states of",
  slack: "slack: the partly written last block of",
  reserved: "reserved and empty, for",
  cached: "a cached prefix, kept for reuse until somebody needs the room",
  free: "free",
  quarantined: "quarantined: source of a copy that has not run yet",
};

/* Why requests wait: [cause, class, headline, "n requests wait ..."], in order of precedence. */
const CAUSES = [
  ["never", "w-never", "Can never fit", "for more than there is"],
  ["quota", "w-quota", "Its tenant’s quota is used up", "for their tenant’s quota"],
  ["slots", "w-slots", "All sequence slots are taken", "for a sequence slot"],
  ["memory: full", "w-full", "Memory is full", "for memory (full)"],
  ["memory: fragmented", "w-fragmented", "Memory is fragmented", "for memory in one piece (fragmented)"],
  ["memory: held", "w-held", "Memory is held back", "for memory (held back)"],
  ["behind", "w-behind", "Behind another request", "behind another request"],
  ["step budget", "w-budget", "The step’s token budget is used up", "for room in a step"],
  ["transfer", "w-other", "Its blocks are being moved", "for a transfer"],
  ["next step", "w-next", "Starts with the next step", "for the next step only"],
  ["no step", "w-stalled", "No step runs", "for the engine, which runs no step"],
];

export const causeOrder = CAUSES.map(([cause]) => cause);

export function causeWords(cause) {
  const found = CAUSES.find(([name]) => name === cause);
  const [, mark, headline, aim] = found ?? [cause, "w-other", cause, `for ${cause}`];
  return { mark, headline, aim };
}

/* "needs 12 blocks, 7 available, 5 short", or null where the cause has no such numbers. */
export function needs(wait) {
  if (wait.short > 0 && wait.cause !== "behind" && wait.cause !== "no step")
    return `needs ${counted(wait.need, wait.unit)}, ${number(wait.have)} available, ${number(wait.short)} short`;
  return null;
}

export const STATES = {
  running: { prefill: "running, prefill", decode: "running, decode" },
  waiting: { queued: "waiting, queued", preempted: "waiting, preempted", prefill: "waiting in prefill", decode: "waiting in decode" },
  finished: {},
};
export const stateWords = (row) => STATES[row.state]?.[row.phase] ?? row.state;

/* What the client calls it, or else the engine's own id. */
export const nameOf = (row) => row.label || row.id;

/* A long id as its beginning and end: "cmpl-a0d7…89ab". */
export const short = (id) => (id.length > 22 ? `${id.slice(0, 9)}…${id.slice(-4)}` : id);
