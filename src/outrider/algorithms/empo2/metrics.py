"""Declared metrics of one step's tips (meanings: docs/metrics.md)."""

from collections.abc import Sequence
from statistics import fmean

from outrider.algorithms.empo2.hook import TipHook
from outrider.algorithms.empo2.modes import MODES, tip_mode
from outrider.trace import Trace
from outrider.types import Origin


def tip_metrics(traces: Sequence[Trace], hook: TipHook) -> dict[str, float]:
    """Modes, what was shown, written and stored. Takes the hook's counts, which start again at 0."""
    counts, hook.counts = hook.counts, type(hook.counts)()
    nodes = {id(node): node for trace in traces for _, path in trace.rollouts() for node in path}.values()
    shown = [node for node in nodes if node.origin is Origin.MEMORY]
    leaves = [
        (tip_mode(trace.modes[leaf.rollout]), leaf)
        for trace in traces
        for leaf, _ in trace.rollouts()
        if leaf.episode_return is not None
    ]
    metrics = {
        f"tips/num_groups_{mode}": float(sum(tip_mode(trace.modes[0]) == mode for trace in traces))
        for mode in MODES
    }
    metrics |= {
        "tips/num_shown": float(sum(len(node.metadata["tip_ids"]) for node in shown)),
        "tips/num_dropped": float(counts["dropped"]),
        "tips/num_turns_without": float(counts["without_tips"]),
        "tips/num_no_room": float(sum(node.metadata.get("num_splices_dropped", 0) for node in nodes)),
        "tips/num_written": float(counts["written"]),
        "tips/num_empty": float(counts["empty"]),
        "tips/num_stored": float(counts["stored"]),
        "tips/num_duplicates": float(counts["duplicates"]),
        "tips/memory_size": float(len(hook.memory)),
        "tips/fraction_tied": sum(_ties(trace) for trace in traces) / len(traces),
        "tokens/remarks": float(sum(leaf.num_reflection_tokens for _, leaf in leaves)),
    }
    for mode in MODES:
        returns = [leaf.episode_return or 0.0 for own, leaf in leaves if own == mode]
        if returns:
            metrics[f"tips/return_{mode}"] = fmean(returns)
    if shown:
        similarities = [value for node in shown for value in node.metadata["similarities"]]
        metrics["tips/similarity_mean"] = fmean(similarities)
        metrics["tips/similarity_min"] = min(similarities)
        metrics["tips/num_distinct_shown"] = float(len(_distinct(traces, hook)))
        metrics["tips/tokens_a_turn"] = fmean(len(node.token_ids) for node in shown)
    return metrics


def _ties(trace: Trace) -> bool:
    returns = [leaf.episode_return for leaf, _ in trace.rollouts() if leaf.episode_return is not None]
    return len(set(returns)) < 2


def _distinct(traces: Sequence[Trace], hook: TipHook) -> set[tuple[str, int]]:
    """Tips that were shown, each once; a tip's number counts the records of its buffer."""
    return {
        (hook.task_key(trace.task), tip)
        for trace in traces
        for _, path in trace.rollouts()
        for node in path
        if node.origin is Origin.MEMORY
        for tip in node.metadata["tip_ids"]
    }
