// Rollouts as a table that is sorted by a click, and walked with j and k.

import { a, at, fill, h, isKnown, number, placeName, plain, region, spaced } from "./dom.js";

const COLUMNS = {
  where: "Step",
  task_key: "Task",
  rollout: "#Rollout",
  episode_return: "#Return",
  outcome: "Outcome",
  answer: "Answer",
  kind: "Kind",
  mode: "Mode",
  num_turns: "#Turns",
  num_tokens: "#Tokens",
  num_calls: "#Calls",
  num_failed_calls: "#Failed",
  mean_entropy: "#Entropy",
  advantage: "#Advantage",
  fault: "Fault",
};
const LATER = ["answer", "num_failed_calls"]; // earlier versions did not record them

export const rolloutAddress = (run, row) =>
  at(run, "rollout", row.where, row.trace_id.split("/").pop(), row.rollout);

export function rolloutTable(run, sorted) {
  const body = h("tbody");
  const head = h("tr");
  let current = -1;
  const element = region("Rollouts", h("table.rollouts", h("thead", head), body));
  const draw = (rows, sort, descending) => {
    current = -1;
    const names = Object.keys(COLUMNS).filter(
      (name) => !LATER.includes(name) || rows.some((row) => isKnown(row[name])),
    );
    const order = descending ? "descending" : "ascending";
    const th = (name) =>
      h("th",
        { scope: "col", class: isNumber(name) ? "n" : null, "aria-sort": sort === name ? order : "none" },
        plain(COLUMNS[name].replace("#", ""), () => sorted(name)),
      );
    fill(head, names.map(th));
    const tr = (row) =>
      h("tr", { "data-rollout": `${row.where}/${row.trace_id}/${row.rollout}` },
        names.map((name) => cell(run, row, name)),
      );
    fill(body, rows.map(tr));
    sessionStorage.setItem("outrider-list", JSON.stringify(rows.map((row) => rolloutAddress(run, row))));
  };
  const move = (by) => () => {
    const rows = [...body.children];
    current = Math.min(rows.length - 1, Math.max(0, current + by));
    rows[current]?.querySelector("td.n a").focus();
    return rows.length > 0;
  };
  return { element, draw, keys: { j: move(1), k: move(-1) } };
}

const isNumber = (name) => COLUMNS[name][0] === "#";

export const kindOf = (kind) => h(`span.origin.${kind}`, kind);
export const outcomeOf = (row) =>
  h("span", { class: row.episode_return === null ? "badge stopped" : "" }, spaced(row.outcome));
export const rolloutLink = (run, row) =>
  h("a", { href: rolloutAddress(run, row), "aria-label": `rollout ${row.rollout} of ${row.task_key}` },
    row.rollout,
  );

function cell(run, row, name) {
  const value = row[name];
  const shown = {
    where: () => placeName(value),
    rollout: () => rolloutLink(run, row),
    task_key: () => a(at(run, "task", value), value),
    outcome: () => outcomeOf(row),
    kind: () => kindOf(value),
  }[name];
  const style = isNumber(name) ? "n" : { task_key: "key", answer: "key", fault: "wide" }[name];
  return h("td", { class: style ?? null }, shown ? shown() : isNumber(name) ? number(value) : value);
}

// j and k from one rollout to the next of the table that was last seen.
export const neighbour = (by) => () => {
  const addresses = JSON.parse(sessionStorage.getItem("outrider-list") ?? "[]");
  const next = addresses[addresses.indexOf(location.hash.split("?")[0]) + by];
  if (!next || !addresses.includes(location.hash.split("?")[0])) return false;
  location.hash = next;
  return true;
};
