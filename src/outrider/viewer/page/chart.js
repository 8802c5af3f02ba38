// One metric as a line per run. A click on a point opens its step.

import uPlot from "./vendor/uPlot.esm.js";
import { h, isKnown, number } from "./dom.js";

export const INKS = ["--ink-1", "--ink-2", "--ink-3", "--ink-4", "--ink-5", "--ink-6"];
const HEIGHT = 150;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]; // of a step

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An exponential mean over the points before, from 0 (none) to below 1; gaps stay gaps.
export function smoothed(values, share) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : share * mean + (1 - share) * value;
    return mean;
  });
}

// `lines`: {label, x, values, steps, ink} and, for a band, {low, high}. `open(line, index)` is called for a
// click. `healthy` {low, high} is a range of values that is shaded; a bound may be null.
export function chart({ title, xLabel, lines, smoothing, open, healthy = {} }) {
  const series = [{}];
  const bands = [];
  const tables = lines.map((one) => {
    const stroke = colour(one.ink);
    const points = { show: one.x.length < 40, size: 5 };
    series.push({ label: one.label, stroke, width: 1.6, spanGaps: true, points });
    const columns = [one.values];
    if (one.low) {
      bands.push({ series: [series.length + 1, series.length], fill: `${stroke}2b` });
      series.push(...[0, 1].map(() => ({ stroke, width: 0, spanGaps: true, points: { show: false } })));
      columns.push(one.low, one.high);
    }
    return [one.x, ...columns.map((column) => (smoothing ? smoothed(column, smoothing) : column))];
  });
  const data = tables.length > 1 ? uPlot.join(tables) : (tables[0] ?? [[]]);
  const label = `${title} over ${xLabel}: ${lines.map(described).join("; ")}`;
  const holder = h("div.plot", { role: "img", "aria-label": label });
  const nearest = (plot) => {
    const at = plot.cursor.idx;
    if (!isKnown(at)) return null;
    const x = data[0][at];
    const shown = lines.map((one) => ({ one, index: one.x.indexOf(x) })).filter(({ index }) => index >= 0);
    const y = plot.posToVal(plot.cursor.top, "y");
    const far = ({ one, index }) => Math.abs((one.values[index] ?? Infinity) - y);
    return shown.sort((a, b) => far(a) - far(b))[0] ?? null;
  };
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
  };
  // As many digits as neighbouring ticks need to differ.
  const short = (plot, ticks, index, space, step) =>
    ticks.map((value) => number(value, 1 + Math.ceil(Math.log10(Math.abs(value) / step || 1))));
  const shadeHealthy = (plot) => {
    if (!isKnown(healthy.low) && !isKnown(healthy.high)) return;
    const { left, top, width, height } = plot.bbox;
    const y = (value) => Math.min(top + height, Math.max(top, plot.valToPos(value, "y", true)));
    const [low, high] = [y(healthy.low ?? -Infinity), y(healthy.high ?? Infinity)];
    plot.ctx.fillStyle = `${colour("--good")}1c`;
    plot.ctx.fillRect(left, high, width, low - high);
  };
  const plot = new uPlot(
    {
      width: 320,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      scales: { x: { time: false }, y: { range: (plot, low, high) => spread(low, high) } },
      cursor: { drag: { x: false, y: false }, points: { size: 7 } },
      axes: [
        { ...axis, size: 26, values: short, ...(xLabel.includes("step") ? { incrs: WHOLE } : {}) },
        { ...axis, size: 56, values: short },
      ],
      hooks: { drawClear: [shadeHealthy] },
      series,
      bands,
    },
    data,
    holder,
  );
  holder.addEventListener("click", () => {
    const found = nearest(plot);
    if (found) open(found.one, found.index);
  });
  const note = h("p.reading.quiet", { "aria-hidden": "true" }, "\u00a0");
  holder.addEventListener("mousemove", () => {
    const found = nearest(plot);
    note.textContent = found
      ? `${lines.length > 1 ? found.one.label + ", " : ""}step ${found.one.steps[found.index]}: ` +
        number(found.one.values[found.index], 4)
      : "\u00a0";
  });
  const fit = new ResizeObserver(() => {
    if (holder.clientWidth) plot.setSize({ width: holder.clientWidth, height: HEIGHT });
  });
  fit.observe(holder);
  return {
    element: h("div", holder, note),
    leave: () => {
      fit.disconnect();
      plot.destroy();
    },
  };
}

// A constant lies in the middle; else the line has a little air.
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const air = low === high ? Math.abs(low) / 2 || 1 : (high - low) / 12;
  return [low - air, high + air];
}

function described(one) {
  const known = one.values.filter(isKnown);
  if (!known.length) return `${one.label}: no value`;
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const ends = `from ${number(known[0])} to ${number(known.at(-1))}`;
  return `${one.label}: ${ends}, at least ${number(least)}, at most ${number(most)}`;
}
