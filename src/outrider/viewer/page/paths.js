// A group's nodes as paths of rollouts.

export async function groupOf(ask, run, where, number) {
  const step = where.startsWith("step-") ? Number(where.slice(5)) : null;
  const trace = step !== null ? `${step}/${number}` : await traceOf(ask, run, where, number);
  const found = await ask("group", { run: run.id, where, trace });
  found.nodes = new Map(found.nodes.map((node) => [node.node_id, node]));
  found.number = number;
  return found;
}

// Groups of an evaluation are named after the step at which it came.
async function traceOf(ask, run, where, number) {
  const evaluation = run.evaluations[Number(where.slice("evaluation-".length))];
  return `${evaluation?.step ?? 0}/${number}`;
}

export function pathOf(group, rollout) {
  const row = rolloutOf(group, rollout);
  const path = [];
  let node = group.nodes.get(row.node_id);
  while (node) {
    path.unshift(node);
    node = group.nodes.get(node.parent_id);
  }
  return path;
}

export function rolloutOf(group, rollout) {
  const row = group.rollouts.find((one) => one.rollout === Number(rollout));
  if (!row) throw new Error(`this group has no rollout ${rollout}`);
  return row;
}

export function childrenOf(group) {
  const found = new Map();
  for (const node of group.nodes.values())
    found.set(node.parent_id, [...(found.get(node.parent_id) ?? []), node]);
  return found;
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
