// Every metric of a run, with its unit, meaning and healthy range; other runs over it.

import { keep } from "./address.js";
import { ask } from "./data.js";
import { INKS, chart } from "./chart.js";
import {
  a,
  at,
  button,
  check,
  fill,
  fold,
  go,
  h,
  list,
  mean,
  number,
  percent,
  quiet,
  search,
  select,
  stepPlace,
} from "./dom.js";

const AXES = { step: "step", tokens: "policy tokens", calls: "tool calls", seconds: "seconds of training" };
const HELD_OUT = "held-out score";
const SECTIONS = {
  "held-out": [HELD_OUT, "sft"],
  reward: ["reward"],
  entropy: ["entropy"],
  group: ["group"],
  method: "retrieval branch tips memory buffer gigpo lamer tree prefix luffy rejection replay distill".split(
    " ",
  ),
  mismatch: ["gap", "ratio", "staleness"],
};
const MOST_OPEN = 6; // charts of a section; the others are folded
const parsed = (text) => (text ? text.split(",") : []);

export async function showCurves(run, _, query) {
  const runs = await ask("runs");
  const others = runs.filter((one) => one.id !== run.id);
  const state = {
    x: query.get("x") ?? "step",
    smoothing: query.get("smoothing") ?? 0,
    find: query.get("find") ?? "",
    seeds: query.get("seeds") ?? "mean",
    ...Object.fromEntries(["over", "hidden", "open"].map((name) => [name, parsed(query.get(name))])),
  };
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
    for (const one of others.filter(({ id }) => state.over.includes(id)))
      all.push({ ...one, curves: await ask("curves", { run: one.id }) });
    if (mine !== turn) return; // a newer one has begun
    clear();
    const entries = grouped(all, state.seeds === "mean");
    fill(legend, entries.length > 1 && entries.map((one) => switched(one, state, change)));
    const shown = entries.filter((one) => !state.hidden.includes(one.key));
    fill(charts, sections(run, shown, state, change, seen));
    if (!charts.children.length) fill(charts, quiet("No training step is recorded yet."));
  };
  const change = (news, isDrawn = true) => {
    Object.assign(state, news);
    const usual = { x: "step", smoothing: 0, seeds: "mean" };
    keep(
      Object.fromEntries(
        Object.entries(state).map(([name, value]) => [
          name,
          String(value) === String(usual[name]) ? "" : value,
        ]),
      ),
    );
    return isDrawn && draw();
  };
  await draw();
  const scores = h("div", evaluations(run));
  const refresh = async () => {
    run.curves = await ask("curves", { run: run.id });
    await draw();
    fill(scores, evaluations(run));
  };
  const notes = run.curves.notes.length > 0 && list("fault", run.curves.notes);
  const element = h(
    "section",
    h("h1", "Curves"),
    controls(others, state, change),
    scores,
    notes,
    legend,
    charts,
  );
  return { element, title: "Curves", refresh, leave: clear };
}

const toggled = (all, one) => (all.includes(one) ? all.filter((other) => other !== one) : [...all, one]);

function controls(others, state, change) {
  const smoothing = (event) => change({ smoothing: event.target.value });
  const range = { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smoothing, oninput: smoothing };
  const find = search("find a metric", state.find, (value) => change({ find: value.toLowerCase() }));
  return h(
    "form",
    { class: "controls", onsubmit: (event) => event.preventDefault() },
    select("x axis", Object.entries(AXES), state.x, (x) => change({ x })),
    h("label", "smoothing", h("input", range)),
    h("label", "find a metric", find),
    others.length > 0 &&
      h(
        "fieldset",
        h("legend", "over it"),
        others.map(({ id, name, seed }) =>
          check(`${name}${seed ? ` · seed ${seed}` : ""}`, state.over.includes(id), () =>
            change({ over: toggled(state.over, id) }),
          ),
        ),
        check("mean of seeds", state.seeds === "mean", (isOn) => change({ seeds: isOn ? "mean" : "each" })),
      ),
  );
}

// Runs that differ only in the seed are one entry, if their mean is drawn.
function grouped(all, isMean) {
  const found = new Map();
  for (const one of all) {
    const key = isMean ? one.configuration : one.id;
    found.set(key, [...(found.get(key) ?? []), one]);
  }
  return [...found.values()].map((members, index) => ({
    key: members[0].id,
    members,
    label: members.length > 1 ? `${members[0].name}, mean of ${members.length} seeds` : members[0].name,
    ink: INKS[index % INKS.length],
  }));
}

function switched({ key, label, ink }, state, change) {
  const isOn = !state.hidden.includes(key);
  const swatch = h("span.ink", { "aria-hidden": "true" });
  swatch.style.background = `var(${ink})`;
  const flip = () => change({ hidden: toggled(state.hidden, key) });
  return button([swatch, label], flip, { class: "entry", "aria-pressed": String(isOn), title: isOn ? "hide" : "show" });
}

// Steps and values of a metric in one run; the cold start has steps of its own.
function curve({ id, curves }, name, axis) {
  if (name in curves.cold_start.values)
    return {
      id,
      steps: curves.cold_start.step,
      x: curves.cold_start.step,
      values: curves.cold_start.values[name],
    };
  const { step } = curves.x;
  if (name !== HELD_OUT)
    return { id, steps: step, x: curves.x[axis], values: curves.values[name] ?? step.map(() => null) };
  const scored = curves.evaluations.filter(
    ({ score, split }) => score && split === curves.evaluations[0].split,
  );
  const last = scored.filter((one, index) => scored[index + 1]?.step !== one.step); // of several at one step
  const steps = last.map((one) => one.step);
  return {
    id,
    steps,
    x: axis === "step" ? steps : steps.map((one) => curves.x[axis][step.indexOf(one)] ?? 0),
    ...Object.fromEntries(
      ["values", "low", "high"].map((part, index) => [part, last.map(({ score }) => score[index])]),
    ),
  };
}

// One run, or the mean of several with their range, over the steps that all of them have.
function lineOf({ members, ...entry }, name, axis) {
  const all = members.map((one) => curve(one, name, axis));
  if (all.length === 1) return { ...entry, ...all[0] };
  const steps = all[0].steps.filter((step) => all.every((one) => one.steps.includes(step)));
  const values = (part) => steps.map((step) => all.map((one) => one[part][one.steps.indexOf(step)]));
  const over = (part, summary) =>
    values(part).map((own) => (own.includes(null) || own.includes(undefined) ? null : summary(own)));
  const [least, most] = [Math.min, Math.max].map((one) => (own) => one(...own));
  return {
    ...entry,
    id: all[0].id,
    steps,
    x: over("x", mean),
    values: over("values", mean),
    low: over("values", least),
    high: over("values", most),
  };
}

function sections(run, entries, state, change, seen) {
  const { values, cold_start, evaluations, metrics } = run.curves;
  const names = [...Object.keys(values), ...Object.keys(cold_start.values)];
  if (evaluations.some((one) => one.score)) names.unshift(HELD_OUT);
  const has = (name) => `${name} ${metrics[name]?.meaning}`.toLowerCase().includes(state.find);
  const sectionOf = (name) => {
    const prefix = name.split("/")[0];
    return Object.keys(SECTIONS).find((one) => SECTIONS[one].includes(prefix)) ?? prefix;
  };
  const found = names.filter(has);
  const titles = [...new Set([...Object.keys(SECTIONS), ...found.map(sectionOf).sort()])];
  const isConstant = (name) => {
    const known = (values[name] ?? []).filter((value) => value !== null);
    return known.length > 1 && known.every((value) => value === known[0]);
  };
  const grid = (some) =>
    h(
      "div.grid",
      some.map((name) => card(run, name, entries, state, seen)),
    );
  return titles.map((title) => {
    const own = found.filter((name) => sectionOf(name) === title);
    const [constant, varying] = [own.filter(isConstant), own.filter((name) => !isConstant(name))];
    const open = state.find ? own : title in SECTIONS ? varying.slice(0, MOST_OPEN) : [];
    const rest = [...varying, ...constant].filter((name) => !open.includes(name));
    const num = Math.min(constant.length, rest.length);
    const text = `${open.length ? "" : `${title}: `}${rest.length}${open.length ? " more" : ""}${num ? `, ${num} constant` : ""}`;
    const more = rest.length > 0 && fold(text, grid(rest));
    if (more) {
      more.open = state.open.includes(title);
      more.addEventListener("toggle", () => {
        if (more.open !== state.open.includes(title)) change({ open: toggled(state.open, title) }, false);
      });
    }
    return own.length > 0 && h("section", open.length > 0 && [h("h2", title), grid(open)], more);
  });
}

function card(run, name, entries, state, seen) {
  const isColdStart = name in run.curves.cold_start.values;
  const about = run.curves.metrics[name] ?? {
    unit: "",
    meaning: "Mean score of the held-out tasks and its 95 % interval, at each evaluation.",
  };
  const place = h("div.place");
  place.draw = () => {
    const lines = entries.map((one) => lineOf(one, name, state.x));
    const open = (line, index) => {
      const isStep = !isColdStart && line.steps[index] > 0;
      if (isStep) go(at({ id: line.id }, "step", stepPlace(line.steps[index])))();
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
  const known = curve({ curves: run.curves }, name, "step").values.filter((value) => value !== null);
  const now = [number(known.at(-1)), about.unit && ` ${about.unit}`];
  return h(
    "article",
    { class: "card", "data-metric": name },
    h("h3", name, h("span.now", now)),
    place,
    h("p", about.meaning),
    about.healthy && quiet(`Healthy: ${about.healthy}. `, about.look_at && `Else look at: ${about.look_at}.`),
  );
}

function evaluations(run) {
  const entry = ({ number, label, score, num_tasks }) => {
    const place = `evaluation-${String(number).padStart(3, "0")}`;
    return [
      run.places.includes(place) ? a(at(run, "step", place), label) : label,
      score && h("strong", percent(score[0])),
      score && h("span.quiet", `${percent(score[1])} to ${percent(score[2])}, ${num_tasks} tasks`),
    ];
  };
  return run.curves.evaluations.length > 0 && list("scores", run.curves.evaluations.map(entry));
}
