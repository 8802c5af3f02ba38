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
  const told = node.metadata;
  if (node.origin === "buffer")
    return [
      told.similarity !== undefined &&
        `similarity ${told.similarity === null ? "not measured" : told.similarity.toFixed(3)}`,
      told.source && `from ${told.source}`,
      told.agent && `by ${told.agent}`,
      told.source_task && `task ${told.source_task}`,
      told.memory_version !== undefined && `buffer revision ${told.memory_version}`,
    ]
      .filter(Boolean)
      .join(" · ");
  if (node.origin === "memory")
    return [
      told.writers && `written by ${told.writers.map(writer).join(", ")}`,
      told.similarities?.length &&
        `similarity ${told.similarities.map((one) => (one ?? NaN).toFixed(2)).join(", ")}`,
      told.memory_version !== undefined && `memory version ${told.memory_version}`,
    ]
      .filter(Boolean)
      .join(" · ");
  return "";
}

// "2:task/5" is rollout 5 of task, in training step 3: files count steps from 1.
function writer(text) {
  const [step, ...rest] = String(text).split(":");
  return `rollout ${rest.join(":")} at step ${Number(step) + 1}`;
}
