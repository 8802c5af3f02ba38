// One turn of a chat: its role, its origin, and its text; long ones and tool results are folded.

import { button, h, line, list, number, plural, quiet, visible } from "./dom.js";
import { ORIGINS, splice } from "./paths.js";
import { tokenText } from "./tokens.js";

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
  return h(
    "article",
    { class: `turn ${node.origin}`, "data-node": node.node_id },
    isTool
      ? h(
          "details",
          { open: isOpen ?? false },
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
  (seconds ?? null) !== null && h("span.quiet", ` ${number(seconds)} s`),
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
