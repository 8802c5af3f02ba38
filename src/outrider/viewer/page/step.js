// The rollouts of a step, an evaluation or a whole run: histogram, filters, table and search.

import { ask } from "./data.js";
import { fill, h, number, placeName, tell } from "./dom.js";
import { histogram } from "./histogram.js";
import { searchBox } from "./search.js";
import { rolloutTable } from "./table.js";

export async function showStep(run, [where], query, view) {
  const isAll = view === "all";
  const place = isAll ? "" : (where ?? run.places[0]);
  const state = {
    kind: "",
    mode: "",
    outcome: "",
    low: "",
    high: "",
    sort: isAll ? "step" : "episode_return",
    descending: "1",
    offset: 0,
  };
  const bars = histogram((low, high) => change({ low, high }));
  const table = rolloutTable(run, (sort) =>
    change({ sort, descending: state.sort === sort && state.descending === "1" ? "0" : "1" }),
  );
  const filters = h("div", { class: "controls" });
  const pages = h("div", { class: "row" });
  const damaged = h("div");
  let turn = 0;
  const draw = async () => {
    const given = {
      run: run.id,
      ...Object.fromEntries(Object.entries(state).filter(([, value]) => value !== "")),
    };
    if (place) given.where = place;
    const mine = ++turn;
    const found = await ask("rollouts", given);
    if (mine !== turn) return; // a newer question has been asked
    bars.draw(found.histogram, state.low, state.high);
    table.draw(found.rows, state.sort, state.descending === "1");
    fill(
      filters,
      ["kind", "mode", "outcome"].map((name) =>
        choice(name, found.counts[name], state[name], (value) => change({ [name]: value })),
      ),
    );
    fill(
      pages,
      paging(found, (offset) => change({ offset })),
    );
    fill(
      damaged,
      (found.notes ?? []).map((one) => h("p", { class: "fault" }, `Left out: ${one}`)),
    );
    tell(`${found.total} rollouts`);
  };
  const change = (news) => {
    Object.assign(state, { offset: 0 }, news);
    return draw();
  };
  await draw();
  const element = h(
    "section",
    {},
    isAll ? h("h1", {}, "All rollouts") : heading(run, place),
    h("div", { class: "tools" }, bars.element, h("div", {}, filters, searchBox(run, place))),
    damaged,
    table.element,
    pages,
  );
  const go = (by) => () => step(run, place, by);
  const keys = { ...table.keys, ...(isAll ? {} : { ArrowLeft: go(-1), ArrowRight: go(1) }) };
  return {
    element,
    title: isAll ? "All rollouts" : placeName(place, run.evaluations),
    keys,
    refresh: isAll ? draw : null,
  };
}

function heading(run, place) {
  const at = run.places.indexOf(place);
  const link = (index, text, key) => {
    const there = run.places[index];
    return there
      ? h(
          "a",
          {
            href: `#/run/${encodeURIComponent(run.id)}/step/${there}`,
            "aria-label": `${text}: ${placeName(there, run.evaluations)}`,
            title: `key: ${key}`,
          },
          key,
        )
      : h("span", { class: "quiet", "aria-hidden": "true" }, key);
  };
  const chosen = h(
    "select",
    {
      "aria-label": "Go to a step",
      onchange: (event) => {
        location.hash = `#/run/${encodeURIComponent(run.id)}/step/${event.target.value}`;
      },
    },
    run.places.map((one) =>
      h("option", { value: one, selected: one === place }, placeName(one, run.evaluations)),
    ),
  );
  return h(
    "div",
    { class: "heading" },
    h("h1", {}, capital(placeName(place, run.evaluations))),
    h("div", { class: "goto" }, link(at - 1, "before", "←"), chosen, link(at + 1, "behind", "→")),
  );
}

export function step(run, place, by) {
  const there = run.places[run.places.indexOf(place) + by];
  if (there) location.hash = `#/run/${encodeURIComponent(run.id)}/step/${there}`;
  return Boolean(there);
}

function choice(name, counts, value, choose) {
  const options = Object.keys(counts).filter(Boolean);
  if (value && !options.includes(value)) options.push(value);
  return h(
    "label",
    {},
    name,
    h(
      "select",
      { name, onchange: (event) => choose(event.target.value) },
      h("option", { value: "" }, "all"),
      options
        .sort()
        .map((one) =>
          h(
            "option",
            { value: one, selected: one === value },
            `${one.replaceAll("_", " ")} (${number(counts[one] ?? 0)})`,
          ),
        ),
    ),
  );
}

function paging({ total, offset, rows }, go) {
  const end = offset + rows.length;
  return [
    h(
      "span",
      { class: "quiet", "data-total": total },
      total ? `${number(offset + 1)} to ${number(end)} of ${number(total)}` : "No rollout is like that.",
    ),
    offset > 0 && h("button", { type: "button", onclick: () => go(Math.max(0, offset - 100)) }, "Before"),
    end < total && h("button", { type: "button", onclick: () => go(end) }, "Next"),
  ];
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
