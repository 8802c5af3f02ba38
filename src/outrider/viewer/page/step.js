// The rollouts of a step, an evaluation or a whole run: histogram, filters, table and search.

import { keep } from "./address.js";
import { ask } from "./data.js";
import {
  at,
  button,
  capital,
  check,
  fault,
  fill,
  go,
  h,
  number,
  placeName,
  plural,
  select,
  spaced,
  tell,
} from "./dom.js";
import { histogram } from "./histogram.js";
import { searchBox } from "./search.js";
import { rolloutTable } from "./table.js";

export async function showStep(run, [where], query, view) {
  const isAll = view === "all";
  const place = isAll ? "" : (where ?? run.places[0]);
  const sort = isAll ? "step" : "episode_return";
  const usual = {
    kind: "",
    mode: "",
    outcome: "",
    failed: "",
    low: "",
    high: "",
    sort,
    descending: "1",
    offset: 0,
  };
  const state = Object.fromEntries(
    Object.entries(usual).map(([name, value]) => [name, query.get(name) ?? value]),
  );
  const bars = histogram((low, high) => change({ low, high }));
  const table = rolloutTable(run, (sort) =>
    change({ sort, descending: state.sort === sort && state.descending === "1" ? "0" : "1" }),
  );
  const filters = h("div.controls");
  const pages = h("div.row");
  const damaged = h("div");
  let turn = 0;
  const draw = async () => {
    const given = Object.fromEntries(Object.entries(state).filter(([, value]) => value !== ""));
    const mine = ++turn;
    try {
      const found = await ask("rollouts", { run: run.id, ...given, ...(place ? { where: place } : {}) });
      if (mine !== turn) return; // a newer question has been asked
      bars.draw(found.histogram, state.low, state.high);
      table.draw(found.rows, state.sort, state.descending === "1");
      const hasCalls = state.failed || found.rows.some((row) => (row.num_failed_calls ?? null) !== null);
      fill(
        filters,
        ["kind", "mode", "outcome"].map((name) =>
          choice(name, found.counts[name], state[name], (value) => change({ [name]: value })),
        ),
        hasCalls &&
          check("failed calls", state.failed === "1", (isOn) => change({ failed: isOn ? "1" : "" })),
      );
      fill(
        pages,
        paging(found, (offset) => change({ offset })),
      );
      fill(
        damaged,
        (found.notes ?? []).map((one) => fault(`Left out: ${one}`)),
      );
      tell(plural(found.total, "rollout"));
    } catch (error) {
      fill(damaged, fault(error.message)); // the way to the other steps stays
    }
  };
  const change = (news) => {
    Object.assign(state, { offset: 0 }, news);
    keep(
      Object.fromEntries(
        Object.entries(state).map(([name, value]) => [name, value === usual[name] ? "" : value]),
      ),
    );
    return draw();
  };
  await draw();
  const element = h(
    "section",
    isAll ? h("h1", "All rollouts") : heading(run, place),
    h("div.tools", bars.element, h("div", filters, searchBox(run, place, query))),
    damaged,
    table.element,
    pages,
  );
  const keys = { ...table.keys, ...(isAll ? {} : stepKeys(run, place)) };
  const title = isAll ? "All rollouts" : placeName(place, run.evaluations);
  return { element, title, keys, refresh: isAll ? draw : null };
}

function heading(run, place) {
  const index = run.places.indexOf(place);
  const link = (there, text, key) =>
    there
      ? h(
          "a",
          {
            href: at(run, "step", there),
            "aria-label": `${text}: ${placeName(there, run.evaluations)}`,
            title: `key: ${key}`,
          },
          key,
        )
      : h("span", { class: "quiet", "aria-hidden": "true" }, key);
  const options = run.places.map((one) => [one, placeName(one, run.evaluations)]);
  return h(
    "div.heading",
    h("h1", capital(placeName(place, run.evaluations))),
    h(
      "div.goto",
      link(run.places[index - 1], "before", "←"),
      select("", options, place, (value) => go(at(run, "step", value))(), { "aria-label": "Go to a step" }),
      link(run.places[index + 1], "behind", "→"),
    ),
  );
}

// The arrows, from any page of a step to the step before and the next.
export function stepKeys(run, place) {
  const move = (by) => () => {
    const there = run.places[run.places.indexOf(place) + by];
    if (there) go(at(run, "step", there))();
    return Boolean(there);
  };
  return { ArrowLeft: move(-1), ArrowRight: move(1) };
}

function choice(name, counts, value, choose) {
  const options = Object.keys(counts).filter(Boolean);
  if (value && !options.includes(value)) options.push(value);
  const texts = options.sort().map((one) => [one, `${spaced(one)} (${number(counts[one] ?? 0)})`]);
  return select(name, [["", "all"], ...texts], value, choose, { name });
}

function paging({ total, offset, rows }, move) {
  const end = offset + rows.length;
  return [
    h(
      "span",
      { class: "quiet", "data-total": total },
      total ? `${number(offset + 1)} to ${number(end)} of ${number(total)}` : "No rollout is like that.",
    ),
    offset > 0 && button("Before", () => move(Math.max(0, offset - 100))),
    end < total && button("Next", () => move(end)),
  ];
}
