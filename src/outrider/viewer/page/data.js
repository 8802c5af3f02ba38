// Where the page gets its data: the server that it came from, or the files of a bundle.

import { rolloutsOf, searchIn } from "./still.js";

const isBundle = document.querySelector('meta[name="outrider-bundle"]') !== null;
export const still = isBundle;
const kept = new Map();

async function fetched(address) {
  const answer = await fetch(address, { headers: { accept: "application/json" } });
  const found = await answer.json().catch(() => ({ error: `${answer.status} of ${address}` }));
  if (!answer.ok) throw new Error(found.error || `${answer.status} of ${address}`);
  return found;
}

// `files` are the addresses in a bundle; parts of addresses are never text of a run.
const group = (given) => given.trace.split("/")[1];
const files = {
  runs: () => "data/runs.json",
  curves: (given) => `data/${given.run}/curves.json`,
  places: (given) => `data/${given.run}/places.json`,
  alarms: (given) => `data/${given.run}/alarms.json`,
  overview: (given) => `data/${given.run}/overview.json`,
  group: (given) => `data/${given.run}/${given.where}/group-${group(given)}.json`,
  tokens: (given) => `data/${given.run}/${given.where}/tokens-${group(given)}-${given.rollout}.json`,
  text: (given) => `data/${given.run}/${given.where}/text-${group(given)}-${given.node}.json`,
  memory: (given) => `data/${given.run}/memory-${given.step}.json`,
  shown: (given) => `data/${given.run}/shown-${given.step}.json`,
};

export async function ask(kind, given = {}) {
  if (!isBundle) return fetched(`data/${kind}.json?${new URLSearchParams(given)}`);
  const load = async (address) => {
    if (!kept.has(address)) kept.set(address, fetched(address));
    return kept.get(address);
  };
  const places = async () => (given.where ? [given.where] : load(files.places(given)));
  if (kind === "rollouts") {
    const tables = (await places()).map((where) => load(`data/${given.run}/${where}/rollouts.json`));
    return rolloutsOf((await Promise.all(tables)).flat(), given);
  }
  if (kind === "search") {
    const texts = (await places()).reverse().map((where) => load(`data/${given.run}/${where}/texts.json`));
    return searchIn((await Promise.all(texts)).flat(), given.words ?? "");
  }
  if (kind === "neighbours") throw new Error("nearest neighbours need a server: outrider view RUN");
  const found = await load(files[kind](given));
  if (kind === "memory" && given.words) return within(found, given.words.toLowerCase());
  return kind === "shown" && given.item ? found.filter((one) => one.ids.includes(Number(given.item))) : found;
}

function within(found, words) {
  const has = (one) =>
    [one.text, one.key, one.observation ?? ""].some((text) => text.toLowerCase().includes(words));
  const cut = (part) => ({ ...part, items: part.items.filter(has), total: part.items.filter(has).length });
  return { ...found, tips: cut(found.tips), steps: cut(found.steps) };
}

export async function askToStop(run) {
  const token = document.querySelector('meta[name="outrider-stop"]').content;
  const answer = await fetch(`stop?run=${encodeURIComponent(run)}`, {
    method: "POST",
    headers: { "x-outrider-stop": token },
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
}
