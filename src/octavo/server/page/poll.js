/* Asks again and again: once a second, more rarely when the server is slow or away, never while nobody looks. */

const EVERY = 1000, LONGEST = 30_000, SLOW = 5000;
const SHARE = 4; // at most a quarter of the time is spent asking

/* round(): one round of questions. told(state): {kind: "live" | "busy" | "away" | "key" | ..., message, next (ms)}. */
export function poll(round, told) {
  let timer = null, failures = 0, asking = false;

  async function turn() {
    timer = null;
    if (asking || document.hidden) return;
    asking = true;
    const began = performance.now();
    let next = EVERY;
    try {
      await round();
      failures = 0;
      const took = performance.now() - began;
      next = Math.min(SLOW, Math.max(EVERY, took * SHARE));
      told({ kind: next > 2 * EVERY ? "slow" : "live", message: "", next });
    } catch (error) {
      if (!error.kind) console.error(error); // a fault of this page: keep asking, but say so
      failures++;
      next = Math.min(LONGEST, Math.max((error.after ?? 0) * 1000, EVERY * 2 ** Math.min(failures, 5)));
      told({ kind: error.kind ?? "broken", message: error.message, next });
    }
    asking = false;
    if (timer === null) timer = setTimeout(turn, next);
  }

  function now() {
    clearTimeout(timer);
    timer = null;
    turn();
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) now();
  });
  window.addEventListener("online", now);
  now();
  return now;
}
