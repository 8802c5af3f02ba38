// Two rollouts side by side, from the first token at which they differ.

import { ask } from "./data.js";
import { h, number, placeName, visible } from "./dom.js";
import { groupOf, pathOf, rolloutOf } from "./paths.js";
import { facts } from "./rollout.js";
import { rolloutAddress } from "./table.js";
import { turn } from "./turns.js";

export async function showBeside(run, [where, index, ...numbers]) {
  const group = await groupOf(ask, run, where, index);
  const paths = numbers.map((rollout) => pathOf(group, rollout));
  const values = await Promise.all(
    numbers.map(async (rollout, i) =>
      paths[i].length
        ? (await ask("tokens", { run: run.id, where, trace: group.trace_id, rollout })).nodes
        : {},
    ),
  );
  const parted = firstDifference(paths, values);
  const shared = paths[0].slice(0, parted.turns);
  const columns = numbers.map((rollout, i) => {
    const row = rolloutOf(group, rollout);
    return h(
      "div",
      { class: "column", "data-column": rollout },
      h("h2", {}, h("a", { href: rolloutAddress(run, { ...row, where }) }, `Rollout ${rollout}`)),
      facts(row),
      paths[i].slice(parted.turns).map((node, at) => {
        const element = turn(node, { values: at === 0 ? null : values[i][node.node_id], isOpen: true });
        return at === 0 ? fromDifference(element, node, values[i], parted) : element;
      }),
    );
  });
  const told =
    parted.turns >= Math.max(...paths.map((path) => path.length))
      ? "They are the same to the end."
      : (parted.turns === 1 ? "The first turn is" : `The first ${number(parted.turns)} turns are`) +
        " the same; " +
        `turn ${parted.turns + 1} differs from ${parted.unit} ${number(parted.at + 1)} on.`;
  const element = h(
    "section",
    {},
    h("h1", {}, `Rollouts ${numbers.join(" and ")}`),
    h(
      "p",
      { class: "quiet" },
      h("a", { href: `#/run/${encodeURIComponent(run.id)}/group/${where}/${index}` }, "their group"),
      ` · ${placeName(where, run.evaluations)}`,
    ),
    h("p", { "data-parted": parted.at }, told),
    shared.length > 0 &&
      h(
        "details",
        {},
        h("summary", {}, "What they share"),
        shared.map((node) => turn(node, { isOpen: true })),
      ),
    h("div", { class: "columns" }, columns),
  );
  return {
    element,
    title: `Rollouts ${numbers.join(" and ")}`,
    keys: {
      g: () => {
        location.hash = `#/run/${encodeURIComponent(run.id)}/group/${where}/${index}`;
      },
    },
  };
}

// Nodes may be two although their tokens are one: rollouts of a sharp policy begin alike.
function firstDifference([one, other], [ours, theirs]) {
  let turns = 0;
  while (turns < one.length && turns < other.length && same(one[turns], other[turns], ours, theirs))
    turns += 1;
  const pieces = [pieceOf(one[turns], ours), pieceOf(other[turns], theirs)];
  let at = 0;
  while (at < pieces[0].length && at < pieces[1].length && pieces[0][at] === pieces[1][at]) at += 1;
  return { turns, at, unit: Array.isArray(pieces[0]) && Array.isArray(pieces[1]) ? "token" : "letter" };
}

const pieceOf = (node, values) =>
  node ? (values[node.node_id]?.tokens?.length ? values[node.node_id].tokens : node.text) : "";

function same(a, b, ours, theirs) {
  if (a.node_id === b.node_id) return true;
  const [mine, yours] = [pieceOf(a, ours), pieceOf(b, theirs)];
  return (
    a.origin === b.origin && mine.length === yours.length && [...mine].every((piece, i) => piece === yours[i])
  );
}

function fromDifference(element, node, values, parted) {
  const pieces = pieceOf(node, values);
  const cut = Array.isArray(pieces)
    ? (from, to) => pieces.slice(from, to).join("")
    : (from, to) => pieces.slice(from, to);
  const words = h(
    "pre",
    { class: "words" },
    h("span", { class: "quiet" }, visible(cut(0, parted.at))),
    h("mark", {}, visible(cut(parted.at, parted.at + 1)) || "∅"),
    visible(cut(parted.at + 1)),
  );
  (element.querySelector("details") ?? element).querySelector("pre")?.replaceWith(words);
  return element;
}
