// A group as a tree: where rollouts part, what was spliced in and from where, what every leaf got.

import { ask } from "./data.js";
import { h, line, number, placeName, signed } from "./dom.js";
import { ORIGINS, childrenOf, groupOf, splice } from "./paths.js";
import { step } from "./step.js";
import { neighbour, rolloutAddress } from "./table.js";

export async function showGroup(run, [where, index]) {
  const group = await groupOf(ask, run, where, index);
  const below = childrenOf(group);
  const chosen = [];
  const beside = h(
    "a",
    { class: "button", "aria-disabled": "true" },
    "Choose two rollouts to read side by side",
  );
  const choose = (rollout, isOn) => {
    if (isOn) chosen.push(rollout);
    else chosen.splice(chosen.indexOf(rollout), 1);
    const isReady = chosen.length === 2;
    beside.setAttribute("aria-disabled", String(!isReady));
    beside.textContent = isReady
      ? `Read ${chosen[0]} and ${chosen[1]} side by side`
      : "Choose two rollouts to read side by side";
    if (isReady)
      beside.href = `#/run/${encodeURIComponent(run.id)}/beside/${where}/${index}/${chosen[0]}/${chosen[1]}`;
    else beside.removeAttribute("href");
  };
  const roots = (below.get(-1) ?? []).map((root) => branch(root, { run, group, below, choose }));
  const lost = group.rollouts.filter((row) => row.node_id < 0);
  const task = group.rollouts[0]?.task_key ?? "";
  const element = h(
    "section",
    {},
    h(
      "h1",
      {},
      "Group of ",
      h("a", { href: `#/run/${encodeURIComponent(run.id)}/task/${encodeURIComponent(task)}` }, task),
    ),
    h(
      "p",
      { class: "quiet" },
      h(
        "a",
        { href: `#/run/${encodeURIComponent(run.id)}/step/${where}` },
        placeName(where, run.evaluations),
      ),
      ` · ${group.rollouts.length} rollouts`,
    ),
    h(
      "ul",
      { class: "legend", "aria-label": "Origins" },
      Object.entries(ORIGINS).map(([name, text]) => h("li", { class: `origin ${name}` }, text)),
    ),
    h(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Tree" },
      h("ul", { class: "tree" }, roots),
    ),
    lost.length > 0 &&
      h(
        "p",
        {},
        "Lost before a turn was written: ",
        lost.map((row) => leaf(row, { run, choose })),
      ),
    beside,
  );
  const go = (by) => () => step(run, where, by);
  return {
    element,
    title: `Group of ${task}`,
    keys: { j: () => neighbour(1), k: () => neighbour(-1), ArrowLeft: go(-1), ArrowRight: go(1) },
  };
}

// Nodes without a fork between them are one line; what goes on from a fork is indented below it.
function branch(node, context) {
  const { group, below } = context;
  const chain = [node];
  let leaves = endings(group, node);
  while (!leaves.length && (below.get(chain.at(-1).node_id) ?? []).length === 1) {
    chain.push(below.get(chain.at(-1).node_id)[0]);
    leaves = endings(group, chain.at(-1));
  }
  const children = below.get(chain.at(-1).node_id) ?? [];
  return h(
    "li",
    {},
    h(
      "div",
      { class: "chain" },
      chain.map(chip),
      leaves.map((row) => leaf(row, context)),
    ),
    children.length > 0 &&
      h(
        "ul",
        {},
        children.map((child) => branch(child, context)),
      ),
  );
}

const endings = (group, node) => group.rollouts.filter((row) => row.node_id === node.node_id);

function chip(node) {
  const forks = node.metadata.num_forks ? ` · ${node.metadata.num_forks} left in front` : "";
  const told =
    splice(node) ||
    (node.origin === "policy"
      ? `${node.num_tokens} tokens · entropy ${number(node.mean_entropy)}${forks}`
      : "");
  return h(
    "div",
    { class: `chip ${node.origin}`, "data-node": node.node_id, title: line(node.text, 600) },
    h("span", { class: "label" }, ORIGINS[node.origin]),
    h("span", { class: "text" }, line(node.text, 70) || "(no words)"),
    told && h("span", { class: "quiet" }, told),
  );
}

function leaf(row, { run, choose }) {
  return h(
    "div",
    { class: "leaf", "data-leaf": row.rollout },
    h(
      "label",
      { class: "choice" },
      h("input", {
        type: "checkbox",
        onchange: (event) => choose(row.rollout, event.target.checked),
        "aria-label": `choose rollout ${row.rollout}`,
      }),
      h("a", { href: rolloutAddress(run, row) }, `rollout ${row.rollout}`),
    ),
    row.fault
      ? h(
          "span",
          { class: "badge stopped", title: row.fault },
          `${row.outcome.replaceAll("_", " ")}: ${line(row.fault, 60)}`,
        )
      : h("span", {}, row.outcome.replaceAll("_", " ")),
    h("span", {}, `return ${number(row.episode_return)}`),
    h(
      "strong",
      { class: row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : "" },
      `advantage ${signed(row.advantage)}`,
    ),
  );
}
