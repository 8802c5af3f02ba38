// Every metric of a run, with its unit, meaning and healthy range; other runs over it.

import { ask } from "./data.js";
import { INKS, chart } from "./chart.js";
import { fill, h, number, percent, placeName, stepPlace } from "./dom.js";

const AXES = { step: "step", tokens: "policy tokens", calls: "tool calls", seconds: "seconds of training" };
const FIRST = ["reward", "entropy", "loss", "gap", "retrieval", "rollout"];
const settings = { x: "step", smoothing: 0, words: "", others: new Set() };

export async function showCurves(run) {
  const runs = await ask("runs");
  const others = runs.filter((one) => one.id !== run.id);
  const charts = h("div", { class: "charts" });
  let drawn = [];
  const clear = () => {
    seen.disconnect();
    drawn.forEach((one) => one.leave());
    drawn = [];
  };
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        seen.unobserve(entry.target);
        drawn.push(entry.target.draw());
      }
    },
    { rootMargin: "200px" },
  );
  let turn = 0;
  const draw = async () => {
    const mine = ++turn;
    const all = [[run.id, run.curves]];
    for (const id of settings.others)
      if (others.some((one) => one.id === id)) all.push([id, await ask("curves", { run: id })]);
    if (mine !== turn) return; // a newer one has begun
    clear();
    fill(charts, parts(all, runs, seen));
    if (!Object.keys(run.curves.values).length)
      fill(charts, h("p", { class: "quiet" }, "No training step is recorded yet."));
  };
  await draw();
  const refresh = async () => {
    run.curves = await ask("curves", { run: run.id });
    await draw();
    fill(scores, evaluations(run));
  };
  const scores = h("div", {}, evaluations(run));
  const element = h("section", {}, h("h1", {}, "Curves"), controls(others, draw), scores, notes(run), charts);
  return { element, title: "Curves", refresh, leave: clear };
}

function controls(others, draw) {
  const set = (name, value) => {
    settings[name] = value;
    draw();
  };
  return h(
    "form",
    { class: "controls", onsubmit: (event) => event.preventDefault() },
    h(
      "label",
      {},
      "x axis",
      h(
        "select",
        { onchange: (event) => set("x", event.target.value) },
        Object.entries(AXES).map(([value, text]) =>
          h("option", { value, selected: settings.x === value }, text),
        ),
      ),
    ),
    h(
      "label",
      {},
      "smoothing",
      h("input", {
        type: "range",
        min: 0,
        max: 0.95,
        step: 0.05,
        value: settings.smoothing,
        oninput: (event) => set("smoothing", Number(event.target.value)),
      }),
    ),
    h(
      "label",
      {},
      "find a metric",
      h("input", {
        type: "search",
        value: settings.words,
        oninput: (event) => set("words", event.target.value.toLowerCase()),
      }),
    ),
    others.length > 0 &&
      h(
        "fieldset",
        {},
        h("legend", {}, "over it"),
        others.map((one) =>
          h(
            "label",
            { class: "choice" },
            h("input", {
              type: "checkbox",
              checked: settings.others.has(one.id),
              onchange: (event) => {
                event.target.checked ? settings.others.add(one.id) : settings.others.delete(one.id);
                draw();
              },
            }),
            one.name,
          ),
        ),
      ),
  );
}

function parts(all, runs, seen) {
  const [, own] = all[0];
  const names = Object.keys(own.values).filter((name) => matches(name, own.metrics[name]));
  const groups = Map.groupBy ? Map.groupBy(names, prefix) : grouped(names);
  const order = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return order.map((name) =>
    h(
      "section",
      {},
      h("h2", {}, name),
      h(
        "div",
        { class: "grid" },
        groups.get(name).map((metric) => card(metric, all, runs, seen)),
      ),
    ),
  );
}

function card(name, all, runs, seen) {
  const about = all[0][1].metrics[name];
  const place = h("div", { class: "place" });
  place.draw = () => {
    const lines = all.map(([id, curves], index) => ({
      id,
      label: runs.find((one) => one.id === id)?.name ?? id,
      ink: INKS[index % INKS.length],
      x: curves.x[settings.x],
      values: curves.values[name] ?? curves.x.step.map(() => null),
      steps: curves.x.step,
    }));
    const open = (line, index) => {
      location.hash = `#/run/${encodeURIComponent(line.id)}/step/${stepPlace(line.steps[index])}`;
    };
    const made = chart({ title: name, xLabel: AXES[settings.x], lines, smoothing: settings.smoothing, open });
    fill(place, made.element);
    return made;
  };
  seen.observe(place);
  const known = all[0][1].values[name].filter((value) => value !== null);
  return h(
    "article",
    { class: "card", "data-metric": name },
    h(
      "h3",
      {},
      name.split("/").slice(1).join("/"),
      h("span", { class: "now" }, number(known.at(-1)), about.unit && ` ${about.unit}`),
    ),
    place,
    h("p", {}, about.meaning),
    about.healthy &&
      h(
        "p",
        { class: "quiet" },
        `Healthy: ${about.healthy}. `,
        about.look_at && `Else look at: ${about.look_at}.`,
      ),
  );
}

function evaluations(run) {
  if (!run.curves.evaluations.length) return null;
  const at = (one) => `evaluation-${String(one.number).padStart(3, "0")}`;
  return h(
    "ul",
    { class: "scores" },
    run.curves.evaluations.map((one) =>
      h(
        "li",
        {},
        run.places.includes(at(one))
          ? h("a", { href: `#/run/${encodeURIComponent(run.id)}/step/${at(one)}` }, one.label)
          : one.label,
        one.score && h("strong", {}, percent(one.score[0])),
        one.score &&
          h(
            "span",
            { class: "quiet" },
            `${percent(one.score[1])} to ${percent(one.score[2])}, ${one.num_tasks} tasks`,
          ),
      ),
    ),
  );
}

const notes = (run) =>
  run.curves.notes.length > 0 &&
  h(
    "ul",
    { class: "fault" },
    run.curves.notes.map((one) => h("li", {}, one)),
  );
const prefix = (name) => name.split("/")[0];
const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
const matches = (name, about) =>
  !settings.words || `${name} ${about.meaning}`.toLowerCase().includes(settings.words);

function grouped(names) {
  const found = new Map();
  for (const name of names) found.set(prefix(name), [...(found.get(prefix(name)) ?? []), name]);
  return found;
}
