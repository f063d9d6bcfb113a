/* Making and changing elements, the one tooltip, and colours as canvases need them. Text is only ever textContent. */

export const byId = (id) => document.getElementById(id);

/* element("td", {class: "x"}, "text" or nodes): attributes that are null or false are left out. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  attach(node, attributes);
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function shape(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  attach(node, attributes);
  if (text !== null) node.textContent = text;
  return node;
}

function attach(node, attributes) {
  for (const [key, value] of Object.entries(attributes))
    if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
}

/* Change only what differs: untouched nodes keep selections, focus and the screen reader's place. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/* The colour of a variable of style.css, resolved for the theme. */
const resolved = new Map();
document.addEventListener("octavo-theme", () => resolved.clear());
export function colour(name) {
  if (!resolved.has(name)) {
    const probe = byId("probe");
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

/* A square of the colour `mark`: a class of style.css. */
export const swatch = (mark) => element("i", { class: "swatch " + mark, "aria-hidden": "true" });

/* words: [title, line, line ...] beside the point (x, y) of the window; null hides the tip. */
export function tip(words, x = 0, y = 0) {
  const box = byId("tip");
  box.hidden = !words;
  if (!words) return;
  box.replaceChildren(element("b", {}, words[0]), ...words.slice(1).map((line) => element("span", {}, line)));
  const room = box.getBoundingClientRect();
  const right = x + 16 + room.width < window.innerWidth;
  const left = right ? x + 16 : x - 16 - room.width;
  box.style.left = Math.max(4, Math.min(left, window.innerWidth - room.width - 4)) + "px";
  box.style.top = Math.max(4, Math.min(y + 16, window.innerHeight - room.height - 6)) + "px";
}

export function fit(canvas, width, height) {
  const scale = Math.max(1, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
