// Returns as bars; each is a button that narrows the table to its range, a second one widens it.

import { button, fill, h, number, plain, plural, quiet } from "./dom.js";

export function histogram(choose) {
  const element = h("div", { class: "histogram", role: "group", "aria-label": "Returns: choose a range" });
  const draw = ({ edges, numbers, missing }, low, high) => {
    const most = Math.max(1, ...numbers);
    const isIn = (index) =>
      low !== "" && edges[index] >= Number(low) - 1e-12 && edges[index + 1] <= Number(high) + 1e-12;
    const bars = numbers.map((count, index) => {
      const label = `${number(edges[index])} to ${number(edges[index + 1])}: ${plural(count, "rollout")}`;
      const pick = (event) => choose(...picked(edges, index, low, high, event.shiftKey));
      const about = { class: "bar", title: label, "aria-label": label, "aria-pressed": String(isIn(index)) };
      const bar = button(h("span"), pick, about);
      bar.firstChild.style.height = `${count ? Math.max(3, (100 * count) / most) : 0}%`;
      return bar;
    });
    const ends = [number(edges[0]), "return", number(edges.at(-1))];
    fill(
      element,
      h("div.bars", bars),
      edges.length > 0 &&
        h(
          "div.ends.quiet",
          ends.map((text) => h("span", text)),
        ),
      quiet(
        missing > 0 && `${number(missing)} without a return. `,
        low !== "" &&
          plain(`Only ${number(Number(low))} to ${number(Number(high))}: show all`, () => choose("", "")),
      ),
    );
  };
  return { element, draw };
}

function picked(edges, index, low, high, extends_) {
  const [from, to] = [edges[index], edges[index + 1]];
  if (low !== "" && extends_) return [String(Math.min(low, from)), String(Math.max(high, to))];
  return String(low) === String(from) && String(high) === String(to) ? ["", ""] : [String(from), String(to)];
}
