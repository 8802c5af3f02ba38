// Every warning of a run with its step.

import { ask } from "./data.js";
import { a, at, fill, h, list, quiet, stepPlace } from "./dom.js";

export async function showAlarms(run) {
  const holder = h("div");
  const draw = async () => {
    const found = await ask("alarms", { run: run.id });
    fill(
      holder,
      found.length
        ? list(
            "alarms",
            found.map((one) => entry(run, one)),
            "ol",
          )
        : quiet("None was recorded."),
    );
  };
  await draw();
  return { element: h("section", h("h1", "Alarms"), holder), title: "Alarms", refresh: draw };
}

function entry(run, one) {
  const place = one.step ? stepPlace(one.step) : null;
  const name = one.step ? `step ${one.step}` : "before training";
  return [
    place && run.places.includes(place) ? a(at(run, "step", place), name) : h("span", name),
    h("span.quiet", one.time ? new Date(1000 * one.time).toLocaleString() : ""),
    h("p.said", one.text),
  ];
}
