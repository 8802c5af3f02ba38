// Two rollouts side by side, from the first token at which they differ.

import { ask } from "./data.js";
import { a, at, fold, go, h, number, p, placeName, quiet, visible } from "./dom.js";
import { groupOf, pathOf, rolloutOf } from "./paths.js";
import { rolloutFacts } from "./rollout.js";
import { rolloutAddress } from "./table.js";
import { turn } from "./turns.js";

export async function showBeside(run, [where, index, ...numbers]) {
  const group = await groupOf(ask, run, where, index);
  const paths = numbers.map((rollout) => pathOf(group, rollout));
  const tokens = (rollout) => ask("tokens", { run: run.id, where, trace: group.trace_id, rollout });
  const values = await Promise.all(
    numbers.map(async (rollout, i) => (paths[i].length ? (await tokens(rollout)).nodes : {})),
  );
  const parted = firstDifference(paths, values);
  const shared = paths[0].slice(0, parted.turns);
  const columns = numbers.map((rollout, i) => {
    const row = rolloutOf(group, rollout);
    return h(
      "div",
      { class: "column", "data-column": rollout },
      h("h2", a(rolloutAddress(run, { ...row, where }), `Rollout ${rollout}`)),
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
      : `${first} the same; turn ${parted.turns + 1} differs from ${parted.unit} ${number(parted.at + 1)} on.`;
  const groupAddress = at(run, "group", where, index);
  const title = `Rollouts ${numbers.join(" and ")}`;
  const element = h(
    "section",
    h("h1", title),
    quiet(a(groupAddress, "their group"), ` · ${placeName(where, run.evaluations)}`),
    h("p", { "data-parted": parted.at }, text),
    shared.length > 0 &&
      fold(
        "What they share",
        shared.map((node) => turn(node, { isOpen: true })),
      ),
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
