// A group's nodes as paths of rollouts.

import { ask } from "./data.js";

// Groups of an evaluation are named after the step at which it came.
export async function groupOf(run, where, number) {
  const [kind, digits] = where.split("-");
  const step = kind === "step" ? Number(digits) : (run.evaluations[Number(digits)]?.step ?? 0);
  const found = await ask("group", { run: run.id, where, trace: `${step}/${number}` });
  found.nodes = new Map(found.nodes.map((node) => [node.node_id, node]));
  return found;
}

export function pathOf(group, rollout) {
  const path = [];
  let node = group.nodes.get(rolloutOf(group, rollout).node_id);
  for (; node; node = group.nodes.get(node.parent_id)) path.unshift(node);
  return path;
}

export function rolloutOf(group, rollout) {
  const row = group.rollouts.find((one) => one.rollout === Number(rollout));
  if (!row) throw new Error(`this group has no rollout ${rollout}`);
  return row;
}

export const ORIGINS = {
  prompt: "prompt",
  policy: "policy",
  environment: "environment",
  buffer: "retrieved step",
  memory: "tips",
  demonstration: "demonstration",
};

export function splice(node) {
  const { similarity, source, agent, source_task, memory_version, writers, similarities } = node.metadata;
  const parts = {
    buffer: [
      similarity !== undefined &&
        `similarity ${similarity === null ? "not measured" : similarity.toFixed(3)}`,
      source && `from ${source}`,
      agent && `by ${agent}`,
      source_task && `task ${source_task}`,
      memory_version !== undefined && `buffer revision ${memory_version}`,
    ],
    memory: [
      writers && `written by ${writers.map(writer).join(", ")}`,
      similarities?.length && `similarity ${similarities.map((one) => (one ?? NaN).toFixed(2)).join(", ")}`,
      memory_version !== undefined && `memory version ${memory_version}`,
    ],
  }[node.origin];
  return (parts ?? []).filter(Boolean).join(" · ");
}

// "2:task/5" is rollout 5 of task, in training step 3: files count steps from 1.
function writer(text) {
  const [step, ...rest] = String(text).split(":");
  return `rollout ${rest.join(":")} at step ${Number(step) + 1}`;
}
