// The head of the page: where one is, the views of a run, and what the run does now.

import { askToStop, still } from "./data.js";
import { fill, h, number, placeName, stepPlace, tell } from "./dom.js";

const nav = h("nav", { "aria-label": "Page" });
const told = h("span");
const speed = h("span");
const newest = h("a");
const bar = h(
  "div",
  { class: "live", "data-live": "", hidden: true },
  h("span", { class: "dot", "aria-hidden": "true" }),
  told,
  speed,
  newest,
  h("button", { type: "button", class: "stop", onclick: () => confirmStop(shown) }, "Stop …"),
);
document.getElementById("top").append(nav, bar);
let shown = null;
let drawn = "";

// Only what has changed is drawn again: a key's focus must survive news.
export function top(run, kind = "", where = "", state = null) {
  shown = run;
  if (run && state) run.state = state;
  live(run);
  const newestPlace = run?.places.filter((place) => place.startsWith("step-")).at(-1);
  const now = JSON.stringify([run?.id, kind, where, newestPlace]);
  if (now === drawn) return;
  drawn = now;
  const brand = h("a", { href: "#/", class: "brand" }, "Outrider");
  if (run === null) {
    fill(nav, brand);
    return;
  }
  const at = (name) => (kind === name ? { "aria-current": "page" } : {});
  const base = `#/run/${encodeURIComponent(run.id)}`;
  fill(
    nav,
    brand,
    h("span", { class: "name" }, run.name),
    h("a", { href: base, ...at("overview") }, "Overview"),
    h("a", { href: `${base}/curves`, ...at("curves") }, "Curves"),
    newestPlace && h("a", { href: `${base}/step/${newestPlace}`, ...at("step") }, "Steps"),
    h("a", { href: `${base}/all`, ...at("all") }, "All rollouts"),
    h("a", { href: `${base}/memory/${memoryStep(where, newestPlace)}`, ...at("memory") }, "Memory"),
  );
}

function memoryStep(where, newestPlace) {
  const place = where?.startsWith?.("step-") ? where : newestPlace;
  return place ? Number(place.slice(5)) : 0;
}

function live(run) {
  const state = run?.state;
  bar.hidden = still || !state?.running;
  if (bar.hidden) return;
  const now = state.live ?? {};
  const total = now.total ? ` of ${number(now.total)}` : "";
  const tokens = now.fields?.["tokens/s"];
  told.textContent = `Running: ${now.stage || "begins"} ${number(now.done ?? 0)}${total}`;
  speed.textContent = tokens === undefined ? "" : `${number(tokens)} tokens/s`;
  newest.hidden = state.newest === 0;
  newest.href = `#/run/${encodeURIComponent(run.id)}/step/${stepPlace(state.newest)}`;
  newest.textContent = `newest: ${placeName(stepPlace(state.newest))}`;
}

function confirmStop(run) {
  const close = () => {
    dialog.close();
    dialog.remove();
  };
  const stop = async () => {
    try {
      await askToStop(run.id);
      tell("stop requested");
    } catch (error) {
      tell(`not stopped: ${error.message}`);
    }
    close();
  };
  const dialog = h(
    "dialog",
    { "aria-labelledby": "stop-title" },
    h("h2", { id: "stop-title" }, "Stop this run?"),
    h(
      "p",
      {},
      "It gives up the rollouts under way, writes a checkpoint and ends. ",
      "outrider train --resume goes on from there.",
    ),
    h(
      "div",
      { class: "row" },
      h("button", { onclick: close }, "Let it run"),
      h("button", { class: "stop", onclick: stop }, "Stop it"),
    ),
  );
  document.body.append(dialog);
  dialog.addEventListener("cancel", close);
  dialog.showModal();
}
