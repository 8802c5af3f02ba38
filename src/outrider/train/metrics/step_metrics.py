"""Declared metrics of one step's rollouts, from traces and credits (meanings: docs/metrics.md)."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Final, TypeAlias, get_args

from outrider.algorithms.base import GroupAdvantages
from outrider.algorithms.common.advantages import NoSignalReason
from outrider.memory.embedder import HashEmbedder
from outrider.rollout.modes import HYBRID, has_part
from outrider.trace import Leaf, Node, Trace
from outrider.types import Origin, Outcome

_MAX_NAME: Final = 80
_ScoredRollout: TypeAlias = tuple[Leaf, Sequence[Node]]  # a rollout with a return, and its path


def rollout_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Rewards, outcomes, lengths, turns, tools and tokens of a step's own rollouts; faults stay out of every
    mean.
    """
    every = [leaf for trace in traces for leaf, _ in trace.own_rollouts()]
    scored = [
        (leaf, path)
        for trace in traces
        for leaf, path in trace.own_rollouts()
        if leaf.episode_return is not None
    ]
    outcomes = Counter(leaf.outcome for leaf in every)
    metrics = {f"rollout/num_{outcome.value}": float(outcomes[outcome]) for outcome in Outcome}
    metrics |= {
        "rollout/num": float(len(every)),
        "rollout/num_masked": float(len(every) - len(scored)),
        "group/num": float(len(traces)),
        "tokens/discarded": float(_num_discarded(traces)),
    }
    if not scored:
        return metrics
    # a shared node was written once
    nodes = list({id(node): node for _, path in scored for node in path}.values())
    truncated = outcomes[Outcome.TRUNCATED_TOKENS] + outcomes[Outcome.TRUNCATED_TURNS]
    return (
        metrics
        | _reward_metrics(scored)
        | _length_metrics(scored)
        | _environment_metrics(scored, nodes)
        | _endpoint_metrics(scored)
        | {"rollout/truncated_fraction": truncated / len(every)}
        | _token_metrics(nodes)
    )


def _reward_metrics(scored: Sequence[_ScoredRollout]) -> dict[str, float]:
    returns = [leaf.episode_return for leaf, _ in scored if leaf.episode_return is not None]
    return {
        "reward/mean": fmean(returns),
        "reward/std": pstdev(returns),
        "reward/min": min(returns),
        "reward/max": max(returns),
        "reward/success_rate": fmean(float(leaf.success) for leaf, _ in scored),
    }


def _length_metrics(scored: Sequence[_ScoredRollout]) -> dict[str, float]:
    """Per rollout, a node that several share counted in each."""
    lengths = [_num_tokens(path) for _, path in scored]
    turns = [sum(node.trainable for node in path) for _, path in scored]
    policy = [sum(len(node.token_ids) for node in path if node.trainable) for _, path in scored]
    return {
        "rollout/length_tokens_mean": fmean(lengths),
        "rollout/length_tokens_max": float(max(lengths)),
        "rollout/policy_tokens_mean": fmean(policy),
        "rollout/turns_mean": fmean(turns),
        "rollout/turns_max": float(max(turns)),
    }


def _environment_metrics(scored: Sequence[_ScoredRollout], nodes: Sequence[Node]) -> dict[str, float]:
    """Calls, and what was made of the actions; a shared node counts once but in what is said of paths."""
    on_paths = sum(_total(path, "num_tool_calls") for _, path in scored)
    counts = {
        "rollout/num_restarts": float(sum(node.restarts for node in nodes)),
        "rollout/num_undecided_answers": sum(
            leaf.metrics.get("num_undecided_answers", 0.0) for leaf, _ in scored
        ),
    }
    cut = [node.origin is Origin.ENVIRONMENT and node.metadata.get("num_tokens_cut", 0) > 0 for node in nodes]
    return {
        "rollout/num_tool_calls": _total(nodes, "num_tool_calls"),
        "rollout/tool_calls_per_leaf": on_paths / len(scored),
        "rollout/num_tool_calls_shared": on_paths - _total(nodes, "num_tool_calls"),
        "rollout/num_tool_calls_saved": _total(nodes, "num_calls_saved"),
        "rollout/num_tool_calls_refused": sum(
            leaf.metrics.get("num_refused_calls", 0.0) for leaf, _ in scored
        ),
        "rollout/num_invalid_actions": _total(nodes, "invalid"),
        "rollout/num_observations_cut": float(sum(cut)),
    } | {name: number for name, number in counts.items() if number}


_ENDPOINT_METRICS: Final[Mapping[str, str]] = {
    "num_requests": "num_requests",
    "num_refused_requests": "num_refused_requests",
    "num_ignored_fields": "num_ignored_fields",
    "num_unfit_calls": "num_unfit_calls",
    "num_failed_programs": "num_failed",
}
"""Metrics of the endpoint for agent programs, by those of an episode."""


def _endpoint_metrics(scored: Sequence[_ScoredRollout]) -> dict[str, float]:
    """Sums over rollouts; none where no program asked the policy."""
    counted = [leaf.metrics for leaf, _ in scored if leaf.metrics.keys() >= set(_ENDPOINT_METRICS.values())]
    return {
        f"endpoint/{name}": sum(float(metrics[key]) for metrics in counted)
        for name, key in _ENDPOINT_METRICS.items()
        if counted
    }


def _token_metrics(nodes: Sequence[Node]) -> dict[str, float]:
    """Of what was written, every node once."""
    policy = [node for node in nodes if node.trainable]
    return {
        "entropy/token_mean": fmean(e for node in policy for e in node.entropies) if policy else 0.0,
        "entropy/turn_mean": fmean(node.mean_entropy for node in policy if node.entropies) if policy else 0.0,
    } | {
        f"tokens/{name}": float(sum(len(node.token_ids) for node in nodes if node.origin is origin))
        for name, origin in _ORIGINS.items()
    }


_ORIGINS: Mapping[str, Origin] = {
    "policy": Origin.POLICY,
    "retrieved": Origin.BUFFER,
    "observation": Origin.ENVIRONMENT,
    "memory": Origin.MEMORY,
}


def _num_discarded(traces: Sequence[Trace]) -> int:
    """Policy tokens that are on the path of no rollout with a return: of tries that a fault broke, made good
    or not.
    """
    written = sum(len(node.token_ids) for trace in traces for node in trace.nodes if node.trainable)
    paths = {
        id(node): node
        for trace in traces
        for _, path in trace.scored_rollouts()
        for node in path
        if node.trainable
    }
    return written - sum(len(node.token_ids) for node in paths.values())


def diversity(traces: Sequence[Trace]) -> float | None:
    """Mean over groups of 1 - mean pairwise cosine of what the policy wrote (bags of words); None without
    pairs.
    """
    embedder = HashEmbedder()
    values = []
    for trace in traces:
        texts = [
            "\n".join(n.message.content for n in path if n.trainable)
            for leaf, path in trace.own_rollouts()
            if path
        ]
        if len(texts) > 1:
            vectors = embedder.embed(texts).astype(float)
            num = len(texts)
            values.append(1.0 - (float((vectors @ vectors.T).sum()) - num) / (num * (num - 1)))
    return fmean(values) if values else None


def advantage_metrics(group_advantages: Sequence[GroupAdvantages]) -> dict[str, float]:
    """How many groups taught nothing, and why."""
    reasons = Counter(group.advantages.reason for group in group_advantages)
    metrics = {
        f"group/num_without_signal_{reason}": float(reasons[reason]) for reason in get_args(NoSignalReason)
    }
    # dynamic sampling may leave none
    metrics["group/fraction_without_signal"] = 1.0 - reasons[None] / max(1, len(group_advantages))
    return metrics | measured_means(group_advantages)


def branch_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Metrics of the branching rule, for a run that branches."""
    decisions = [
        node.metadata for trace in traces for node in trace.nodes if "entropy_change" in node.metadata
    ]
    if not decisions:
        return {"branch/num_decisions": 0.0, "branch/num_forks": 0.0, "branch/num_refused": 0.0}
    num_forks = sum(decision.get("num_forks", 0) for decision in decisions)
    return {
        "branch/num_decisions": float(len(decisions)),
        "branch/num_forks": float(num_forks),
        "branch/num_replayed": float(
            sum(decision.get("num_forks", 0) for decision in decisions if decision.get("is_replayed"))
        ),
        "branch/num_refused": float(
            sum(decision.get("num_forks_wanted", 0) for decision in decisions) - num_forks
        ),
        "branch/entropy_change_mean": fmean(decision["entropy_change"] for decision in decisions),
    }


def retrieval_metrics(
    traces: Sequence[Trace], group_advantages: Sequence[GroupAdvantages], counts: Mapping[str, int]
) -> dict[str, float]:
    """RAPO's metrics (spec section 12). ``counts`` are the hook's counts of this step; values without data
    are left out.
    """
    rollouts = [
        (leaf, path, trace.modes[leaf.rollout])
        for trace in traces
        for leaf, path in trace.rollouts()
        if leaf.episode_return is not None
    ]
    retrieved = [
        (leaf, path) for leaf, path, _ in rollouts if any(node.origin is Origin.BUFFER for node in path)
    ]
    plain = [
        (leaf, path) for leaf, path, _ in rollouts if all(node.origin is not Origin.BUFFER for node in path)
    ]
    num_hybrid = sum(has_part(mode, HYBRID) for _, _, mode in rollouts)
    # a shared one was inserted once
    nodes = list({id(node): node for _, path, _ in rollouts for node in path}.values())
    inserted = [node for node in nodes if node.origin is Origin.BUFFER]
    metrics = {
        "retrieval/num_inserted": float(len(inserted)),
        "retrieval/num_no_candidate": float(counts.get("empty", 0)),
        "retrieval/num_refused": float(counts.get("refused", 0)),
        "retrieval/num_dropped": float(sum(node.metadata.get("num_splices_dropped", 0) for node in nodes)),
        "retrieval/num_cut": float(sum(node.metadata["num_tokens_cut"] > 0 for node in inserted)),
    }
    for name in ("retrieval/num_unscored", "retrieval/num_floored"):
        metrics[name] = float(sum(sum(entry.measurements.get(name, ())) for entry in group_advantages))
    if counts.get("opportunities"):
        metrics["retrieval/rate"] = counts.get("retrievals", 0) / counts["opportunities"]
    if num_hybrid:
        metrics["retrieval/share_hybrid_retrieved"] = len(retrieved) / num_hybrid
    for name, group in (("on_policy", plain), ("hybrid", retrieved)):
        if group:
            metrics[f"retrieval/reward_{name}"] = fmean(leaf.episode_return or 0.0 for leaf, _ in group)
            metrics[f"retrieval/length_{name}"] = fmean(_num_tokens(path) for _, path in group)
    for agent, number in Counter(str(node.metadata["agent"]) for node in inserted).items():
        name = f"retrieval/num_hits/{_metric_name_part(agent)}"
        metrics[name] = metrics.get(name, 0.0) + number
    return metrics


def environment_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Means of what environments and agent programs measured, over the rollouts that have the metric.

    Names are made fit for metric names; names that then are equal get a number.
    """
    values: dict[str, list[float]] = {}
    for trace in traces:
        for leaf, _ in trace.own_rollouts():
            if leaf.episode_return is not None:
                for name, value in leaf.metrics.items():
                    values.setdefault(name, []).append(value)
    means: dict[str, float] = {}
    for name in sorted(values):
        part = key = _metric_name_part(name)
        number = 1
        while f"environment/mean/{key}" in means:
            number += 1
            key = f"{part}_{number}"
        means[f"environment/mean/{key}"] = fmean(values[name])
    return means


def _metric_name_part(name: str) -> str:
    """A name that others chose, as the last part of a metric's name: without slashes, braces and what is not
    printable.
    """
    return re.sub(r"[/{}\s]|[^\x20-\x7e\u00a0-\uffff]", "_", name.strip())[:_MAX_NAME] or "unnamed"


def measured_means(group_advantages: Sequence[GroupAdvantages]) -> dict[str, float]:
    """Means over the step of what the algorithm measured; names without a value are left out, counts are
    summed elsewhere.
    """
    names = {
        name
        for group in group_advantages
        for name in group.measurements
        if not name.rpartition("/")[2].startswith("num_")
    }
    values = {
        name: [value for group in group_advantages for value in group.measurements.get(name, ())]
        for name in sorted(names)
    }
    return {name: fmean(measurements) for name, measurements in values.items() if measurements}


def _num_tokens(path: Sequence[Node]) -> int:
    return sum(len(node.token_ids) for node in path if node.origin is not Origin.PROMPT)


def _total(nodes: Sequence[Node], name: str) -> float:
    return float(sum(node.metadata.get(name, 0) for node in nodes))
