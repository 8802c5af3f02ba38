// Elements, and words for numbers. Text of a run is hostile: it only ever becomes textContent.

const SAID = new Set(["title", "aria-label", "placeholder"]);

// `h("p.quiet", { title }, ...children)`: the classes behind the tag and the properties may be left out.
export function h(tag, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  const props = children[0]?.constructor === Object ? children.shift() : {};
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

const BIDI = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;

// Signs instead of what would turn the reading direction or command a terminal.
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
  if (!isKnown(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

export const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
export const percent = (value) => (isKnown(value) ? `${(100 * value).toFixed(1)} %` : "–");
export const signed = (value) => (isKnown(value) ? (value > 0 ? "+" : "") + number(value) : "–");
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
export const spaced = (text) => text.replaceAll("_", " ");
export const capital = (text) => text[0].toUpperCase() + text.slice(1);
export const mean = (all) => (all.length ? all.reduce((sum, one) => sum + one, 0) / all.length : null);

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

// Pieces that several views have.

export const at = (run, ...parts) => ["#/run", ...[run.id, ...parts].map(encodeURIComponent)].join("/");
export const go = (address) => () => {
  location.hash = address;
};
export const a = (href, ...text) => h("a", { href }, text);
export const quiet = (...text) => h("p.quiet", text);
export const fault = (...text) => h("p.fault", { role: "alert" }, text);
export const button = (text, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, text);
export const plain = (text, onclick) => button(text, onclick, { class: "plain" });
export const list = (name, items, tag = "ul") =>
  h(tag, { class: name }, items.map((one) => h("li", one)));
export const fold = (summary, ...inside) => h("details", h("summary", summary), inside);

// Unknown values are left out.
export function facts(pairs) {
  const known = pairs.filter(([, value]) => isKnown(value));
  return h("dl.facts", known.map(([name, value]) => h("div", h("dt", name), h("dd", value))));
}

export function select(label, options, value, choose, more = {}) {
  const option = ([key, text]) => h("option", { value: key, selected: `${key}` === `${value}` }, text);
  const onchange = (event) => choose(event.target.value);
  return h("label", label, h("select", { ...more, onchange }, options.map(option)));
}

export function check(text, checked, choose, more = {}) {
  const onchange = (event) => choose(event.target.checked);
  return h("label.choice", h("input", { type: "checkbox", checked, onchange, ...more }), text);
}

// `look` is called with the words when the typing pauses.
export function search(label, value, look, more = {}) {
  let timer = null;
  const oninput = ({ target }) => {
    clearTimeout(timer);
    timer = setTimeout(() => look(target.value.trim()), 80);
  };
  return h("input", { type: "search", "aria-label": label, value, oninput, ...more });
}

// A cell is an element `td` or `th`, or the content of one; the head of a column of numbers begins with #.
export function table(label, heads, rows, name = "") {
  const style = heads.map((one) => (one[0] === "#" ? "n" : ""));
  const th = (text, index) =>
    h("th", { scope: "col", class: style[index] }, text.replace("#", "") || h("span.unseen", "Choose"));
  const cell = (one, index) =>
    ["TD", "TH"].includes(one?.tagName)
      ? one
      : h(index ? "td" : "th", { class: style[index], scope: index ? null : "row" }, one);
  const tr = ({ cells, ...more }) => h("tr", more, cells.map(cell));
  const body = h("tbody", rows.map(tr));
  return region(label, h("table", { class: name }, h("thead", h("tr", heads.map(th))), body));
}

export const region = (label, ...inside) =>
  h("div.scroll", { tabIndex: 0, role: "region", "aria-label": label }, inside);

// The address has the view and its state, so that Back and reload show both again.

export function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(query ?? "") };
}

// Writes values into the present address, except empty and usual ones.
export function keep(values, usual = {}) {
  const { query } = address();
  for (const [name, value] of Object.entries(values))
    value && value !== usual[name] ? query.set(name, value) : query.delete(name);
  const text = String(query) && `?${query}`;
  history.replaceState(null, "", (location.hash.split("?")[0] || "#/") + text);
}

// A view's state as texts, from the address or else as `usual`, and what changes it in both places.
export function stateOf(usual) {
  const { query } = address();
  const state = {};
  for (const name in usual) state[name] = query.get(name) ?? usual[name];
  const change = (news) => {
    Object.assign(state, news);
    keep(state, usual);
  };
  return [state, change];
}
