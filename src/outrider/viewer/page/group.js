// A group: its rollouts as a table with the reason of each advantage, and the tree where they part.

import {
  a, at, check, facts, fold, h, line, list, number, placeName, plural, quiet, region, signed, table,
} from "./dom.js";
import { ORIGINS, groupOf, splice } from "./paths.js";
import { stepKeys } from "./step.js";
import { kindOf, neighbour, outcomeOf, rolloutAddress, rolloutLink } from "./table.js";

export async function showGroup(run, [where, index]) {
  const group = await groupOf(run, where, index);
  const chosen = [];
  const beside = h("a.button");
  const choose = (rollout, isOn) => {
    if (isOn) chosen.push(rollout);
    else chosen.splice(chosen.indexOf(rollout), 1);
    point();
  };
  const point = () => {
    const isReady = chosen.length === 2;
    beside.setAttribute("aria-disabled", String(!isReady));
    beside.textContent = `Read ${isReady ? chosen.join(" and ") : "two chosen rollouts"} side by side`;
    if (isReady) beside.href = at(run, "beside", where, index, ...chosen);
    else beside.removeAttribute("href");
  };
  point();
  const task = group.rollouts[0]?.task_key ?? "";
  const roots = below(group, -1);
  const origins = Object.entries(ORIGINS).map(([name, text]) => h(`span.origin.${name}`, text));
  const element = h("section",
    h("h1", "Group of ", a(at(run, "task", task), task)),
    quiet(
      a(at(run, "step", where), placeName(where, run.evaluations)),
      ` · ${plural(group.rollouts.length, "rollout")}`,
    ),
    overview(run, group, choose),
    beside,
    explained(group.advantages),
    h("h2", "Tree"),
    list("legend", origins),
    region("Tree", h("ul.tree", roots.map((root) => branch(run, group, root)))),
  );
  const keys = { j: neighbour(1), k: neighbour(-1), ...stepKeys(run, where) };
  return { element, title: `Group of ${task}`, keys };
}

const colour = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");

function overview(run, group, choose) {
  const reasons = group.advantages?.rollouts ?? {};
  const hasAnswers = group.rollouts.some((row) => row.answer);
  const heads = ["Rollout", "Kind", "#Return", "#Advantage", "Outcome"];
  if (hasAnswers) heads.push("Answer");
  if (group.advantages) heads.push("Why", "Clipped tokens");
  const rows = group.rollouts.map((row) => {
    const why = reasons[row.rollout];
    const label = { "aria-label": `choose rollout ${row.rollout}` };
    const cells = [
      check(rolloutLink(run, row), false, (isOn) => choose(row.rollout, isOn), label),
      kindOf(row.kind),
      number(row.episode_return),
      h("strong", { class: colour(row.advantage) }, signed(row.advantage)),
      [outcomeOf(row), row.fault && h("div.quiet", line(row.fault, 80))],
    ];
    if (hasAnswers) cells.push(h("td.key", row.answer));
    if (group.advantages)
      cells.push(
        [h("span.equation", why?.equation), h("div.quiet", why?.parts)],
        why?.clipped ? (why.clipped[0] ? why.clipped.join(" of ") : "none") : "–",
      );
    return { "data-row": row.rollout, cells };
  });
  return table("Rollouts", heads, rows, "group");
}

function explained(advantages) {
  if (!advantages) return null;
  const { formula, mean, std, notes } = advantages;
  return [
    facts([["advantage", formula || null], ["group mean of R", number(mean)], ["spread (std)", number(std)]]),
    notes.map((one) => quiet(one)),
  ];
}

const below = (group, id) => [...group.nodes.values()].filter((node) => node.parent_id === id);

// Nodes without a fork between them are one line; what goes on from a fork is indented below it.
function branch(run, group, node) {
  const chain = [node];
  let leaves, next;
  for (;;) {
    const { node_id } = chain.at(-1);
    leaves = group.rollouts.filter((row) => row.node_id === node_id);
    next = below(group, node_id);
    if (leaves.length || next.length !== 1) break;
    chain.push(next[0]);
  }
  return h("li",
    h("div.chain", chain.map(chip), leaves.map((row) => leaf(run, row))),
    next.length > 0 &&
      h("ul", next.map((child) => branch(run, group, child))),
  );
}

function chip(node) {
  const forks = node.metadata.num_forks ? ` · ${node.metadata.num_forks} left in front` : "";
  const origin = splice(node);
  return h("div", { class: `chip ${node.origin}`, "data-node": node.node_id, title: line(node.text, 600) },
    h("span.label", ORIGINS[node.origin]),
    h("span.text", line(node.text, 70) || "(no words)"),
    origin && fold("source", h("span.quiet", origin)),
    node.origin === "policy" &&
      h("span.quiet", `${plural(node.num_tokens, "token")} · entropy ${number(node.mean_entropy)}${forks}`),
  );
}

const leaf = (run, row) =>
  h("div.leaf", { "data-leaf": row.rollout },
    a(rolloutAddress(run, row), `rollout ${row.rollout}`),
    outcomeOf(row),
    h("span", `return ${number(row.episode_return)}`),
    h("strong", { class: colour(row.advantage) }, `advantage ${signed(row.advantage)}`),
  );
