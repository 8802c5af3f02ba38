// Where the page gets its data: the server that it came from, or the files of a bundle.

const metaOf = (name) => document.querySelector(`meta[name="outrider-${name}"]`);
export const still = metaOf("bundle") !== null;
const kept = new Map();

async function fetched(address, options) {
  const answer = await fetch(address, options);
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `${answer.status} of ${address}`);
  return found;
}

export const askToStop = (run) =>
  fetched(`stop?run=${encodeURIComponent(run)}`, {
    method: "POST",
    headers: { "x-outrider-stop": metaOf("stop").content },
  });

export async function ask(kind, given = {}) {
  if (!still) return fetched(`data/${kind}.json?${new URLSearchParams(given)}`);
  const { run, where, trace = "", rollout, node, step, item, words = "" } = given;
  const load = (name) => {
    const address = `data/${name}.json`;
    if (!kept.has(address)) kept.set(address, fetched(address));
    return kept.get(address);
  };
  const places = async () => (where ? [where] : load(`${run}/places`));
  const over = async (stems, name) =>
    (await Promise.all(stems.map((stem) => load(`${run}/${stem}/${name}`)))).flat();
  // Parts of addresses are never text of a run.
  const group = trace.split("/")[1];
  switch (kind) {
    case "runs":
      return load("runs");
    case "rollouts":
      return rolloutsOf(await over(await places(), "rollouts"), given);
    case "search":
      return searchIn(await over([...(await places())].reverse(), "texts"), words.toLowerCase());
    case "neighbours":
      throw new Error("nearest neighbours need a server: outrider view RUN");
    case "group":
      return load(`${run}/${where}/group-${group}`);
    case "tokens":
      return load(`${run}/${where}/tokens-${group}-${rollout}`);
    case "text":
      return load(`${run}/${where}/text-${group}-${node}`);
    case "memory":
      return within(await load(`${run}/memory-${step}`), words.toLowerCase());
    case "shown": {
      const found = await load(`${run}/shown-${step}`);
      return item ? found.filter((one) => one.ids.includes(Number(item))) : found;
    }
    default:
      return load(`${run}/${kind}`);
  }
}

// In a bundle: the filter and the search of search.py.

const PAGE = 100;
const MOST_HITS = 200;
const BINS = 20;

function within(found, words) {
  const has = (one) => `${one.text}\n${one.key}\n${one.observation ?? ""}`.toLowerCase().includes(words);
  const cut = (part) => {
    const items = part.items.filter(has);
    return { ...part, items, total: words ? items.length : part.total };
  };
  return { ...found, tips: cut(found.tips), steps: cut(found.steps) };
}

function rolloutsOf(rows, given) {
  const { training, failed, low, high, sort = "step", descending } = given;
  const chosen = rows.filter(
    (row) =>
      ["task_key", "kind", "mode", "outcome"].every((name) => !given[name] || row[name] === given[name]) &&
      (training !== "1" || row.where.startsWith("step-")) &&
      (!failed || (failed === "any" ? row.num_failed_calls > 0 : row.num_failed_calls === 0)),
  );
  const isWithin = ({ episode_return: value }) =>
    (!low && !high) || (value !== null && (!low || value >= low) && (!high || value <= high));
  const bounded = chosen.filter(isWithin);
  const sign = descending === "1" ? -1 : 1;
  const compared = (one, other) =>
    one === null || other === null
      ? (one === null) - (other === null) // none comes last
      : sign * ((one > other) - (one < other));
  const offset = Number(given.offset ?? 0);
  const counted = (name) => {
    const counts = {};
    for (const row of bounded) counts[row[name]] = (counts[row[name]] ?? 0) + 1;
    return counts;
  };
  return {
    total: bounded.length,
    offset,
    rows: [...bounded].sort((a, b) => compared(a[sort], b[sort])).slice(offset, offset + PAGE),
    histogram: histogram(chosen.map((row) => row.episode_return)),
    counts: { kind: counted("kind"), mode: counted("mode"), outcome: counted("outcome") },
  };
}

function histogram(returns) {
  const values = returns.filter((value) => value !== null);
  const missing = returns.length - values.length;
  if (!values.length) return { edges: [], numbers: [], missing };
  const low = Math.min(...values);
  const width = (Math.max(...values) - low) / BINS;
  if (!width) return { edges: [low - 0.5, low + 0.5], numbers: [values.length], missing };
  const numbers = Array(BINS).fill(0);
  for (const value of values) numbers[Math.min(BINS - 1, Math.floor((value - low) / width))] += 1;
  return { edges: Array.from({ length: BINS + 1 }, (_, i) => low + i * width), numbers, missing };
}

function searchIn(texts, words) {
  const found = words ? texts.filter((one) => one.text.toLowerCase().includes(words)) : [];
  const around = (text) => {
    const start = Math.max(0, text.toLowerCase().indexOf(words) - 60);
    const end = start + words.length + 120;
    return (start ? "…" : "") + text.slice(start, end) + (end < text.length ? "…" : "");
  };
  const hits = found.slice(0, MOST_HITS).map((one) => ({ ...one, text: around(one.text) }));
  return { hits, more: found.length > MOST_HITS };
}

// News of the run that is looked at, as server-sent events; a page of a bundle hears none.

let source = null;
let followed = null;

export function follow(run, onNews) {
  if (still) return;
  if (run !== null && followed?.id === run.id) {
    followed.current = run;
    run.state = followed.state;
    return;
  }
  source?.close();
  source = followed = null;
  if (run === null) return;
  const mine = { id: run.id, current: run, state: null };
  followed = mine;
  source = new EventSource(`events?run=${encodeURIComponent(run.id)}`);
  source.onmessage = (event) => {
    const before = mine.state;
    mine.state = JSON.parse(event.data);
    if (followed === mine) onNews(mine.current, mine.state, before);
  };
}
