// All runs: what each is, where it stands, and two or more of them in `outrider compare`.

import { ask, still } from "./data.js";
import { fill, h, line, number, percent } from "./dom.js";

const COLUMNS = ["", "Run", "Status", "Method", "Task", "Score", "Steps", "Tokens", "Last alarm"];

export async function showRuns() {
  const chosen = new Set();
  const body = h("tbody");
  const compare = h("a", { class: "button", "aria-disabled": "true" }, "Compare the chosen");
  const draw = (runs) =>
    fill(
      body,
      runs.map((run) => row(run, chosen, () => point(compare, chosen))),
    );
  draw(await ask("runs"));
  const timer = still ? null : setInterval(async () => draw(await ask("runs")), 5000);
  const element = h(
    "section",
    {},
    h("h1", {}, "Runs"),
    h(
      "div",
      { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Runs" },
      h(
        "table",
        { class: "runs" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            COLUMNS.map((name) =>
              h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "Choose")),
            ),
          ),
        ),
        body,
      ),
    ),
    compare,
  );
  point(compare, chosen);
  return { element, title: "Runs", leave: () => clearInterval(timer) };
}

function point(link, chosen) {
  const isReady = chosen.size > 1;
  link.setAttribute("aria-disabled", String(!isReady));
  if (!isReady) return link.removeAttribute("href");
  link.target = "_blank";
  link.rel = "noopener";
  link.href = still
    ? "compare.html"
    : `compare?${[...chosen].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
}

function row(run, chosen, changed) {
  const box = h("input", {
    type: "checkbox",
    checked: chosen.has(run.id),
    "aria-label": `choose ${run.name}`,
    onchange: (event) => {
      event.target.checked ? chosen.add(run.id) : chosen.delete(run.id);
      changed();
    },
  });
  const at = `#/run/${encodeURIComponent(run.id)}`;
  const stage = run.live ? ` · ${run.live.stage}` : "";
  return h(
    "tr",
    {},
    h("td", {}, box),
    h(
      "th",
      { scope: "row" },
      h("a", { href: at }, run.name),
      h("div", { class: "quiet" }, run.model, run.seed && ` · seed ${run.seed}`),
    ),
    h("td", {}, h("span", { class: `badge ${run.status}` }, run.status), stage),
    h("td", {}, run.method),
    h("td", {}, run.task),
    h(
      "td",
      { class: "wide" },
      run.score
        ? [
            percent(run.score[0]),
            h(
              "div",
              { class: "quiet" },
              `${percent(run.score[1])} to ${percent(run.score[2])}, ${run.scored}`,
            ),
          ]
        : "–",
    ),
    h("td", { class: "n" }, `${number(run.steps)}${run.num_steps ? ` / ${run.num_steps}` : ""}`),
    h("td", { class: "n" }, number(run.tokens)),
    h("td", { class: "wide" }, run.alarm ? h("a", { href: `${at}/alarms` }, line(run.alarm.text, 70)) : "–"),
  );
}
