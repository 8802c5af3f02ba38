// Every warning of a run with its step.

import { ask } from "./data.js";
import { fill, h, stepPlace, visible } from "./dom.js";

export async function showAlarms(run) {
  const list = h("ol", { class: "alarms" });
  const draw = async () => {
    const found = await ask("alarms", { run: run.id });
    fill(
      list,
      found.map((one) => entry(run, one)),
    );
    if (!found.length) fill(list, h("li", { class: "quiet" }, "None was recorded."));
  };
  await draw();
  return { element: h("section", {}, h("h1", {}, "Alarms"), list), title: "Alarms", refresh: draw };
}

function entry(run, one) {
  const place = one.step ? stepPlace(one.step) : null;
  const time = one.time ? new Date(1000 * one.time).toLocaleString() : "";
  return h(
    "li",
    {},
    place && run.places.includes(place)
      ? h("a", { href: `#/run/${encodeURIComponent(run.id)}/step/${place}` }, `step ${one.step}`)
      : h("span", {}, one.step ? `step ${one.step}` : "before training"),
    h("span", { class: "quiet" }, time),
    h("p", { class: "said" }, visible(one.text)),
  );
}
