// What the step-trace buffer and the memory of tips held at a step, and what was shown when.

import { ask, still } from "./data.js";
import {
  a, at, button, fault, fill, go, h, keep, line, list, number, placeName, plain, quiet, search, select,
  stepPlace,
} from "./dom.js";
import { stepKeys } from "./step.js";
import { rolloutAddress } from "./table.js";

export async function showMemory(run, [text], query) {
  const steps = run.places
    .filter((place) => place.startsWith("step-"))
    .map((place) => Number(place.slice(5)));
  const step = Number(text ?? steps.at(-1) ?? 0);
  const held = h("div.columns");
  const near = h("div");
  const when = h("div");
  let turn = 0;
  const draw = async (words) => {
    const mine = ++turn;
    const found = await ask("memory", { run: run.id, step, ...(words ? { words } : {}) });
    if (mine !== turn) return; // a newer question has been asked
    const { revision } = found.steps;
    fill(
      held,
      part("Tips", found.tips, entry("tips", showWhen)),
      part(
        `Steps${revision === null ? "" : ` (revision ${revision})`}`,
        found.steps,
        entry("steps", showWhen),
      ),
    );
  };
  const showWhen = async (memory, item) => {
    const given = memory ? { memory, key: item.key ?? "", item: item.item_id } : {};
    const found = await ask("shown", { run: run.id, step, ...given });
    const name = memory ? `When ${memory.slice(0, -1)} ${item.item_id} was shown` : `Shown at step ${step}`;
    const entries = found.map((one) => showing(run, one));
    fill(when, h("h2", name), found.length ? list("shown", entries, "ol") : quiet("Never."));
  };
  const nearest = (memory) => async () => {
    try {
      const found = await ask("neighbours", { run: run.id, step, memory, words: field.value });
      const hit = (one) => [h("strong", one.similarity.toFixed(3)), entry(memory, showWhen)(one)];
      fill(near, h("h2", `Nearest ${memory}`), list("shown", found.map(hit), "ol"));
    } catch (error) {
      fill(near, fault(error.message));
    }
  };
  const look = (words) => {
    keep({ words });
    draw(words);
  };
  const words = query.get("words") ?? "";
  const field = search("Search in memories", words, look, { placeholder: "words ( / )" });
  await Promise.all([draw(words), steps.includes(step) && showWhen("", null)]);
  const addressOf = (there) => at(run, "memory", there);
  const title = `Memory after step ${step}`;
  const options = steps.map((one) => [one, one]);
  const element = h("section",
    h("h1", title),
    h("div.controls",
      select("step", options, step, (value) => go(addressOf(value))()),
      field,
      !still && ["tips", "steps"].map((memory) => button(`Nearest ${memory}`, nearest(memory))),
    ),
    near,
    held,
    when,
  );
  return { element, title, keys: stepKeys(run, step, steps, addressOf) };
}

const part = (title, { total, items }, entry) =>
  h("div.column",
    h("h2", `${title}: ${number(total)}`),
    items.length ? list("items", items.map(entry), "ol") : quiet("None."),
    items.length < total && quiet(`The first ${items.length}; search to narrow.`),
  );

const para = (text, most) => h("p.para", line(text, most));

const entry = (memory, showWhen) => (one) => [
  para(one.text, 400),
  one.observation && h("p.quiet.para", line(one.observation, 200)),
  quiet(
    memory === "tips" ? `tip ${one.item_id} of ${one.key}` : `step ${one.index} of ${one.writer}`,
    ` · score ${number(one.score)} · by `,
    memory === "tips" ? `${one.writer} at step ${one.written_at + 1} ` : `${one.agent} `,
    plain("shown when?", () => showWhen(memory, one)),
  ),
];

const showing = (run, one) => [
  a(
    `${rolloutAddress(run, one)}?node=${one.node_id}`,
    `${placeName(one.where ?? stepPlace(one.step))}, ${one.task_key}, rollout ${one.rollout}`,
  ),
  h(`span.origin.${one.origin}`, one.origin === "buffer" ? "retrieved step" : "tips"),
  one.similarity !== null && h("span.quiet", `similarity ${one.similarity.toFixed(3)}`),
  one.source && h("span.quiet", one.source),
  para(one.text, 160),
];
