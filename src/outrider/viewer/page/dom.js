// Elements, and words for numbers. Text of a run is hostile: it only ever becomes textContent.

const SAID = new Set(["title", "aria-label", "placeholder"]);

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (SAID.has(name)) element.setAttribute(name, visible(value));
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list" && !name.includes("-") && name !== "role")
      element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, ...children);
}

export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  return put(element, ...children);
}

const BIDI = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;

// What would turn the reading direction or command a terminal is shown as a sign, not done.
export function visible(text) {
  return String(text)
    .replace(CONTROL, (one) => (one < " " ? String.fromCharCode(0x2400 + one.charCodeAt(0)) : "\u2421"))
    .replace(BIDI, (one) => `\u27e8U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

export function line(text, most = 120) {
  const flat = visible(String(text).slice(0, most * 4))
    .replace(/\s+/g, " ")
    .trim();
  return flat.length > most ? flat.slice(0, most) + " …" : flat;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

export function signed(value) {
  return value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : (value > 0 ? "+" : "") + number(value);
}

export function tell(text) {
  document.getElementById("told").textContent = visible(text);
}

export function placeName(where, evaluations = []) {
  const [kind, digits] = where.split("-");
  if (kind === "step") return `step ${Number(digits)}`;
  const label = evaluations[Number(digits)]?.label;
  return `evaluation ${Number(digits)}${label ? ` · ${label}` : ""}`;
}

export const stepPlace = (step) => `step-${String(step).padStart(6, "0")}`;
