// One turn of a chat: its role, its origin, and its text; long ones and tool results are folded.

import { button, h, isKnown, line, list, number, plural, quiet, visible } from "./dom.js";
import { ORIGINS, splice } from "./paths.js";

const FOLDED = 4000; // letters that are shown of a long turn until somebody asks

export function turn(node, { values, rollout, by = "entropy", whole, isOpen } = {}) {
  const isTool = node.origin === "environment" || node.role === "tool";
  const calls = node.metadata.tool_calls ?? [];
  const names = calls.length ? [] : (node.metadata.tools ?? []);
  const note = (text) => h("span.quiet", text);
  const head = [
    h(`span.origin.${node.origin}`, ORIGINS[node.origin]),
    h("span.quiet", node.role === "inline" ? "inside the assistant's message" : node.role),
    note(splice(node)),
    node.origin === "policy" &&
      note(`${plural(node.num_tokens, "token")} · entropy ${number(node.mean_entropy)}`),
    names.length > 0 && h("span.badge", `calls ${names.join(", ")}`),
    // a turn that rollouts share is trained for each of them, and its numbers are on file for one
    isKnown(rollout) &&
      rollout !== node.rollout &&
      values?.advantages.length > 0 &&
      note(`shared: advantage and ratio are rollout ${node.rollout}'s`),
  ];
  const body = values?.tokens?.length ? tokenText(node, values, by) : plainText(node, whole);
  return h("article", { class: `turn ${node.origin}`, "data-node": node.node_id },
    isTool
      ? h("details", { open: isOpen ?? false },
          h("summary", head, h("span.quiet.text", line(node.text, 90))),
          body,
        )
      : [h("header", head), body],
    calls.length > 0 && list("calls", calls.map(call)),
  );
}

const call = ({ name, arguments: given, status, seconds }) => [
  h("span", { class: `badge ${["ok", "empty"].includes(status) ? "" : "stopped"}` }, status),
  " ",
  h("code", `${name || "not parsed"} ${line(given, 300)}`),
  isKnown(seconds) && h("span.quiet", ` ${number(seconds)} s`),
];

function plainText(node, whole) {
  if (!node.text) return quiet("(no words)");
  const holder = h("pre.words", node.text.slice(0, FOLDED));
  const rest = node.text.length - FOLDED + node.num_hidden;
  if (rest <= 0) return holder;
  const more = async () => {
    holder.textContent = visible(node.num_hidden && whole ? (await whole(node)).text : node.text);
    shown.remove();
  };
  const shown = button(`Show ${number(rest)} more letters`, more, { class: "plain" });
  return h("div", holder, shown);
}

// The policy's tokens, shaded by one of their numbers; the numbers of a token on hover or touch.

// Text, value of a token, edges of the levels, and whether the sign is shown.
export const SHADES = {
  entropy: ["entropy", (v, i) => v.entropies[i], [0.05, 0.2, 0.5, 1, 1.7, 2.5, 3.5]],
  logprob: ["log-prob", (v, i) => -v.logprobs[i], [0.05, 0.2, 0.5, 1, 2, 4, 7]],
  advantage: ["advantage", (v, i) => v.advantages[i], [0.01, 0.3, 0.8, 1.5], true],
  ratio: ["importance ratio", (v, i) => logOf(v.ratios[i]), [0.001, 0.02, 0.1, 0.2], true],
  gap: ["trainer–sampler gap", gapOf, [1e-5, 1e-3, 0.01, 0.1], true],
};

const logOf = (ratio) => (isKnown(ratio) ? Math.log(ratio) : undefined);

function gapOf(values, index) {
  const trainer = values.trainer_logprobs[index];
  return isKnown(trainer) ? trainer - values.logprobs[index] : undefined;
}

function shade(name, values, index) {
  const [, valueOf, edges, isSigned] = SHADES[name];
  const value = valueOf(values, index);
  if (!isKnown(value)) return "none";
  const level = edges.filter((edge) => Math.abs(value) >= edge).length;
  return `${isSigned && level ? (value > 0 ? "p" : "m") : "s"}${level}`;
}

function tokenText(node, values, by) {
  const spans = values.tokens.map((token, index) =>
    h("span", { class: `t ${shade(by, values, index)}`, "data-i": index }, visible(token) || "∅"),
  );
  const reading = h("p.reading", { hidden: true });
  const element = h("div.readable", h("pre.tokens", { "data-node": node.node_id }, spans), reading);
  // The numbers appear below the pointer, inside of the text's width.
  const show = (event) => {
    const index = event.target.dataset?.i;
    reading.hidden = index === undefined;
    if (reading.hidden) return;
    reading.textContent = numbers(values, Number(index));
    const box = element.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left, box.width - reading.offsetWidth);
    Object.assign(reading.style, {
      top: `${event.clientY - box.top + 16}px`,
      left: `${Math.max(0, left)}px`,
    });
  };
  element.addEventListener("pointerover", show);
  element.addEventListener("click", show);
  element.addEventListener("pointerleave", () => (reading.hidden = true));
  return element;
}

function numbers(values, index) {
  const shown = [
    [
      `${index + 1} of ${values.tokens.length} “${visible(values.tokens[index])}” · entropy`,
      values.entropies,
      4,
    ],
    ["nats · log-prob", values.logprobs, 4],
    ["· advantage", values.advantages, 4],
    ["· ratio", values.ratios, 5],
    ["· gap", [...Array(index), gapOf(values, index)], 3],
  ];
  const known = shown.filter(([, of]) => of[index] !== undefined);
  return known.map(([name, of, digits]) => `${name} ${number(of[index], digits)}`).join(" ");
}
