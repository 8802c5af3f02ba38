// What the step-trace buffer and the memory of tips held at a step, and what was shown when.

import { ask, still } from "./data.js";
import { fill, h, line, number, placeName, stepPlace } from "./dom.js";
import { rolloutAddress } from "./table.js";

export async function showMemory(run, [text], query) {
  const steps = run.places
    .filter((place) => place.startsWith("step-"))
    .map((place) => Number(place.slice(5)));
  const step = Number(text ?? steps.at(-1) ?? 0);
  const held = h("div", { class: "columns" });
  const near = h("div");
  const when = h("div");
  let turn = 0;
  const draw = async (words = "") => {
    const mine = ++turn;
    const found = await ask("memory", { run: run.id, step, ...(words ? { words } : {}) });
    if (mine !== turn) return; // a newer question has been asked
    fill(
      held,
      part("Tips", found.tips, (one) => tip(one, showWhen)),
      part(
        `Steps${found.steps.revision === null ? "" : ` (revision ${found.steps.revision})`}`,
        found.steps,
        (one) => kept(one, showWhen),
      ),
    );
  };
  const showWhen = async (memory, item) => {
    const given = memory ? { memory, key: item.key ?? "", item: item.item_id } : {};
    const found = await ask("shown", { run: run.id, step, ...given });
    fill(
      when,
      h(
        "h2",
        {},
        memory
          ? `When ${memory === "tips" ? "tip" : "step"} ${item.item_id} was shown`
          : `Shown at step ${step}`,
      ),
      found.length
        ? h(
            "ol",
            { class: "shown" },
            found.map((one) => showing(run, one)),
          )
        : h("p", { class: "quiet" }, "Never."),
    );
  };
  const nearest = async (memory) => {
    try {
      const found = await ask("neighbours", { run: run.id, step, memory, words: field.value });
      fill(
        near,
        h("h2", {}, `Nearest ${memory}`),
        h(
          "ol",
          { class: "shown" },
          found.map((one) =>
            h(
              "li",
              {},
              h("strong", {}, one.similarity.toFixed(3)),
              " ",
              memory === "tips" ? tip(one, showWhen) : kept(one, showWhen),
            ),
          ),
        ),
      );
    } catch (error) {
      fill(near, h("p", { class: "fault" }, error.message));
    }
  };
  let timer = null;
  const field = h("input", {
    type: "search",
    "aria-label": "Search in memories",
    placeholder: "words ( / )",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => draw(field.value.trim()), 120);
    },
  });
  await Promise.all([draw(), steps.includes(step) && showWhen("", null)]);
  const go = (by) => () => {
    const there = steps[steps.indexOf(step) + by];
    if (there) location.hash = `#/run/${encodeURIComponent(run.id)}/memory/${there}`;
    return Boolean(there);
  };
  const element = h(
    "section",
    {},
    h("h1", {}, `Memory after step ${step}`),
    h(
      "div",
      { class: "controls" },
      h(
        "label",
        {},
        "step",
        h(
          "select",
          {
            onchange: (event) => {
              location.hash = `#/run/${encodeURIComponent(run.id)}/memory/${event.target.value}`;
            },
          },
          steps.map((one) => h("option", { value: one, selected: one === step }, one)),
        ),
      ),
      field,
      !still && h("button", { type: "button", onclick: () => nearest("tips") }, "Nearest tips"),
      !still && h("button", { type: "button", onclick: () => nearest("steps") }, "Nearest steps"),
    ),
    near,
    held,
    when,
  );
  return { element, title: `Memory after step ${step}`, keys: { ArrowLeft: go(-1), ArrowRight: go(1) } };
}

function part(title, { total, items }, entry) {
  return h(
    "div",
    { class: "column" },
    h("h2", {}, `${title}: ${number(total)}`),
    items.length
      ? h(
          "ol",
          { class: "items" },
          items.map((one) => h("li", {}, entry(one))),
        )
      : h("p", { class: "quiet" }, "None."),
    items.length < total && h("p", { class: "quiet" }, `The first ${items.length}; search to narrow.`),
  );
}

function tip(one, showWhen) {
  return h(
    "div",
    {},
    h("p", { class: "said" }, line(one.text, 400)),
    h(
      "p",
      { class: "quiet" },
      `tip ${one.item_id} of ${one.key} · score ${number(one.score)} · `,
      `by ${one.writer} at step ${one.written_at + 1} `,
      h("button", { type: "button", class: "plain", onclick: () => showWhen("tips", one) }, "shown when?"),
    ),
  );
}

function kept(one, showWhen) {
  return h(
    "div",
    {},
    h("p", { class: "said" }, line(one.text, 300)),
    one.observation && h("p", { class: "quiet said" }, line(one.observation, 200)),
    h(
      "p",
      { class: "quiet" },
      `step ${one.index} of ${one.writer} · by ${one.agent} · reward ${number(one.score)} `,
      h("button", { type: "button", class: "plain", onclick: () => showWhen("steps", one) }, "shown when?"),
    ),
  );
}

function showing(run, one) {
  return h(
    "li",
    {},
    h(
      "a",
      { href: `${rolloutAddress(run, one)}?node=${one.node_id}` },
      `${placeName(one.where ?? stepPlace(one.step))}, ${one.task_key}, rollout ${one.rollout}`,
    ),
    h("span", { class: `origin ${one.origin}` }, one.origin === "buffer" ? "retrieved step" : "tips"),
    one.similarity !== null && h("span", { class: "quiet" }, `similarity ${one.similarity.toFixed(3)}`),
    one.source && h("span", { class: "quiet" }, one.source),
    h("p", { class: "said" }, line(one.text, 160)),
  );
}
