// One rollout as a chat.

import { ask } from "./data.js";
import { fill, h, number, placeName, signed, tell } from "./dom.js";
import { groupOf, pathOf, rolloutOf } from "./paths.js";
import { step } from "./step.js";
import { neighbour } from "./table.js";
import { SHADES } from "./tokens.js";
import { turn } from "./turns.js";

let shading = "entropy";

export async function showRollout(run, [where, index, number_], query) {
  const group = await groupOf(ask, run, where, index);
  const row = rolloutOf(group, number_);
  const path = pathOf(group, number_);
  const given = { run: run.id, where, trace: group.trace_id };
  const values = path.length ? (await ask("tokens", { ...given, rollout: number_ })).nodes : {};
  const chat = h("div", { class: "chat" });
  const whole = (node) => ask("text", { ...given, node: node.node_id });
  const draw = () =>
    fill(
      chat,
      path.map((node) =>
        turn(node, {
          values: values[node.node_id],
          rollout: Number(number_),
          by: shading,
          whole,
          isOpen: String(node.node_id) === query.get("node") ? true : null,
        }),
      ),
    );
  draw();
  const base = `#/run/${encodeURIComponent(run.id)}`;
  const element = h(
    "section",
    {},
    h(
      "h1",
      {},
      `Rollout ${number_} of `,
      h("a", { href: `${base}/task/${encodeURIComponent(row.task_key)}` }, row.task_key),
    ),
    h(
      "p",
      { class: "quiet" },
      h("a", { href: `${base}/step/${where}` }, placeName(where, run.evaluations)),
      " · ",
      h("a", { href: `${base}/group/${where}/${index}` }, "its group (g)"),
      " · ",
      h(
        "a",
        { href: `${base}/counter/${where}/${index}/${number_}` },
        "what if: siblings without its splice or fork",
      ),
    ),
    facts(row),
    row.fault && h("p", { class: "fault" }, `${row.outcome.replaceAll("_", " ")}: ${row.fault}`),
    tools(run, row, path, values, where, draw),
    teacher(path.at(-1)?.metadata ?? {}),
    path.length ? chat : h("p", { class: "quiet" }, "It was lost before a turn was written."),
  );
  const go = (by) => () => step(run, where, by);
  return {
    element,
    title: `Rollout ${number_} of ${row.task_key}`,
    ready: () =>
      query.get("node") &&
      chat
        .querySelector(`[data-node="${CSS.escape(query.get("node"))}"]`)
        ?.scrollIntoView({ block: "center" }),
    keys: {
      j: () => neighbour(1),
      k: () => neighbour(-1),
      g: () => {
        location.hash = `${base}/group/${where}/${index}`;
      },
      ArrowLeft: go(-1),
      ArrowRight: go(1),
    },
  };
}

export function facts(row) {
  const all = [
    ["return", number(row.episode_return)],
    ["advantage", signed(row.advantage)],
    ["outcome", row.outcome.replaceAll("_", " ")],
    ["kind", row.kind],
    ["mode", row.mode || "–"],
    ["turns", number(row.num_turns)],
    ["tokens", number(row.num_tokens)],
    ["calls", number(row.num_calls)],
    ["mean entropy", `${number(row.mean_entropy)} nats`],
  ];
  return h(
    "dl",
    { class: "facts" },
    all.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

// Self-distillation: the text that only the teacher read, equal in every context of the rollout.
function teacher({ help, without_help }) {
  if (without_help)
    return h("p", { class: "quiet" }, `The teacher had no help: ${String(without_help).replaceAll("_", " ")}.`);
  if (!help?.length) return null;
  const [{ source, tokens, text }] = help;
  return h(
    "details",
    { class: "turn memory teacher" },
    h("summary", {}, "What the teacher saw ", h("span", { class: "quiet" }, `${source} · ${number(tokens)} tokens`)),
    h("pre", { class: "words" }, text),
  );
}

function tools(run, row, path, values, where, draw) {
  const command = h("code", { class: "command", hidden: true });
  const again = () => {
    command.hidden = !command.hidden;
    command.textContent = where.startsWith("step-")
      ? `outrider replay ${run.curves.path} --step ${Number(where.slice(5))}`
      : "only training steps can be played again";
  };
  const copy = async () => {
    const text = JSON.stringify(
      { ...row, turns: path.map((node) => ({ ...node, ...(values[node.node_id] ?? {}) })) },
      null,
      1,
    );
    try {
      await navigator.clipboard.writeText(text);
      tell("copied as JSON");
      copied.textContent = "Copied";
    } catch {
      shown.hidden = false; // no clipboard outside of https and loopback: then by hand
      shown.value = text;
      shown.select();
    }
  };
  const copied = h("button", { type: "button", onclick: copy }, "Copy as JSON");
  const shown = h("textarea", { hidden: true, readOnly: true, rows: 6, "aria-label": "The rollout as JSON" });
  return h(
    "div",
    { class: "controls" },
    h(
      "label",
      {},
      "shade by",
      h(
        "select",
        {
          name: "shade",
          onchange: (event) => {
            shading = event.target.value;
            draw();
          },
        },
        Object.entries(SHADES).map(([value, { text }]) =>
          h("option", { value, selected: value === shading }, text),
        ),
      ),
    ),
    copied,
    h("button", { type: "button", onclick: again }, "Play again"),
    command,
    h("span", { class: "quiet" }, "Point at a token, or touch it, for its numbers."),
    shown,
  );
}
