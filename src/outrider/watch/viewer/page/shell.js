// The head of the page: where one is, the views of a run, and what the run does now.

import { askToStop, still } from "./data.js";
import { fill, h, number, placeName, stepPlace, tell } from "./dom.js";

const element = document.getElementById("top");

export function top(run, kind = "", where = "", state = null) {
  if (run === null) return fill(element, h("nav", { "aria-label": "Page" }, h("a", { href: "#/", class: "brand" }, "Outrider")));
  if (state) run.state = state;
  const at = (name) => (kind === name ? { "aria-current": "page" } : {});
  const newest = run.places.filter((place) => place.startsWith("step-")).at(-1);
  const base = `#/run/${encodeURIComponent(run.id)}`;
  return fill(
    element,
    h("nav", { "aria-label": "Page" },
      h("a", { href: "#/", class: "brand" }, "Outrider"),
      h("span", { class: "name" }, run.id.replace(/-[0-9a-f]{8}$/, "")),
      h("a", { href: base, ...at("curves") }, "Curves"),
      newest && h("a", { href: `${base}/step/${newest}`, ...at("step") }, "Steps"),
      h("a", { href: `${base}/all`, ...at("all") }, "All rollouts"),
      h("a", { href: `${base}/memory/${memoryStep(where, newest)}`, ...at("memory") }, "Memory"),
      h("a", { href: `${base}/alarms`, ...at("alarms") }, "Alarms")),
    !still && live(run),
  );
}

function memoryStep(where, newest) {
  const place = where?.startsWith?.("step-") ? where : newest;
  return place ? Number(place.slice(5)) : 0;
}

function live(run) {
  const state = run.state;
  if (!state?.running) return null;
  const now = state.live ?? {};
  const speed = now.fields?.["tokens/s"];
  const total = now.total ? ` of ${number(now.total)}` : "";
  return h("div", { class: "live", "data-live": "" },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("span", {}, `Running: ${now.stage || "begins"} ${number(now.done ?? 0)}${total}`),
    speed !== undefined && h("span", {}, `${number(speed)} tokens/s`),
    state.newest > 0 && h("a", { href: `#/run/${encodeURIComponent(run.id)}/step/${stepPlace(state.newest)}` },
      `newest: ${placeName(stepPlace(state.newest))}`),
    h("button", { class: "stop", onclick: () => confirmStop(run) }, "Stop …"));
}

function confirmStop(run) {
  const close = () => { dialog.close(); dialog.remove(); };
  const stop = async () => {
    try {
      await askToStop(run.id);
      tell("the run was asked to stop");
    } catch (error) {
      tell(`not stopped: ${error.message}`);
    }
    close();
  };
  const dialog = h("dialog", { "aria-labelledby": "stop-title" },
    h("h2", { id: "stop-title" }, "Stop this run?"),
    h("p", {}, "It gives up the rollouts under way, writes a checkpoint and ends. ",
      "outrider train --resume goes on from there."),
    h("div", { class: "row" }, h("button", { onclick: close }, "Let it run"), h("button", { class: "stop", onclick: stop }, "Stop it")));
  document.body.append(dialog);
  dialog.addEventListener("cancel", close);
  dialog.showModal();
}
