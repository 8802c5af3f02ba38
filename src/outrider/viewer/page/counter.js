// What if: beside a rollout with a splice or a fork, its siblings that went on without it.

import { ask } from "./data.js";
import { a, at, go, h, line, mean, number, p, placeName, quiet, signed, table } from "./dom.js";
import { ORIGINS, groupOf, pathOf, rolloutOf, splice } from "./paths.js";
import { rolloutAddress } from "./table.js";

export async function showCounter(run, [where, index, rollout]) {
  const group = await groupOf(ask, run, where, index);
  const own = rolloutOf(group, rollout);
  const path = pathOf(group, rollout);
  const points = path
    .map((node, number) => ({ node, number }))
    .filter(({ node, number }) => isSplice(node) || isFork(path, number, own));
  const groupAddress = at(run, "group", where, index);
  const element = h(
    "section",
    h("h1", `What if: rollout ${rollout} of ${own.task_key}`),
    quiet(
      a(rolloutAddress(run, { ...own, where }), "the rollout"),
      " · ",
      a(groupAddress, "its group"),
      ` · ${placeName(where, run.evaluations)} · `,
      "Siblings differ by chance too: one pair is no effect, a mean over many groups is.",
    ),
    points.length
      ? points.map((point) => part(run, group, path, own, point, where))
      : p("It has neither a retrieved step, nor tips, nor a fork: there is nothing to leave out."),
  );
  return { element, title: `What if: rollout ${rollout}`, keys: { g: go(groupAddress) } };
}

const isSplice = (node) => node.origin === "buffer" || node.origin === "memory";

// Its own nodes begin here, behind nodes of the rollout that it left.
const isFork = (path, number, own) =>
  number > 0 &&
  own.forked_from !== own.rollout &&
  path[number].rollout === own.rollout &&
  path[number - 1].rollout !== own.rollout &&
  path[number - 1].origin !== "prompt";

function part(run, group, path, own, { node, number }, where) {
  const kind = isSplice(node) ? ORIGINS[node.origin] : "fork";
  const before = path[number - 1];
  const has = (one, { node_id }) => one.path.some((other) => other.node_id === node_id);
  const without = group.rollouts
    .filter((row) => row.rollout !== own.rollout && row.node_id >= 0)
    .map((row) => ({ row, path: pathOf(group, row.rollout) }))
    .filter((one) => !has(one, node))
    .filter((one) => !isSplice(node) || !one.path.some((other) => other.origin === node.origin));
  const near = before ? without.filter((one) => has(one, before)) : [];
  const siblings = near.length ? near : without;
  const words = near.length
    ? "Siblings that stood at the same node and went on without it:"
    : "No sibling stood at this node; those of the group without any:";
  return h(
    "section",
    { class: "card", "data-point": kind },
    h("h2", `Turn ${number + 1}: ${kind}`),
    h("p", { class: `chip ${node.origin}` }, line(node.text, 160)),
    quiet(splice(node)),
    siblings.length
      ? [
          p(words),
          differences(run, own, entropyFrom(path, number), siblings, near.length ? number : 0, where),
        ]
      : p("Every sibling has it too."),
  );
}

function differences(run, own, entropy, siblings, start, where) {
  const minus = (value, other) => (value === null || other === null ? null : value - other);
  const rows = siblings.map((one) => {
    const after = entropyFrom(one.path, start);
    const name = a(rolloutAddress(run, { ...one.row, where }), one.row.rollout);
    const back = one.row.episode_return;
    return [name, back, after, minus(own.episode_return, back), minus(entropy, after)];
  });
  const over = (column) => mean(rows.map((one) => one[column]).filter((value) => value !== null));
  return table(
    "Siblings without it",
    ["Rollout", "#Return", "#Entropy after", "#Difference in return", "#Difference in entropy"],
    [
      [`${own.rollout} (with)`, own.episode_return, entropy, null, null],
      ...rows,
      [`mean of ${rows.length}`, null, null, over(3), over(4)],
    ].map(([name, back, after, ...both]) => ({
      cells: [name, number(back), number(after), ...both.map(signed)],
    })),
  );
}

// Nats a token over the policy's turns from a place on.
function entropyFrom(path, start) {
  const turns = path.slice(start).filter((node) => node.origin === "policy" && node.mean_entropy !== null);
  const tokens = turns.reduce((sum, node) => sum + node.num_tokens, 0);
  return tokens ? turns.reduce((sum, node) => sum + node.mean_entropy * node.num_tokens, 0) / tokens : null;
}
