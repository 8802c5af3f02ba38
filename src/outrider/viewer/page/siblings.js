// Rollouts of a group compared with each other.

import { ask } from "./data.js";
import { a, at, fold, go, h, line, mean, number, placeName, quiet, signed, table, visible } from "./dom.js";
import { groupOf, ORIGINS, pathOf, rolloutOf, splice } from "./paths.js";
import { rolloutFacts } from "./rollout.js";
import { rolloutAddress } from "./table.js";
import { turn } from "./turns.js";

// Two rollouts side by side, from the first token at which they differ.

export async function showBeside(run, [where, index, ...numbers]) {
  const group = await groupOf(run, where, index);
  const paths = numbers.map((rollout) => pathOf(group, rollout));
  const tokens = (rollout) => ask("tokens", { run: run.id, where, trace: group.trace_id, rollout });
  const values = await Promise.all(
    numbers.map(async (rollout, i) => (paths[i].length ? (await tokens(rollout)).nodes : {})),
  );
  const parted = firstDifference(paths, values);
  const shared = paths[0].slice(0, parted.turns);
  const columns = numbers.map((rollout, i) => {
    const row = rolloutOf(group, rollout);
    return h("div.column", { "data-column": rollout },
      h("h2", a(rolloutAddress(run, row), `Rollout ${rollout}`)),
      rolloutFacts(row),
      paths[i].slice(parted.turns).map((node, index) => {
        const element = turn(node, { values: index === 0 ? null : values[i][node.node_id], isOpen: true });
        return index === 0 ? fromDifference(element, node, values[i], parted) : element;
      }),
    );
  });
  const first = parted.turns === 1 ? "The first turn is" : `The first ${number(parted.turns)} turns are`;
  const text =
    parted.turns >= Math.max(...paths.map((path) => path.length))
      ? "They are the same to the end."
      : `${first} the same; turn ${parted.turns + 1} differs at ${parted.unit} ${number(parted.at + 1)}.`;
  const groupAddress = at(run, "group", where, index);
  const title = `Rollouts ${numbers.join(" and ")}`;
  const element = h("section",
    h("h1", title),
    quiet(a(groupAddress, "their group"), ` · ${placeName(where, run.evaluations)}`),
    h("p", { "data-parted": parted.at }, text),
    shared.length > 0 &&
      fold("What they share", shared.map((node) => turn(node, { isOpen: true }))),
    h("div.columns", columns),
  );
  return { element, title, keys: { g: go(groupAddress) } };
}

// Nodes may be two although their tokens are one: rollouts of a sharp policy begin alike.
function firstDifference([one, other], [ours, theirs]) {
  let turns = 0;
  while (turns < one.length && turns < other.length && same(one[turns], other[turns], ours, theirs))
    turns += 1;
  const pieces = [pieceOf(one[turns], ours), pieceOf(other[turns], theirs)];
  let at = 0;
  while (at < pieces[0].length && at < pieces[1].length && pieces[0][at] === pieces[1][at]) at += 1;
  return { turns, at, unit: pieces.every(Array.isArray) ? "token" : "letter" };
}

const pieceOf = (node, values) =>
  node ? (values[node.node_id]?.tokens?.length ? values[node.node_id].tokens : node.text) : "";

function same(one, other, ours, theirs) {
  if (one.node_id === other.node_id) return true;
  const [mine, yours] = [pieceOf(one, ours), pieceOf(other, theirs)];
  const isEqual = () => [...mine].every((piece, i) => piece === yours[i]);
  return one.origin === other.origin && mine.length === yours.length && isEqual();
}

function fromDifference(element, node, values, { at }) {
  const pieces = pieceOf(node, values);
  const cut = (from, to) => visible([pieces.slice(from, to)].flat().join(""));
  const words = h("pre.words", h("span.quiet", cut(0, at)), h("mark", cut(at, at + 1) || "∅"), cut(at + 1));
  element.querySelector("pre")?.replaceWith(words);
  return element;
}

// What if: beside a rollout with a splice or a fork, its siblings that went on without it.

export async function showCounter(run, [where, index, rollout]) {
  const group = await groupOf(run, where, index);
  const own = rolloutOf(group, rollout);
  const path = pathOf(group, rollout);
  const points = path
    .map((node, number) => ({ node, number }))
    .filter(({ node, number }) => isSplice(node) || isFork(path, number, own));
  const groupAddress = at(run, "group", where, index);
  const element = h("section",
    h("h1", `What if: rollout ${rollout} of ${own.task_key}`),
    quiet(
      a(rolloutAddress(run, own), "the rollout"),
      " · ",
      a(groupAddress, "its group"),
      ` · ${placeName(where, run.evaluations)} · `,
      "Siblings differ by chance too: one pair is no effect, a mean over many groups is.",
    ),
    points.length
      ? points.map((point) => part(run, group, path, own, point))
      : h("p", "It has neither a retrieved step, nor tips, nor a fork: there is nothing to leave out."),
  );
  return { element, title: `What if: rollout ${rollout}`, keys: { g: go(groupAddress) } };
}

const isSplice = (node) => node.origin === "buffer" || node.origin === "memory";

// Its own nodes begin here.
const isFork = (path, number, own) =>
  number > 0 &&
  own.forked_from !== own.rollout &&
  path[number].rollout === own.rollout &&
  path[number - 1].rollout !== own.rollout &&
  path[number - 1].origin !== "prompt";

function part(run, group, path, own, { node, number }) {
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
  return h("section.card", { "data-point": kind },
    h("h2", `Turn ${number + 1}: ${kind}`),
    h("p", { class: `chip ${node.origin}` }, line(node.text, 160)),
    quiet(splice(node)),
    siblings.length
      ? [h("p", words), differences(run, own, entropyFrom(path, number), siblings, near.length ? number : 0)]
      : h("p", "Every sibling has it too."),
  );
}

function differences(run, own, entropy, siblings, start) {
  const minus = (value, other) => (value === null || other === null ? null : value - other);
  const rows = siblings.map((one) => {
    const after = entropyFrom(one.path, start);
    const name = a(rolloutAddress(run, one.row), one.row.rollout);
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

// Nats a token of the policy.
function entropyFrom(path, start) {
  const turns = path.slice(start).filter((node) => node.origin === "policy" && node.mean_entropy !== null);
  const tokens = turns.reduce((sum, node) => sum + node.num_tokens, 0);
  return tokens ? turns.reduce((sum, node) => sum + node.mean_entropy * node.num_tokens, 0) / tokens : null;
}
