// Runs, and the warnings of one.

import { ask, still } from "./data.js";
import { a, at, fill, h, line, list, number, percent, quiet, stepPlace, table } from "./dom.js";

const HEADS = ["", "Run", "Status", "Method", "Task", "Score", "#Steps", "#Tokens", "Last alarm"];

export async function showRuns() {
  const chosen = new Set();
  const holder = h("div");
  const compare = h("a.button", "Compare the chosen");
  const draw = (runs) =>
    fill(holder, table("Runs", HEADS, runs.map((run) => ({ cells: cells(run, chosen, compare) })), "runs"));
  draw(await ask("runs"));
  const timer = still ? null : setInterval(async () => draw(await ask("runs")), 5000);
  point(compare, chosen);
  const element = h("section", h("h1", "Runs"), holder, compare);
  return { element, title: "Runs", leave: () => clearInterval(timer) };
}

function point(link, chosen) {
  const isReady = chosen.size > 1;
  link.setAttribute("aria-disabled", String(!isReady));
  if (!isReady) return link.removeAttribute("href");
  link.target = "_blank";
  link.rel = "noopener";
  link.href = still ? "compare.html" : `compare?${new URLSearchParams([...chosen].map((id) => ["run", id]))}`;
}

function cells(run, chosen, compare) {
  const box = h("input", {
    type: "checkbox",
    checked: chosen.has(run.id),
    "aria-label": `choose ${run.name}`,
    onchange: (event) => {
      chosen[event.target.checked ? "add" : "delete"](run.id);
      point(compare, chosen);
    },
  });
  const small = (...text) => h("div.quiet", text);
  const [score, low, high] = run.score ?? [];
  return [
    h("td", box),
    h("th", { scope: "row" }, a(at(run), run.name), small(run.model, run.seed && ` · seed ${run.seed}`)),
    [h("span", { class: `badge ${run.status}` }, run.status), run.live ? ` · ${run.live.stage}` : ""],
    run.method,
    run.task,
    h("td.wide", percent(score), run.score && small(`${percent(low)} to ${percent(high)}, ${run.scored}`)),
    `${number(run.steps)}${run.num_steps ? ` / ${run.num_steps}` : ""}`,
    number(run.tokens),
    h("td.wide", run.alarm ? a(at(run, "alarms"), line(run.alarm.text, 70)) : "–"),
  ];
}

// Every warning of a run with its step.

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
