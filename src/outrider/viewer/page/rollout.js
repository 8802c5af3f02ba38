// One rollout as a chat.

import { ask } from "./data.js";
import {
  a, address, at, button, facts, fault, fill, fold, go, h, isKnown, keep, number, placeName, plural, quiet,
  select, signed, spaced, tell,
} from "./dom.js";
import { groupOf, pathOf, rolloutOf } from "./paths.js";
import { stepKeys } from "./step.js";
import { neighbour } from "./table.js";
import { SHADES, turn } from "./turns.js";

export async function showRollout(run, [where, index, rollout], query) {
  const group = await groupOf(run, where, index);
  const row = rolloutOf(group, rollout);
  const path = pathOf(group, rollout);
  const given = { run: run.id, where, trace: group.trace_id };
  const values = path.length ? (await ask("tokens", { ...given, rollout })).nodes : {};
  const chat = h("div.chat");
  const whole = (node) => ask("text", { ...given, node: node.node_id });
  const isSought = (node) => String(node.node_id) === query.get("node") || null;
  const shared = { rollout: row.rollout, whole };
  const draw = () => {
    const by = shading();
    const options = (node) => ({ ...shared, by, values: values[node.node_id], isOpen: isSought(node) });
    fill(chat, path.map((node) => turn(node, options(node))));
  };
  draw();
  const groupAddress = at(run, "group", where, index);
  const element = h("section",
    h("h1", `Rollout ${rollout} of `, a(at(run, "task", row.task_key), row.task_key)),
    quiet(
      a(at(run, "step", where), placeName(where, run.evaluations)),
      " · ",
      a(groupAddress, "its group (g)"),
      " · ",
      a(at(run, "counter", where, index, rollout), "what if: siblings without its splice or fork"),
    ),
    rolloutFacts(row),
    row.fault && fault(`${spaced(row.outcome)}: ${row.fault}`),
    tools(run, row, path, values, where, draw),
    teacher(path.at(-1)?.metadata ?? {}),
    path.length ? chat : quiet("It was lost before a turn was written."),
    ending(row, group.advantages?.rollouts[rollout]),
  );
  const keys = { j: neighbour(1), k: neighbour(-1), g: go(groupAddress), ...stepKeys(run, where) };
  const sought = chat.querySelector(`[data-node="${Number(query.get("node") ?? -1)}"]`);
  const ready = () => sought?.scrollIntoView({ block: "center" });
  return { element, title: `Rollout ${rollout} of ${row.task_key}`, ready, keys };
}

export const rolloutFacts = (row) =>
  facts([
    ["return", number(row.episode_return)],
    ["advantage", signed(row.advantage)],
    ["outcome", spaced(row.outcome)],
    ["kind", row.kind],
    ["mode", row.mode || "–"],
    ["turns", number(row.num_turns)],
    ["tokens", number(row.num_tokens)],
    ["calls", number(row.num_calls)],
    ["failed calls", row.num_failed_calls],
    ["mean entropy", `${number(row.mean_entropy)} nats`],
  ]);

// Why the return is what it is, and the advantage; earlier versions recorded only the latter.
function ending(row, why) {
  const parts = Object.entries(row.reward_parts ?? {}).map(
    ([name, value]) => `${spaced(name)} ${number(value)}`,
  );
  const known = [
    ["extracted answer", row.answer],
    ["targets", row.targets?.join(" · ")],
    ["parts of the reward", parts.join(" · ") || null],
    ["reason", row.reason || null],
    ["advantage", why?.equation || null],
  ];
  if (!known.some(([, value]) => isKnown(value))) return null;
  return h("section.card.ending", h("h2", "Result"), facts(known), quiet(why?.parts));
}

// Self-distillation: the text that only the teacher read, equal in every context of the rollout.
function teacher({ help, without_help }) {
  if (without_help) return quiet(`The teacher had no help: ${spaced(String(without_help))}.`);
  if (!help?.length) return null;
  const [{ source, tokens, text }] = help;
  const about = h("span.quiet", `${source} · ${plural(tokens, "token")}`);
  const folded = fold(["What the teacher saw ", about], h("pre.words", text));
  folded.className = "turn memory teacher";
  return folded;
}

const shading = () => address().query.get("shade") ?? "entropy";

function tools(run, row, path, values, where, draw) {
  const command = where.startsWith("step-")
    ? `outrider replay ${run.curves.path} --step ${Number(where.slice(5))}`
    : "only training steps can be played again";
  const copy = async () => {
    const turns = path.map((node) => ({ ...node, ...(values[node.node_id] ?? {}) }));
    const text = JSON.stringify({ ...row, turns }, null, 1);
    try {
      await navigator.clipboard.writeText(text);
      tell("copied as JSON");
      copied.textContent = "Copied";
    } catch {
      prompt("No clipboard outside of https and loopback: copy by hand", text);
    }
  };
  const copied = button("Copy as JSON", copy);
  const shade = (value) => {
    keep({ shade: value });
    draw();
  };
  const shades = Object.entries(SHADES).map(([value, [text]]) => [value, text]);
  return h("div.controls",
    select("shade by", shades, shading(), shade, { name: "shade" }),
    copied,
    fold("Play again", h("code.command", command)),
  );
}
