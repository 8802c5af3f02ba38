// Returns as bars; each is a button that narrows the table to its range, a second one widens it.

import { fill, h, number } from "./dom.js";

export function histogram(choose) {
  const element = h("div", { class: "histogram", role: "group", "aria-label": "Returns: choose a range" });
  const draw = ({ edges, numbers, missing }, low, high) => {
    const most = Math.max(1, ...numbers);
    const isIn = (index) =>
      low !== "" && edges[index] >= Number(low) - 1e-12 && edges[index + 1] <= Number(high) + 1e-12;
    const bars = numbers.map((count, index) => {
      const label = `${number(edges[index])} to ${number(edges[index + 1])}: ${number(count)} rollouts`;
      const bar = h(
        "button",
        {
          type: "button",
          class: "bar",
          title: label,
          "aria-label": label,
          "aria-pressed": String(isIn(index)),
          onclick: (event) => choose(...picked(edges, index, low, high, event.shiftKey)),
        },
        h("span"),
      );
      bar.firstChild.style.height = `${count ? Math.max(3, (100 * count) / most) : 0}%`;
      return bar;
    });
    fill(
      element,
      h("div", { class: "bars" }, bars),
      edges.length > 0 &&
        h(
          "div",
          { class: "ends quiet" },
          h("span", {}, number(edges[0])),
          h("span", {}, "return"),
          h("span", {}, number(edges.at(-1))),
        ),
      h(
        "p",
        { class: "quiet" },
        missing > 0 && `${number(missing)} without a return. `,
        low !== "" &&
          h(
            "button",
            { type: "button", class: "plain", onclick: () => choose("", "") },
            `Only ${number(Number(low))} to ${number(Number(high))}: show all`,
          ),
      ),
    );
  };
  return { element, draw };
}

function picked(edges, index, low, high, extends_) {
  const [from, to] = [edges[index], edges[index + 1]];
  if (low === "" || !extends_)
    return String(low) === String(from) && String(high) === String(to)
      ? ["", ""]
      : [String(from), String(to)];
  return [String(Math.min(Number(low), from)), String(Math.max(Number(high), to))];
}
