// Rollouts as a table that is sorted by a click, and walked with j and k.

import { fill, h, number, placeName } from "./dom.js";

export const COLUMNS = [
  ["where", "Step"],
  ["task_key", "Task"],
  ["rollout", "Rollout"],
  ["episode_return", "Return"],
  ["outcome", "Outcome"],
  ["kind", "Kind"],
  ["mode", "Mode"],
  ["num_turns", "Turns"],
  ["num_tokens", "Tokens"],
  ["num_calls", "Calls"],
  ["mean_entropy", "Entropy"],
  ["advantage", "Advantage"],
  ["fault", "Fault"],
];
const NUMBERS = new Set([
  "rollout",
  "episode_return",
  "num_turns",
  "num_tokens",
  "num_calls",
  "mean_entropy",
  "advantage",
]);

export const rolloutAddress = (run, row) =>
  [
    `#/run/${encodeURIComponent(run.id)}/rollout/${row.where}`,
    encodeURIComponent(row.trace_id.split("/").pop()),
    row.rollout,
  ].join("/");

export function rolloutTable(run, sorted) {
  const body = h("tbody");
  const head = h("tr");
  let at = -1;
  const element = h(
    "div",
    { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Rollouts" },
    h("table", { class: "rollouts" }, h("thead", {}, head), body),
  );
  const draw = (rows, sort, descending) => {
    at = -1;
    fill(
      head,
      COLUMNS.map(([name, text]) =>
        h(
          "th",
          {
            scope: "col",
            class: NUMBERS.has(name) ? "n" : null,
            "aria-sort": sort === name ? (descending ? "descending" : "ascending") : "none",
          },
          h("button", { type: "button", class: "plain", onclick: () => sorted(name) }, text),
        ),
      ),
    );
    fill(
      body,
      rows.map((row) =>
        h(
          "tr",
          { "data-rollout": `${row.where}/${row.trace_id}/${row.rollout}` },
          COLUMNS.map(([name]) => cell(run, row, name)),
        ),
      ),
    );
    sessionStorage.setItem("outrider-list", JSON.stringify(rows.map((row) => rolloutAddress(run, row))));
  };
  const move = (by) => {
    const rows = [...body.children];
    if (!rows.length) return false;
    at = Math.min(rows.length - 1, Math.max(0, at + by));
    rows[at].querySelector("td.n a").focus();
    return true;
  };
  return { element, draw, keys: { j: () => move(1), k: () => move(-1) } };
}

function cell(run, row, name) {
  const value = row[name];
  if (name === "where") return h("td", {}, placeName(value));
  if (name === "rollout")
    return h(
      "td",
      { class: "n" },
      h("a", { href: rolloutAddress(run, row), "aria-label": `rollout ${value} of ${row.task_key}` }, value),
    );
  if (name === "task_key")
    return h(
      "td",
      { class: "key" },
      h("a", { href: `#/run/${encodeURIComponent(run.id)}/task/${encodeURIComponent(value)}` }, value),
    );
  if (name === "outcome")
    return h(
      "td",
      {},
      h("span", { class: row.episode_return === null ? "badge stopped" : "" }, value.replaceAll("_", " ")),
    );
  if (name === "kind") return h("td", {}, h("span", { class: `origin ${value}` }, value));
  if (name === "fault") return h("td", { class: "wide" }, value);
  return h("td", { class: NUMBERS.has(name) ? "n" : null }, NUMBERS.has(name) ? number(value) : value);
}

// j and k from one rollout to the next of the table that was last seen.
export function neighbour(by) {
  const list = JSON.parse(sessionStorage.getItem("outrider-list") ?? "[]");
  const at = list.indexOf(location.hash.split("?")[0]);
  const next = list[at + by];
  if (at < 0 || !next) return false;
  location.hash = next;
  return true;
}
