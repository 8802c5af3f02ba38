// Addresses to views, and the keys that work everywhere.

import { ask, follow } from "./data.js";
import { address, fault, fill, h, keep, tell, visible } from "./dom.js";
import { top } from "./shell.js";
import { showCurves } from "./curves.js";
import { showGroup } from "./group.js";
import { showMemory } from "./memory.js";
import { showOverview } from "./overview.js";
import { showRollout } from "./rollout.js";
import { showRuns } from "./runs.js";
import { showBeside, showCounter } from "./siblings.js";
import { showStep, showTask } from "./step.js";

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
  task: showTask,
};
const main = document.getElementById("main");
let shown = { keys: {}, refresh: null };
let turn = 0;
let isDrawn = false;
let scrolled = null;

async function show() {
  const mine = ++turn;
  shown.leave?.();
  clearTimeout(scrolled);
  isDrawn = false;
  try {
    const { parts, query } = address();
    const next = await opened(parts, query);
    if (mine !== turn) return; // a newer address has come
    shown = next;
    fill(main, next.element);
    document.title = [next.title, next.run, "Outrider"].filter(Boolean).map(visible).join(" · ");
    window.scrollTo(0, Number(query.get("y")));
    if (!query.has("y")) next.ready?.();
    isDrawn = true;
  } catch (error) {
    if (mine !== turn) return;
    shown = {};
    document.title = "Outrider";
    fill(main, h("h1", "Not shown"), fault(`This cannot be shown: ${error.message}`));
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
  ]).catch((error) => {
    follow(null);
    top(null);
    throw error;
  });
  Object.assign(run, { places, curves, evaluations: curves.evaluations, name: curves.name });
  follow(run, news);
  top(run, kind, parts[3]);
  const view = VIEWS[kind];
  if (!view) throw new Error("there is no such page");
  return { ...(await view(run, parts.slice(3), query, kind)), run: run.name };
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
window.addEventListener("scroll", () => {
  clearTimeout(scrolled);
  scrolled = setTimeout(() => isDrawn && keep({ y: Math.round(scrollY) || "" }), 150);
});
history.scrollRestoration = "manual";
show();
