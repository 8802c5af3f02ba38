// Search in the text of turns: of a step, or of all.

import { keep } from "./address.js";
import { ask } from "./data.js";
import { a, check, fault, fill, h, line, list, placeName, plural, quiet, search, tell } from "./dom.js";
import { rolloutAddress } from "./table.js";

const PAUSE_MS = 60;

export function searchBox(run, place, query) {
  const results = h("div.hits");
  let isEverywhere = !place || query.has("everywhere");
  let timer = null;
  let turn = 0;
  const look = async () => {
    const mine = ++turn;
    const words = field.value.trim();
    keep({ words, everywhere: place && isEverywhere ? 1 : "" });
    if (!words) return fill(results);
    try {
      const found = await ask("search", { run: run.id, words, ...(isEverywhere ? {} : { where: place }) });
      if (mine === turn) fill(results, hits(run, found, words));
    } catch (error) {
      if (mine === turn) fill(results, fault(error.message));
    }
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(look, PAUSE_MS);
  };
  const words = query.get("words") ?? "";
  const field = search("Search in text", words, later, { placeholder: "words of a turn ( / )" });
  if (words) look();
  const everywhere = (isOn) => {
    isEverywhere = isOn;
    look();
  };
  return h(
    "div",
    { class: "search", role: "search" },
    field,
    place && check("in all steps", isEverywhere, everywhere),
    results,
  );
}

function hits(run, { hits, more }, words) {
  const text = hits.length
    ? `${plural(hits.length, "turn")}${more ? " or more" : ""}`
    : "No turn has these words.";
  tell(text);
  const entry = (hit) => [
    a(
      `${rolloutAddress(run, hit)}?node=${hit.node_id}`,
      `${placeName(hit.where)}, ${hit.task_key}, rollout ${hit.rollout}`,
    ),
    h("span", { class: `origin ${hit.origin}` }, hit.origin),
    h("p.said", marked(line(hit.text, 220), words)),
  ];
  return [quiet(text), list("", hits.map(entry), "ol")];
}

function marked(text, words) {
  const start = text.toLowerCase().indexOf(words.toLowerCase());
  const end = start + words.length;
  return start < 0 ? text : [text.slice(0, start), h("mark", text.slice(start, end)), text.slice(end)];
}
