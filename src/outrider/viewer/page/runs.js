// The list of runs.

import { ask, still } from "./data.js";
import { a, at, fill, h, line, number, percent, table } from "./dom.js";

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
    h("td.wide", run.alarm ? a(at(run), line(run.alarm.text, 70)) : "–"),
  ];
}
