// In a bundle there is no server: the filter and the search of rollout_query.py and text_search.py, here.

const PAGE = 100;
const MOST_HITS = 200;
const BINS = 20;
const CHOICES = ["task_key", "kind", "mode", "outcome"];

export function rolloutsOf(rows, given) {
  const chosen = rows.filter(
    (row) =>
      CHOICES.every((name) => !given[name] || row[name] === given[name]) &&
      (given.training !== "1" || row.where.startsWith("step-")) &&
      (given.failed !== "1" || row.num_failed_calls > 0),
  );
  const low = given.low ? Number(given.low) : -Infinity;
  const high = given.high ? Number(given.high) : Infinity;
  const isBounded = given.low || given.high;
  const bounded = chosen.filter(
    (row) =>
      !isBounded || (row.episode_return !== null && row.episode_return >= low && row.episode_return <= high),
  );
  const sort = given.sort ?? "step";
  const sign = given.descending === "1" ? -1 : 1;
  const sorted = [...bounded].sort((one, other) => compared(one[sort], other[sort], sign));
  const offset = Number(given.offset ?? 0);
  const counts = Object.fromEntries(
    ["kind", "mode", "outcome"].map((name) => [name, counted(bounded, name)]),
  );
  return {
    total: bounded.length,
    offset,
    rows: sorted.slice(offset, offset + PAGE),
    histogram: histogram(chosen),
    counts,
  };
}

function compared(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null); // none comes last
  return one < other ? -sign : one > other ? sign : 0;
}

function counted(rows, name) {
  const found = {};
  for (const row of rows) found[row[name]] = (found[row[name]] ?? 0) + 1;
  return found;
}

function histogram(rows) {
  const values = rows.map((row) => row.episode_return).filter((value) => value !== null);
  const missing = rows.length - values.length;
  if (!values.length) return { edges: [], numbers: [], missing };
  const low = Math.min(...values);
  const high = Math.max(...values);
  if (low === high) return { edges: [low - 0.5, low + 0.5], numbers: [values.length], missing };
  const width = (high - low) / BINS;
  const numbers = Array(BINS).fill(0);
  for (const value of values) numbers[Math.min(BINS - 1, Math.floor((value - low) / width))] += 1;
  return { edges: Array.from({ length: BINS + 1 }, (_, i) => low + i * width), numbers, missing };
}

export function searchIn(texts, words) {
  const wanted = words.toLowerCase();
  const found = wanted ? texts.filter((one) => one.text.toLowerCase().includes(wanted)) : [];
  const hits = found.slice(0, MOST_HITS).map((one) => ({ ...one, text: around(one.text, wanted) }));
  return { hits, more: found.length > MOST_HITS };
}

function around(text, words) {
  const at = text.toLowerCase().indexOf(words);
  const start = Math.max(0, at - 60);
  const end = at + words.length + 60;
  return (start ? "…" : "") + text.slice(start, end) + (end < text.length ? "…" : "");
}
