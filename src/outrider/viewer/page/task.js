// One task over steps and evaluations.

import { ask } from "./data.js";
import { a, at, h, line, mean, number, placeName, plural, quiet, table } from "./dom.js";
import { rolloutAddress } from "./table.js";

export async function showTask(run, [task]) {
  const page = (offset) => ask("rollouts", { run: run.id, task_key: task, sort: "step", offset });
  const found = await page(0);
  const rows = [...found.rows];
  while (rows.length < found.total) rows.push(...(await page(rows.length)).rows);
  const stepOf = (place) => rows.find((row) => row.where === place).step;
  const places = run.places
    .filter((place) => rows.some((row) => row.where === place))
    .sort((one, other) => stepOf(one) - stepOf(other) || other.localeCompare(one));
  const entry = (place) => {
    const own = rows.filter((row) => row.where === place);
    return {
      "data-place": place,
      cells: [
        a(at(run, "step", place), placeName(place, run.evaluations)),
        number(mean(own.map((row) => row.episode_return).filter((value) => value !== null))),
        h(
          "div.marks",
          own.map((row) => mark(run, row)),
        ),
      ],
    };
  };
  const element = h(
    "section",
    h("h1", `Task ${task}`),
    quiet(
      `${plural(found.total, "rollout")} in ${plural(places.length, "step or evaluation", "steps and evaluations")}`,
    ),
    table("Task over time", ["When", "#Mean return", "Rollouts"], places.map(entry), "over-time"),
  );
  return { element, title: `Task ${task}` };
}

const mark = (run, row) =>
  h(
    "a",
    {
      href: rolloutAddress(run, row),
      class: `mark-of ${row.fault ? "lost" : row.episode_return > 0 ? "good" : "bad"}`,
      title: `rollout ${row.rollout}: ${row.outcome}, ${row.kind} ${line(row.fault, 80)}`,
    },
    row.fault ? "fault" : number(row.episode_return, 2),
  );
