// What if: beside a rollout with a splice or a fork, its siblings that went on without it.

import { ask } from "./data.js";
import { h, line, number, placeName, signed } from "./dom.js";
import { ORIGINS, groupOf, pathOf, rolloutOf, splice } from "./paths.js";
import { rolloutAddress } from "./table.js";

export async function showCounter(run, [where, index, rollout]) {
  const group = await groupOf(ask, run, where, index);
  const own = rolloutOf(group, rollout);
  const path = pathOf(group, rollout);
  const points = path
    .map((node, at) => ({ node, at }))
    .filter(({ node, at }) => isSplice(node) || isFork(group, path, at, own));
  const base = `#/run/${encodeURIComponent(run.id)}`;
  const element = h(
    "section",
    {},
    h("h1", {}, `What if: rollout ${rollout} of ${own.task_key}`),
    h(
      "p",
      { class: "quiet" },
      h("a", { href: rolloutAddress(run, { ...own, where }) }, "the rollout"),
      " · ",
      h("a", { href: `${base}/group/${where}/${index}` }, "its group"),
      ` · ${placeName(where, run.evaluations)} · `,
      "Siblings differ by chance too: one pair is no effect, a mean over many groups is.",
    ),
    points.length
      ? points.map((point) => part(run, group, path, own, point, where))
      : h("p", {}, "It has neither a retrieved step, nor tips, nor a fork: there is nothing to leave out."),
  );
  return {
    element,
    title: `What if: rollout ${rollout}`,
    keys: {
      g: () => {
        location.hash = `${base}/group/${where}/${index}`;
      },
    },
  };
}

const isSplice = (node) => node.origin === "buffer" || node.origin === "memory";

// Its own nodes begin here, behind nodes of the rollout that it left.
function isFork(group, path, at, own) {
  return (
    at > 0 &&
    own.forked_from !== own.rollout &&
    path[at].rollout === own.rollout &&
    path[at - 1].rollout !== own.rollout &&
    path[at - 1].origin !== "prompt"
  );
}

function part(run, group, path, own, { node, at }, where) {
  const kind = isSplice(node) ? ORIGINS[node.origin] : "fork";
  const before = path[at - 1];
  const all = group.rollouts
    .filter((row) => row.rollout !== own.rollout && row.node_id >= 0)
    .map((row) => ({ row, path: pathOf(group, row.rollout) }))
    .filter((one) => !one.path.some((other) => other.node_id === node.node_id));
  const without = isSplice(node)
    ? all.filter((one) => !one.path.some((other) => other.origin === node.origin))
    : all;
  const near = before
    ? without.filter((one) => one.path.some((other) => other.node_id === before.node_id))
    : [];
  const siblings = near.length ? near : without;
  const ours = entropyFrom(path, at);
  return h(
    "section",
    { class: "card", "data-point": kind },
    h("h2", {}, `Turn ${at + 1}: ${kind}`),
    h("p", { class: `chip ${node.origin}` }, line(node.text, 160)),
    h("p", { class: "quiet" }, splice(node)),
    siblings.length
      ? [
          h(
            "p",
            {},
            near.length
              ? "Siblings that stood at the same node and went on without it:"
              : "No sibling stood at this node; those of the group without any:",
          ),
          table(run, own, ours, siblings, at, near.length > 0, where),
        ]
      : h("p", {}, "Every sibling has it too."),
  );
}

function table(run, own, ours, siblings, at, isNear, where) {
  const rows = siblings.map((one) => ({ ...one, entropy: entropyFrom(one.path, isNear ? at : 0) }));
  const difference = (value, other) => (value === null || other === null ? null : value - other);
  const returns = rows
    .map((one) => difference(own.episode_return, one.row.episode_return))
    .filter((value) => value !== null);
  const entropies = rows.map((one) => difference(ours, one.entropy)).filter((value) => value !== null);
  const mean = (values) =>
    values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  const cells = (name, back, entropy, dr, de) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      [number(back), number(entropy), signed(dr), signed(de)].map((text) => h("td", { class: "n" }, text)),
    );
  return h(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Siblings without it" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Rollout", "Return", "Entropy after", "Difference in return", "Difference in entropy"].map(
            (text, at) => h("th", { scope: "col", class: at ? "n" : null }, text),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        cells(`${own.rollout} (with)`, own.episode_return, ours, null, null),
        rows.map((one) =>
          cells(
            h("a", { href: rolloutAddress(run, { ...one.row, where }) }, one.row.rollout),
            one.row.episode_return,
            one.entropy,
            difference(own.episode_return, one.row.episode_return),
            difference(ours, one.entropy),
          ),
        ),
        cells(`mean of ${rows.length}`, null, null, mean(returns), mean(entropies)),
      ),
    ),
  );
}

// Nats a token over the policy's turns from a place on.
function entropyFrom(path, at) {
  const turns = path.slice(at).filter((node) => node.origin === "policy" && node.mean_entropy !== null);
  const tokens = turns.reduce((sum, node) => sum + node.num_tokens, 0);
  return tokens ? turns.reduce((sum, node) => sum + node.mean_entropy * node.num_tokens, 0) / tokens : null;
}
