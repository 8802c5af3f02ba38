// One turn of a chat: its role, its origin, and its text; long ones and tool results are folded.

import { h, line, number, visible } from "./dom.js";
import { ORIGINS, splice } from "./paths.js";
import { tokenText } from "./tokens.js";

const FOLDED = 4000; // letters that are shown of a long turn until somebody asks

export function turn(node, { values = null, rollout = null, by = "entropy", whole = null, isOpen = null } = {}) {
  const isTool = node.origin === "environment" || node.role === "tool";
  const open = isOpen ?? !isTool;
  const about = splice(node);
  const calls = node.metadata.tools?.length ? `calls ${node.metadata.tools.join(", ")}` : "";
  const head = [
    h("span", { class: `origin ${node.origin}` }, ORIGINS[node.origin]),
    h("span", { class: "role" }, roleOf(node)),
    about && h("span", { class: "quiet" }, about),
    node.origin === "policy" &&
      h(
        "span",
        { class: "quiet" },
        `${number(node.num_tokens)} tokens · entropy ${number(node.mean_entropy)}`,
      ),
    calls && h("span", { class: "badge" }, calls),
    // a turn that rollouts share is trained for each of them, and its numbers are on file for one
    rollout !== null &&
      rollout !== node.rollout &&
      values?.advantages.length > 0 &&
      h("span", { class: "quiet" }, `shared: advantage and ratio are rollout ${node.rollout}'s`),
  ];
  const body = values?.tokens?.length ? tokenText(node, values, by) : plain(node, whole);
  return h(
    "article",
    { class: `turn ${node.origin}`, "data-node": node.node_id },
    isTool
      ? h(
          "details",
          { open },
          h("summary", {}, head, h("span", { class: "quiet text" }, line(node.text, 90))),
          body,
        )
      : [h("header", {}, head), body],
  );
}

const roleOf = (node) => (node.role === "inline" ? "inside the assistant's message" : node.role);

function plain(node, whole) {
  if (!node.text) return h("p", { class: "quiet" }, "(no words)");
  const holder = h("pre", { class: "words" });
  const rest = node.text.length - FOLDED + node.num_hidden;
  if (rest <= 0) {
    holder.textContent = visible(node.text);
    return holder;
  }
  holder.textContent = visible(node.text.slice(0, FOLDED));
  const more = h(
    "button",
    {
      type: "button",
      class: "plain",
      onclick: async () => {
        more.disabled = true;
        holder.textContent = visible(node.num_hidden && whole ? (await whole(node)).text : node.text);
        more.remove();
      },
    },
    `Show ${number(rest)} more letters`,
  );
  return h("div", {}, holder, more);
}
