// The policy's tokens, shaded by one of their numbers; the numbers of a token on hover or touch.

import { h, number, visible } from "./dom.js";

export const SHADES = {
  entropy: { text: "entropy", of: (v, i) => v.entropies[i], edges: [0.05, 0.2, 0.5, 1, 1.7, 2.5, 3.5] },
  logprob: { text: "log-prob", of: (v, i) => -v.logprobs[i], edges: [0.05, 0.2, 0.5, 1, 2, 4, 7] },
  advantage: {
    text: "advantage",
    of: (v, i) => v.advantages[i],
    isSigned: true,
    edges: [0.01, 0.3, 0.8, 1.5],
  },
  ratio: {
    text: "importance ratio",
    of: (v, i) => logOf(v.ratios[i]),
    isSigned: true,
    edges: [0.001, 0.02, 0.1, 0.2],
  },
  gap: { text: "trainer–sampler gap", of: gapOf, isSigned: true, edges: [1e-5, 1e-3, 0.01, 0.1] },
};

const isKnown = (value) => value !== undefined && value !== null && !Number.isNaN(value);
const logOf = (ratio) => (isKnown(ratio) ? Math.log(ratio) : undefined);

function gapOf(values, index) {
  const trainer = values.trainer_logprobs[index];
  return isKnown(trainer) ? trainer - values.logprobs[index] : undefined;
}

function shade(name, values, index) {
  const { of, edges, isSigned } = SHADES[name];
  const value = of(values, index);
  if (!isKnown(value)) return "none";
  const level = edges.filter((edge) => Math.abs(value) >= edge).length;
  if (isSigned) return level === 0 ? "s0" : `${value > 0 ? "p" : "m"}${level}`;
  return `s${level}`;
}

export function tokenText(node, values, by) {
  const spans = values.tokens.map((token, index) =>
    h("span", { class: `t ${shade(by, values, index)}`, "data-i": index }, visible(token) || "∅"),
  );
  const reading = h("p", { class: "reading", hidden: true });
  const element = h("div.readable", h("pre", { class: "tokens", "data-node": node.node_id }, spans), reading);
  // The numbers appear below the pointer, inside of the text's width.
  const show = (event) => {
    const index = event.target.dataset?.i;
    reading.hidden = index === undefined;
    if (reading.hidden) return;
    reading.textContent = numbers(values, Number(index));
    const box = element.getBoundingClientRect();
    reading.style.top = `${event.clientY - box.top + 16}px`;
    reading.style.left = `${Math.max(0, Math.min(event.clientX - box.left, box.width - reading.offsetWidth))}px`;
  };
  element.addEventListener("pointerover", show);
  element.addEventListener("click", show);
  element.addEventListener("pointerleave", () => (reading.hidden = true));
  return element;
}

export function numbers(values, index) {
  const at = (name) => values[name][index];
  const parts = [
    `${index + 1} of ${values.tokens.length} “${visible(values.tokens[index])}”`,
    `entropy ${number(at("entropies"), 4)} nats`,
    `log-prob ${number(at("logprobs"), 4)}`,
    at("advantages") !== undefined && `advantage ${number(at("advantages"), 4)}`,
    at("ratios") !== undefined && `ratio ${number(at("ratios"), 5)}`,
    gapOf(values, index) !== undefined && `gap ${number(gapOf(values, index), 3)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
