/* Which request the reader has chosen or points at, and the colour each request keeps while the page is open. */

const COLOURS = 9, REMEMBERED = 5000;
const listeners = [];
const ordinals = new Map();
let next = 0;

export const choice = { chosen: null, pointed: null };

/* The request to stand out now, or null. */
export const shown = () => choice.pointed ?? choice.chosen;

export const onChoice = (listener) => listeners.push(listener);

function change(name, id) {
  if (choice[name] === id) return;
  choice[name] = id;
  for (const listener of listeners) listener();
}
export const choose = (id) => change("chosen", id);
export const point = (id) => change("pointed", id);

/* 0..8: by the order in which this page saw the requests. */
export function hue(id) {
  if (!ordinals.has(id)) {
    if (ordinals.size >= REMEMBERED) ordinals.delete(ordinals.keys().next().value);
    ordinals.set(id, next++ % COLOURS);
  }
  return ordinals.get(id);
}

/* Every request's name as the client gave it, by the engine's id: blocks and holders only have ids. */
const names = new Map();
export function remember(rows) {
  if (names.size > REMEMBERED) names.clear();
  for (const row of rows) names.set(row.id, row.label || row.id);
}
export const nameFor = (id) => names.get(id) ?? id;
