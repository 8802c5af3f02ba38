// Every metric of a run, with its unit, meaning and healthy range; other runs over it.

import { ask } from "./data.js";
import { INKS, chart } from "./chart.js";
import {
  a, at, button, check, fill, fold, go, h, isKnown, list, mean, number, percent, quiet, search, select,
  stateOf, stepPlace,
} from "./dom.js";

const AXES = { step: "step", tokens: "policy tokens", calls: "tool calls", seconds: "seconds of training" };
const HELD_OUT = "held-out score";
const METHODS = "retrieval branch tips memory buffer gigpo lamer tree prefix luffy rejection replay distill";
const SECTIONS = {
  "held-out": [HELD_OUT, "sft"],
  reward: ["reward"],
  entropy: ["entropy"],
  group: ["group"],
  method: METHODS.split(" "),
  mismatch: ["gap", "ratio", "staleness"],
};
const MOST_OPEN = 6; // charts of a section
const USUAL = { x: "step", smoothing: "0", find: "", seeds: "mean", over: "", hidden: "", open: "" };
const listed = (text) => text.split(",").filter(Boolean);
function toggled(text, one) {
  const all = new Set(listed(text));
  if (!all.delete(one)) all.add(one);
  return [...all].join();
}

export async function showCurves(run) {
  const runs = await ask("runs");
  const others = runs.filter((one) => one.id !== run.id);
  const [state, keepState] = stateOf(USUAL);
  const charts = h("div.charts");
  const legend = h("div.row");
  let drawn = [];
  const clear = () => {
    seen.disconnect();
    drawn.forEach((one) => one.leave());
    drawn = [];
  };
  const onSight = (entries) => {
    for (const { target } of entries.filter((one) => one.isIntersecting)) {
      seen.unobserve(target);
      drawn.push(target.draw());
    }
  };
  const seen = new IntersectionObserver(onSight, { rootMargin: "200px" });
  let turn = 0;
  const draw = async () => {
    const mine = ++turn;
    const all = [{ ...runs.find((one) => one.id === run.id), curves: run.curves }];
    for (const one of others.filter(({ id }) => listed(state.over).includes(id)))
      all.push({ ...one, curves: await ask("curves", { run: one.id }) });
    if (mine !== turn) return; // a newer one has begun
    clear();
    const entries = grouped(all, state.seeds === "mean");
    const isShown = ({ id }) => !listed(state.hidden).includes(id);
    const flip = ({ id }) => change({ hidden: toggled(state.hidden, id) });
    fill(legend, all.length > 1 && entries.map((one) => switched(one, isShown(one), () => flip(one))));
    fill(charts, sections(run, entries.filter(isShown), state, keepState, seen));
    if (!charts.children.length) fill(charts, quiet("No training step is recorded yet."));
  };
  const change = (news) => {
    keepState(news);
    return draw();
  };
  await draw();
  const scores = h("div", evaluations(run));
  const refresh = async () => {
    run.curves = await ask("curves", { run: run.id });
    await draw();
    fill(scores, evaluations(run));
  };
  const notes = run.curves.notes.length > 0 && list("fault", run.curves.notes);
  const element = h("section",
    h("h1", "Curves"),
    controls(others, state, change),
    scores,
    notes,
    legend,
    charts,
  );
  return { element, title: "Curves", refresh, leave: clear };
}

function controls(others, state, change) {
  const smoothing = (event) => change({ smoothing: event.target.value });
  const range = { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smoothing, onchange: smoothing };
  const find = search("find a metric", state.find, (value) => change({ find: value.toLowerCase() }));
  const choice = ({ id, name, seed }) =>
    check(seed ? `${name} · seed ${seed}` : name, listed(state.over).includes(id), () =>
      change({ over: toggled(state.over, id) }),
    );
  const seeds = (isMean) => change({ seeds: isMean ? "mean" : "each" });
  return h("form.controls", { onsubmit: (event) => event.preventDefault() },
    select("x axis", Object.entries(AXES), state.x, (x) => change({ x })),
    h("label", "smoothing", h("input", range)),
    h("label", "find a metric", find),
    others.length > 0 &&
      h("fieldset",
        h("legend", "over it"),
        others.map(choice),
        check("mean of seeds", state.seeds === "mean", seeds),
      ),
  );
}

// Runs that differ only in the seed are one entry, if their mean is drawn.
function grouped(all, isMean) {
  const found = {};
  for (const one of all) (found[isMean ? one.configuration : one.id] ??= []).push(one);
  const groups = Object.values(found).sort((one, other) => all.indexOf(one[0]) - all.indexOf(other[0]));
  return groups.map((members, index) => ({
    id: members[0].id,
    members,
    label: members[0].name + (members.length > 1 ? `, mean of ${members.length} seeds` : ""),
    ink: INKS[index % INKS.length],
  }));
}

function switched({ label, ink }, isShown, flip) {
  const swatch = h("span.ink", { "aria-hidden": "true" });
  swatch.style.background = `var(${ink})`;
  return button([swatch, label], flip, { class: "entry", "aria-pressed": String(isShown) });
}

// Steps, values and positions on the axis of a metric in one run.
function curveOf({ x, values, cold_start, evaluations }, name, axis) {
  if (name in cold_start.values)
    return { steps: cold_start.step, x: cold_start.step, values: cold_start.values[name] };
  if (name !== HELD_OUT) return { steps: x.step, x: x[axis], values: values[name] ?? x.step.map(() => null) };
  const scored = evaluations.filter(({ score, split }) => score && split === evaluations[0].split);
  const last = scored.filter((one, index) => scored[index + 1]?.step !== one.step); // of several at one step
  const [means, low, high] = [0, 1, 2].map((part) => last.map(({ score }) => score[part]));
  const steps = last.map(({ step }) => step);
  const place = (step) => (axis === "step" ? step : (x[axis][x.step.indexOf(step)] ?? 0));
  return { steps, x: steps.map(place), values: means, low, high };
}

// The line of one run; of several their mean and range, over the steps that all of them have.
function lineOf({ members, ...entry }, name, axis) {
  const all = members.map((one) => curveOf(one.curves, name, axis));
  if (all.length === 1) return { ...entry, ...all[0] };
  const places = all.map((one) => new Map(one.steps.map((step, index) => [step, index])));
  const steps = all[0].steps.filter((step) => places.every((one) => one.has(step)));
  const over = (part, summary) =>
    steps.map((step) => {
      const own = all.map((one, index) => one[part][places[index].get(step)]);
      return own.every(isKnown) ? summary(own) : null;
    });
  const [low, high] = [Math.min, Math.max].map((end) => over("values", (own) => end(...own)));
  return { ...entry, steps, x: over("x", mean), values: over("values", mean), low, high };
}

function sections(run, entries, state, keepState, seen) {
  const { values, cold_start, evaluations, metrics } = run.curves;
  const all = { ...values, ...cold_start.values };
  const names = [...(evaluations.some((one) => one.score) ? [HELD_OUT] : []), ...Object.keys(all)];
  const wordsOf = (name) => `${name} ${metrics[name]?.meaning}`.toLowerCase();
  const found = names.filter((name) => wordsOf(name).includes(state.find));
  const sectionOf = (name) => {
    const prefix = name.split("/")[0];
    return Object.keys(SECTIONS).find((one) => SECTIONS[one].includes(prefix)) ?? prefix;
  };
  const titles = new Set([...Object.keys(SECTIONS), ...found.map(sectionOf).sort()]);
  const isConstant = (name) => {
    const known = (all[name] ?? []).filter(isKnown);
    return known.length > 1 && known.every((value) => value === known[0]);
  };
  const grid = (some) =>
    h("div.grid", some.map((name) => card(run, name, entries, state, seen)));
  return [...titles].map((title) => {
    const own = found.filter((name) => sectionOf(name) === title);
    const sorted = [...own.filter((name) => !isConstant(name)), ...own.filter(isConstant)];
    const num = own.filter(isConstant).length;
    const most = state.find ? own.length : title in SECTIONS ? Math.min(MOST_OPEN, own.length - num) : 0;
    const text = `${title}: ${own.length - most}${most ? " more" : ""}`;
    const more = fold(num ? `${text}, ${num} constant` : text, grid(sorted.slice(most)));
    more.open = listed(state.open).includes(title);
    more.addEventListener("toggle", () => {
      if (more.open !== listed(state.open).includes(title)) keepState({ open: toggled(state.open, title) });
    });
    return (
      own.length > 0 &&
      h("section", most > 0 && [h("h2", title), grid(sorted.slice(0, most))], most < own.length && more)
    );
  });
}

const NO_METRIC = { unit: "", meaning: "mean score of the held-out tasks, with its 95 % interval" };

function card(run, name, entries, state, seen) {
  const isColdStart = name in run.curves.cold_start.values;
  const about = run.curves.metrics[name] ?? NO_METRIC;
  const place = h("div.place");
  place.draw = () => {
    const lines = entries.map((one) => lineOf(one, name, state.x));
    const open = ({ id, steps }, index) => {
      if (!isColdStart && steps[index]) go(at({ id }, "step", stepPlace(steps[index])))();
    };
    const xLabel = isColdStart ? "step of the cold start" : AXES[state.x];
    const made = chart({
      title: name,
      xLabel,
      lines,
      smoothing: Number(state.smoothing),
      open,
      healthy: about,
    });
    fill(place, made.element);
    return made;
  };
  seen.observe(place);
  const now = curveOf(run.curves, name, "step").values.filter(isKnown).at(-1);
  return h("article.card", { "data-metric": name },
    h("h3", name, h("span.now", number(now), about.unit && ` ${about.unit}`)),
    place,
    h("p", about.meaning),
    about.healthy && quiet(`Healthy: ${about.healthy}. `, about.look_at && `Else look at: ${about.look_at}.`),
  );
}

function evaluations(run) {
  const entry = ({ number, label, score, num_tasks }) => {
    const place = `evaluation-${String(number).padStart(3, "0")}`;
    const [value, low, high] = score ?? [];
    return [
      run.places.includes(place) ? a(at(run, "step", place), label) : label,
      score && h("strong", percent(value)),
      score && h("span.quiet", `${percent(low)} to ${percent(high)}, ${num_tasks} tasks`),
    ];
  };
  return run.curves.evaluations.length > 0 && list("scores", run.curves.evaluations.map(entry));
}
