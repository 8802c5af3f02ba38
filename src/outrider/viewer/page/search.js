// Search in the text of turns: of a step, or of all.

import { ask } from "./data.js";
import { fill, h, line, placeName, tell } from "./dom.js";
import { rolloutAddress } from "./table.js";

const PAUSE_MS = 60;

export function searchBox(run, place) {
  const results = h("div", { class: "hits" });
  const everywhere = h("input", { type: "checkbox", checked: !place, onchange: () => look() });
  let timer = null;
  let turn = 0;
  const look = async () => {
    const mine = ++turn;
    const words = field.value.trim();
    if (!words) return fill(results);
    try {
      const found = await ask("search", {
        run: run.id,
        words,
        ...(place && !everywhere.checked ? { where: place } : {}),
      });
      if (mine === turn) fill(results, told(run, found, words));
    } catch (error) {
      if (mine === turn) fill(results, h("p", { class: "fault" }, error.message));
    }
  };
  const field = h("input", {
    type: "search",
    placeholder: "words of a turn ( / )",
    "aria-label": "Search in text",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(look, PAUSE_MS);
    },
  });
  return h(
    "div",
    { class: "search", role: "search" },
    field,
    place && h("label", { class: "choice" }, everywhere, "in all steps"),
    results,
  );
}

function told(run, { hits, more }, words) {
  const text = hits.length ? `${hits.length}${more ? " or more" : ""} turns` : "No turn has these words.";
  tell(text);
  return [
    h("p", { class: "quiet" }, text),
    h(
      "ol",
      {},
      hits.map((hit) =>
        h(
          "li",
          {},
          h(
            "a",
            { href: `${rolloutAddress(run, hit)}?node=${hit.node_id}` },
            `${placeName(hit.where)}, ${hit.task_key}, rollout ${hit.rollout}`,
          ),
          h("span", { class: `origin ${hit.origin}` }, hit.origin),
          h("p", { class: "said" }, marked(line(hit.text, 220), words)),
        ),
      ),
    ),
  ];
}

function marked(text, words) {
  const at = text.toLowerCase().indexOf(words.toLowerCase());
  return at < 0
    ? text
    : [text.slice(0, at), h("mark", {}, text.slice(at, at + words.length)), text.slice(at + words.length)];
}
