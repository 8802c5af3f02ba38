// One turn of a chat: its role, its origin, and its text; long ones and tool results are folded.

import { button, h, isKnown, line, list, number, plural, quiet, visible } from "./dom.js";
import { ORIGINS, splice } from "./paths.js";

const FOLDED = 4000; // letters that are shown of a long turn until somebody asks

export function turn(
  node,
  { values = null, rollout = null, by = "entropy", whole = null, isOpen = null } = {},
) {
  const isTool = node.origin === "environment" || node.role === "tool";
  const calls = node.metadata.tool_calls ?? [];
  const names = calls.length ? [] : (node.metadata.tools ?? []);
  const note = (text) => h("span.quiet", text);
  const head = [
    h("span", { class: `origin ${node.origin}` }, ORIGINS[node.origin]),
    h("span.role", node.role === "inline" ? "inside the assistant's message" : node.role),
    note(splice(node)),
    node.origin === "policy" &&
      note(`${plural(node.num_tokens, "token")} · entropy ${number(node.mean_entropy)}`),
    names.length > 0 && h("span.badge", `calls ${names.join(", ")}`),
    // a turn that rollouts share is trained for each of them, and its numbers are on file for one
    rollout !== null &&
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

function tokenText(node, values, by) {
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
  const at = (name) => values[name][index];
  const gap = gapOf(values, index);
  const parts = [
    `${index + 1} of ${values.tokens.length} “${visible(values.tokens[index])}”`,
    `entropy ${number(at("entropies"), 4)} nats`,
    `log-prob ${number(at("logprobs"), 4)}`,
    at("advantages") !== undefined && `advantage ${number(at("advantages"), 4)}`,
    at("ratios") !== undefined && `ratio ${number(at("ratios"), 5)}`,
    gap !== undefined && `gap ${number(gap)}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
