// Rollouts of a step, an evaluation, a run or a task.

import { ask } from "./data.js";
import {
  a, at, button, capital, check, fault, fill, go, h, isKnown, keep, line, list, mean, number, placeName,
  plain, plural, quiet, search, select, spaced, stateOf, table, tell,
} from "./dom.js";
import { rolloutAddress, rolloutTable } from "./table.js";

const FAILED = ["", "any", "none"].map((one) => [one, one || "all"]);

export async function showStep(run, [where], query, view) {
  const isAll = view === "all";
  const place = isAll ? "" : (where ?? run.places[0]);
  const sort = isAll ? "step" : "episode_return";
  const empty = { kind: "", mode: "", outcome: "", failed: "", low: "", high: "", offset: "" };
  const [state, keepState] = stateOf({ ...empty, sort, descending: "1" });
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
      if (mine !== turn) return; // a newer request is on its way
      bars.draw(found.histogram, state.low, state.high);
      table.draw(found.rows, state.sort, state.descending === "1");
      const hasCalls = state.failed || found.rows.some((row) => isKnown(row.num_failed_calls));
      fill(
        filters,
        ["kind", "mode", "outcome"].map((name) =>
          choice(name, found.counts[name], state[name], (value) => change({ [name]: value })),
        ),
        hasCalls &&
          select("failed calls", FAILED, state.failed, (failed) => change({ failed }), { name: "failed" }),
      );
      fill(pages, paging(found, (offset) => change({ offset })));
      fill(damaged, (found.notes ?? []).map((one) => fault(`Left out: ${one}`)));
      tell(plural(found.total, "rollout"));
    } catch (error) {
      fill(damaged, fault(error.message)); // the way to the other steps stays
    }
  };
  const change = (news) => {
    keepState({ offset: "", ...news });
    return draw();
  };
  await draw();
  const element = h("section",
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
  const name = (where) => placeName(where, run.evaluations);
  const link = (there, text, key) =>
    there
      ? h("a", { href: at(run, "step", there), "aria-label": `${text}: ${name(there)}`, title: key }, key)
      : h("span.quiet", { "aria-hidden": "true" }, key);
  const options = run.places.map((one) => [one, name(one)]);
  return h("div.heading",
    h("h1", capital(name(place))),
    h("div.goto",
      link(run.places[index - 1], "before", "←"),
      select("", options, place, (value) => go(at(run, "step", value))(), { "aria-label": "Go to a step" }),
      link(run.places[index + 1], "behind", "→"),
    ),
  );
}

// The arrows, from any page of a step to the step before and the next.
export function stepKeys(run, place, places = run.places, addressOf = (there) => at(run, "step", there)) {
  const move = (by) => () => {
    const there = places[places.indexOf(place) + by];
    if (there) go(addressOf(there))();
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
    h("span.quiet", { "data-total": total },
      total ? `${number(offset + 1)} to ${number(end)} of ${number(total)}` : "No rollout is like that.",
    ),
    offset > 0 && button("Before", () => move(offset > 100 ? `${offset - 100}` : "")),
    end < total && button("Next", () => move(`${end}`)),
  ];
}

// Returns as bars; each is a button that narrows the table to its range.
function histogram(choose) {
  const element = h("div.histogram", { role: "group", "aria-label": "Returns: choose a range" });
  const draw = ({ edges, numbers, missing }, low, high) => {
    const most = Math.max(1, ...numbers);
    const isIn = (index) =>
      low !== "" && edges[index] >= Number(low) - 1e-12 && edges[index + 1] <= Number(high) + 1e-12;
    const bars = numbers.map((count, index) => {
      const label = `${number(edges[index])} to ${number(edges[index + 1])}: ${plural(count, "rollout")}`;
      const pick = () => (isIn(index) ? choose("", "") : choose(`${edges[index]}`, `${edges[index + 1]}`));
      const about = { class: "bar", title: label, "aria-label": label, "aria-pressed": String(isIn(index)) };
      const bar = button(h("span"), pick, about);
      bar.firstChild.style.height = `${count ? Math.max(3, (100 * count) / most) : 0}%`;
      return bar;
    });
    const ends = [number(edges[0]), "return", number(edges.at(-1))];
    fill(
      element,
      h("div.bars", bars),
      edges.length > 0 &&
        h("div.ends.quiet", ends.map((text) => h("span", text))),
      quiet(
        missing > 0 && `${number(missing)} without a return. `,
        low !== "" &&
          plain(`Only ${number(Number(low))} to ${number(Number(high))}: show all`, () => choose("", "")),
      ),
    );
  };
  return { element, draw };
}

// Search in the text of turns: of a step, or of all.
function searchBox(run, place, query) {
  const results = h("div.hits");
  let isEverywhere = !place || query.has("everywhere");
  let turn = 0;
  const look = async () => {
    const mine = ++turn;
    const words = field.value.trim();
    keep({ words, everywhere: place && isEverywhere ? 1 : "" });
    if (!words) return fill(results);
    try {
      const found = await ask("search", { run: run.id, words, ...(isEverywhere ? {} : { where: place }) });
      if (mine === turn) fill(results, hits(run, found, words));
    } catch (error) {
      if (mine === turn) fill(results, fault(error.message));
    }
  };
  const words = query.get("words") ?? "";
  const field = search("Search in text", words, look, { placeholder: "words of a turn ( / )" });
  if (words) look();
  const everywhere = (isOn) => {
    isEverywhere = isOn;
    look();
  };
  return h("div.search", { role: "search" },
    field,
    place && check("in all steps", isEverywhere, everywhere),
    results,
  );
}

function hits(run, { hits, more }, words) {
  const text = hits.length
    ? `${plural(hits.length, "turn")}${more ? " or more" : ""}`
    : "No turn has these words.";
  tell(text);
  const entry = (hit) => [
    a(
      `${rolloutAddress(run, hit)}?node=${hit.node_id}`,
      `${placeName(hit.where)}, ${hit.task_key}, rollout ${hit.rollout}`,
    ),
    h(`span.origin.${hit.origin}`, hit.origin),
    h("p.para", marked(line(hit.text, 220), words)),
  ];
  return [quiet(text), list("", hits.map(entry), "ol")];
}

function marked(text, words) {
  const start = text.toLowerCase().indexOf(words.toLowerCase());
  const end = start + words.length;
  return start < 0 ? text : [text.slice(0, start), h("mark", text.slice(start, end)), text.slice(end)];
}

// One task over steps and evaluations.

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
        h("div.marks", own.map((row) => mark(run, row))),
      ],
    };
  };
  const element = h("section",
    h("h1", `Task ${task}`),
    quiet(plural(found.total, "rollout"), " in ", plural(places.length, "place")),
    table("Task over time", ["When", "#Mean return", "Rollouts"], places.map(entry), "over-time"),
  );
  return { element, title: `Task ${task}` };
}

const mark = (run, row) =>
  h("a",
    {
      href: rolloutAddress(run, row),
      class: `mark-of ${row.fault ? "lost" : row.episode_return > 0 ? "good" : "bad"}`,
      title: `rollout ${row.rollout}: ${row.outcome}, ${row.kind} ${line(row.fault, 80)}`,
    },
    row.fault ? "fault" : number(row.episode_return, 2),
  );
