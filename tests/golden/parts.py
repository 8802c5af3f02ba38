"""What is hashed of a run, and under which names: the one place that a renamed attribute, metric or file
touches.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.trace import Leaf, Node, Trace
from outrider.viewer.records import SCHEMA, TraceReader
from tests.training.whole_runs import CLOCK, _rows

# Metrics that have another name today than in the record: today's name to the record's; None for one that is
# new since.
RENAMED: Mapping[str, str | None] = {}
# The columns of a trace file, and keys of its metadata, that the record does not know: new since.
NEW_COLUMNS = frozenset({"advantages", "trainer_logprobs", "ratios", "weight_version", "role", "seconds"})
NEW_METADATA = frozenset({"source", "writers", "memory_version", "tool_calls"})
SHOWN = ("reward/mean", "loss/policy", "grad/norm", "gap/logprob_mean")


def digest(value: Any) -> str:
    """Of plain data, with every bit of its numbers."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()[:12]


def tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of named tensors, with their shapes."""
    found = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda one: one[0]):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def traced(traces: Sequence[Trace]) -> str:
    """The trees as they reach the update: tokens, who wrote them, log-probs, entropies, KL, outcomes."""
    return digest([[trace.task.key, trace.modes, trace.without_memory, trace.is_replayed,
                    sorted(trace.pruned), [_node(node) for node in trace.nodes],
                    [_leaf(leaf) for leaf, _ in trace.rollouts()]]
                   for trace in traces])  # fmt: skip


def _node(node: Node) -> list[Any]:
    written = [node.message.role, node.message.content, node.origin, node.trainable, _known(node.metadata)]
    numbers = [
        node.logprobs,
        node.entropies,
        node.entropies_are_bounds,
        node.kl,
        node.reward,
        node.weight_version,
    ]
    return [node.node_id, node.parent, node.token_ids, written, numbers]


def _known(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name not in NEW_METADATA}


def _leaf(leaf: Leaf) -> list[Any]:
    ended = [
        leaf.node_id,
        leaf.rollout,
        leaf.outcome,
        leaf.episode_return,
        leaf.success,
        leaf.metrics,
        leaf.detail,
    ]
    return [*ended, leaf.reflection, leaf.num_reflection_tokens, leaf.is_demonstration]


def credited(traces: Sequence[Trace]) -> str:
    """Advantages per rollout and per token, the scales of the ratios, and who counts a shared token."""
    nodes = [
        [node.credit, node.ratio_scale, node.owner, _shares(node)] for trace in traces for node in trace.nodes
    ]
    return digest(
        [nodes, [[leaf.advantage, leaf.intrinsic] for trace in traces for leaf, _ in trace.rollouts()]]
    )


def _shares(node: Node) -> Any:
    return node.shares and [
        [rollout, share.credit, share.ratio_scale] for rollout, share in sorted(node.shares.items())
    ]


def checkpointed(folder: Path) -> dict[str, str]:
    """Weights, moments and memory, byte by byte; counts, cursors and the memory's plain data. No settings,
    versions, places.
    """
    found = {
        name: hashlib.sha256((folder / f"{name}.safetensors").read_bytes()).hexdigest()[:12]
        for name in ("masters", "optimizer", "memory")
        if (folder / f"{name}.safetensors").exists()
    }
    state = json.loads((folder / "state.json").read_text())
    counts = (
        "step",
        "num_policy_tokens",
        "task_cursor",
        "num_optimizer_steps",
        "buffer_revision",
        "hook_counts",
    )
    return {**found, "state": digest([{name: state[name] for name in counts}, state.get("memory")])}


def measured(run: Path) -> dict[int, dict[str, float | None]]:
    """The metrics of every training step, by the record's names and without the clock's."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[int, dict[str, float | None]] = {}
    for record in records:
        if record["kind"] == "train":
            names = {name: RENAMED.get(name, name) for name in record if not name.startswith(CLOCK)}
            found[record["step"]] = {
                old: record[name] for name, old in names.items() if old not in (None, "kind", "step")
            }
    return found


def by_section(values: Mapping[str, float | None]) -> dict[str, str]:
    """A hash for each group of metrics, so that a difference says where to look."""
    sections: dict[str, dict[str, float | None]] = {}
    for name, value in values.items():
        sections.setdefault(name.partition("/")[0], {})[name] = value
    return {section: digest(values) for section, values in sorted(sections.items())}


def shown(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """A few numbers for people, shortened: the hashes hold every digit."""
    return {
        name: None if (value := values[name]) is None or not math.isfinite(value) else float(f"{value:.5g}")
        for name in SHOWN
        if name in values
    }


def written_rows(run: Path, step: int) -> str:
    """All groups that a step played, trained on or not, as the trace files have them."""
    names = [name for name in SCHEMA.names if name not in NEW_COLUMNS]
    rows = [{name: getattr(row, name) for name in names} for row in TraceReader(run / "traces").read(step)]
    for row in rows:
        row["metadata"] = json.dumps(_known(json.loads(row["metadata"])))
    return digest([list(row.values()) for row in rows])


def buffer_rows(path: Path) -> str:
    """The step-trace buffer's contents."""
    rows = [
        [value.hex() if isinstance(value, bytes) else value for value in row]
        for table in _rows(path)
        for row in table
    ]
    return digest(rows)
