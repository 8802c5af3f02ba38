// Addresses to views, and the keys that work everywhere.

import { ask } from "./data.js";
import { fill, h, tell, visible } from "./dom.js";
import { follow } from "./follow.js";
import { top } from "./shell.js";
import { showAlarms } from "./alarms.js";
import { showBeside } from "./beside.js";
import { showCounter } from "./counter.js";
import { showCurves } from "./curves.js";
import { showGroup } from "./group.js";
import { showMemory } from "./memory.js";
import { showOverview } from "./overview.js";
import { showRollout } from "./rollout.js";
import { showRuns } from "./runs.js";
import { showStep } from "./step.js";
import { showTask } from "./task.js";

const VIEWS = {
  overview: showOverview,
  curves: showCurves,
  step: showStep,
  all: showStep,
  group: showGroup,
  rollout: showRollout,
  beside: showBeside,
  counter: showCounter,
  memory: showMemory,
  alarms: showAlarms,
  task: showTask,
};
const main = document.getElementById("main");
let shown = { keys: {}, refresh: null };
let turn = 0;

export function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(query ?? "") };
}

async function show() {
  const mine = ++turn;
  shown.leave?.();
  try {
    const { parts, query } = address();
    const next = await opened(parts, query);
    if (mine !== turn) return; // a newer address has come
    shown = next;
    fill(main, next.element);
    document.title = next.title ? `${visible(next.title)} · Outrider` : "Outrider";
    next.ready?.();
    window.scrollTo(0, 0);
  } catch (error) {
    if (mine === turn)
      fill(main, h("p", { class: "fault", role: "alert" }, `This cannot be shown: ${error.message}`));
  }
}

async function opened(parts, query) {
  if (parts[0] !== "run") {
    follow(null);
    top(null);
    return showRuns();
  }
  const run = { id: parts[1] };
  const kind = parts[2] ?? "overview";
  const [places, curves] = await Promise.all([
    ask("places", { run: run.id }),
    ask("curves", { run: run.id }),
  ]);
  Object.assign(run, { places, curves, evaluations: curves.evaluations });
  follow(run, news);
  top(run, kind, parts[3]);
  const view = VIEWS[kind];
  if (!view) throw new Error("there is no such page");
  return view(run, parts.slice(3), query, kind);
}

// Something of the run has changed on disk: the view takes it in where it stands.
async function news(run, state, before) {
  const told = ({ sizes, num, newest }) => JSON.stringify([sizes, num, newest]);
  if (before === null || told(state) === told(before)) {
    // where it is, and nothing more
    top(run, address().parts[2] ?? "overview", address().parts[3], state);
    return;
  }
  const known = run.places.length;
  run.places = await ask("places", { run: run.id });
  top(run, address().parts[2] ?? "overview", address().parts[3], state);
  if (run.places.length !== known) tell(`new: step ${state.newest}`);
  await shown.refresh?.(state);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && isTyping) event.target.blur();
  if (isTyping) return;
  const act = shown.keys?.[event.key] ?? (event.key === "/" ? focusSearch : null);
  if (act && act() !== false) event.preventDefault();
});

function focusSearch() {
  const field = document.querySelector('input[type="search"]');
  field?.focus();
  return field !== null;
}

window.addEventListener("hashchange", show);
show();
