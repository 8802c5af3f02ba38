// One task over steps and evaluations.

import { ask } from "./data.js";
import { h, line, number, placeName } from "./dom.js";
import { rolloutAddress } from "./table.js";

export async function showTask(run, [task]) {
  const found = await ask("rollouts", { run: run.id, task_key: task, sort: "step" });
  const rows = [...found.rows];
  while (rows.length < found.total)
    rows.push(
      ...(await ask("rollouts", { run: run.id, task_key: task, sort: "step", offset: rows.length })).rows,
    );
  const places = run.places
    .filter((place) => rows.some((row) => row.where === place))
    .sort((one, other) => stepOf(rows, one) - stepOf(rows, other) || other.localeCompare(one));
  const element = h(
    "section",
    {},
    h("h1", {}, `Task ${task}`),
    h(
      "p",
      { class: "quiet" },
      `${number(found.total)} rollouts in ${number(places.length)} steps and evaluations`,
    ),
    h(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Task over time" },
      h(
        "table",
        { class: "over-time" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["When", "Mean return", "Rollouts"].map((text) => h("th", { scope: "col" }, text)),
          ),
        ),
        h(
          "tbody",
          {},
          places.map((place) =>
            entry(
              run,
              place,
              rows.filter((row) => row.where === place),
            ),
          ),
        ),
      ),
    ),
  );
  return { element, title: `Task ${task}` };
}

const stepOf = (rows, place) => rows.find((row) => row.where === place).step;

function entry(run, place, rows) {
  const known = rows.map((row) => row.episode_return).filter((value) => value !== null);
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  return h(
    "tr",
    { "data-place": place },
    h(
      "th",
      { scope: "row" },
      h(
        "a",
        { href: `#/run/${encodeURIComponent(run.id)}/step/${place}` },
        placeName(place, run.evaluations),
      ),
    ),
    h("td", { class: "n" }, number(mean)),
    h(
      "td",
      {},
      h(
        "div",
        { class: "marks" },
        rows.map((row) =>
          h(
            "a",
            {
              href: rolloutAddress(run, row),
              class: `mark-of ${row.fault ? "lost" : row.episode_return > 0 ? "good" : "bad"}`,
              title: `rollout ${row.rollout}: ${row.outcome}, ${row.kind} ${line(row.fault, 80)}`,
            },
            row.fault ? "fault" : number(row.episode_return, 2),
          ),
        ),
      ),
    ),
  );
}
