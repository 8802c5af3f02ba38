"""The metrics of a training step, from its rollouts, advantages, update and clock; alarms and advice."""

import re
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final, Literal, get_args

from outrider.algorithms.advantages import NoSignalReason
from outrider.algorithms.base import GroupAdvantages
from outrider.algorithms.distill_help import NO_ROOM, help_metrics
from outrider.errors import EngineFault
from outrider.memory.embedders import HashEmbedder
from outrider.printing import plural
from outrider.rollout.evaluate import Evaluation
from outrider.rollout.faults import CUT, failure_reasons, fault_line, reasons_line
from outrider.rollout.hooks import HYBRID, has_part
from outrider.rollout.settings import Limits
from outrider.trace import Node, Trace
from outrider.training.components import Components
from outrider.training.data import SampledStep
from outrider.training.settings import RunSettings
from outrider.types import Origin, Outcome

if TYPE_CHECKING:
    from outrider.distributed.remote import RemoteProcesses

_MOST_TRUNCATED: Final = 0.05
_LEAST_EFFECTIVE: Final = 0.5


def staleness_metrics(traces: Sequence[Trace], *, version: int, limit: int) -> dict[str, float]:
    """Age of the step's policy tokens; ``version`` is that of the weights at the start of the update. Raises
    EngineFault for a token that is more than ``limit`` versions older, or newer.
    """
    ages = [
        (version - node.weight_version, len(node.token_ids))
        for trace in traces
        for node in trace.nodes
        if node.trainable and node.weight_version is not None
    ]
    for age, _ in ages:
        if not 0 <= age <= limit:
            raise EngineFault(
                f"a token of weights {version - age} came to an update of weights {version}, "
                f"which takes none older than {limit} versions (cluster.max_staleness)"
            )
    num = sum(size for _, size in ages)
    if not num:
        return {}
    return {
        "staleness/mean": sum(age * size for age, size in ages) / num,
        "staleness/max": float(max(age for age, _ in ages)),
    }


def staleness_alarms(step: int, values: Mapping[str, float]) -> list[str]:
    """Alarms if the policy has moved too far since the rollouts for the sampler correction."""
    if not values.get("staleness/max"):
        return []
    truncated = values.get("staleness/truncated_fraction", 0.0)
    effective = values.get("ratio/importance_ess_share", 1.0)
    lines = []
    if truncated > _MOST_TRUNCATED:
        lines.append(
            f"ALARM: {truncated:.0%} of the correction weights of step {step} were cut at their bound: the "
            "policy moves too fast for rollouts that are a step old; lower the learning rate or max_staleness"
        )
    if effective < _LEAST_EFFECTIVE:
        lines.append(
            f"ALARM: the tokens of step {step}, some of them older, count as {effective:.0%} of their number "
            "(ratio/importance_ess_share); lower the learning rate or max_staleness"
        )
    return lines


# Durations of the phases of a training step.


class StepClock:
    """Call :meth:`mark` at the end of each phase of a step. Without ``remote`` there are no processes that
    could be idle.
    """

    def __init__(self, remote: "RemoteProcesses | None") -> None:
        self._remote = remote
        self._busy_s = 0.0 if remote is None else remote.busy_s()
        self._times = {"start": time.perf_counter()}

    def mark(self, event: Literal["rollouts", "update_start", "update_end", "wait_end"]) -> None:
        """The rollouts are finished, the update begins or has ended, or the wait for rollouts of the next
        step has ended.
        """
        self._times[event] = time.perf_counter()

    def metrics(
        self, *, prefetch_s: float | None, num_policy_tokens: float, num_computed_tokens: int
    ) -> dict[str, float]:
        """Seconds, idle shares of processes, tokens per second, and peak memory; called after the engines
        have the new weights. ``prefetch_s`` is the duration of the rollouts if they were generated during an
        update.
        """
        times, now = self._times, time.perf_counter()
        rollout_s = times["rollouts"] - times["start"] if prefetch_s is None else prefetch_s
        step_s = now - times["start"]
        update_s = now - times["rollouts"] - (times["wait_end"] - times["update_end"])
        values = {
            "time/rollout": rollout_s,
            "time/update": update_s,
            "time/step": step_s,
            "speed/rollout_tokens": num_policy_tokens / rollout_s,
            "speed/update_tokens": num_computed_tokens / update_s,
            "memory/peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if self._remote is None:
            return values
        busy = {
            "time/idle_trainers": (times["update_end"] - times["update_start"]) / step_s,
            "time/idle_engines": (self._remote.busy_s() - self._busy_s) / step_s,
        }
        return values | {name: min(1.0, max(0.0, 1.0 - share)) for name, share in busy.items()}


# Alarms: lines about problems that must not go unnoticed.


def step_alarms(
    settings: RunSettings, *, step: int, values: Mapping[str, float], fault_reasons: Sequence[str]
) -> list[str]:
    """Alarms of a training step with the metrics ``values``; ``fault_reasons`` are all its faults, also
    of tries that were repeated.
    """
    lines = []
    num, num_masked = values.get("rollout/num", 0.0), values.get("rollout/num_masked", 0.0)
    if num and num_masked == num:
        lines.append(
            f"ALARM: every rollout of step {step} was lost to a fault; "
            f"nothing was learned: {fault_line(fault_reasons)}"
        )
    elif fault_reasons:
        num_retries = values.get("rollout/num_retries", 0.0)
        lost = (
            f"{num_masked:.0f} of {plural(num, 'rollout was', 'rollouts were')} lost to faults, "
            f"{plural(num_retries, 'try was', 'tries were')} repeated"
        )
        if not num_masked and not num_retries:  # closed or copied environments, reflections, experts
            lost = f"{plural(len(fault_reasons), 'fault')} that ended no rollout"
        lines.append(f"step {step}: {lost}: {fault_line(fault_reasons)}")
    if settings.environment.calls_tools and values.get("rollout/num_tool_calls") == 0.0:
        lines.append(f"ALARM: no rollout of step {step} executed a tool call; look at the sample rollouts")
    if missing := values.get("group/num_missing"):
        lines.append(
            f"step {step}: {missing:.0f} of "
            f"{plural(settings.train.tasks_per_step, 'group is', 'groups are')} missing after "
            f"{plural(values['group/num_extra_batches'], 'extra batch', 'extra batches')} without spread; "
            "trained on the others"
        )
    return lines + staleness_alarms(step, values) + skipped_alarms(step, values)


def skipped_alarms(step: int, values: Mapping[str, float]) -> list[str]:
    """Alarm about skipped optimizer steps, also of a cold start."""
    if not (skipped := values.get("grad/num_skipped")):
        return []
    num = plural(skipped, "optimiser step")
    return [f"ALARM: {num} of step {step} skipped: a log-prob or gradient was not finite"]


# Advice when a step teaches nothing or retrieves nothing: the reason, from what its rollouts counted.


_EVERY: Final = 10
"""Steps after which the same advice is repeated."""
_COLD_START: Final = "a cold start (cold_start.num_examples, cold_start.demonstrations)"


@dataclass(slots=True, kw_only=True)
class Advice:
    """Alarms of a run about steps without a learning signal and without retrieval. The same kind is repeated
    only every few steps.
    """

    settings: RunSettings
    context_length: int
    stop: Sequence[str]  # strings that end a turn
    _last: dict[str, int] = field(default_factory=dict)

    def lines(self, traces: Sequence[Trace], *, step: int, values: Mapping[str, float]) -> list[str]:
        """Advice after a training step with the metrics ``values``."""
        if values.get("rollout/num_masked") == values.get("rollout/num"):
            return []  # faults have an alarm of their own
        limits = self.settings.limits.at_step(step - 1)
        texts = {
            "signal": self._without_signal(traces, values, limits),
            "retrieval": self._without_retrieval(traces, values, limits),
            "help": self._without_help(traces, values),
        }
        lines = []
        for kind, text in texts.items():
            if not text:
                self._last.pop(kind, None)
            elif step - self._last.get(kind, -_EVERY) >= _EVERY:
                self._last[kind] = step
                lines.append(f"ALARM: step {step}: {text}")
        return lines

    def _without_signal(self, traces: Sequence[Trace], values: Mapping[str, float], limits: Limits) -> str:
        learns_otherwise = values.get("distill/num_tokens", 0) > 0 or self.settings.algorithm.observation_nll
        if values.get("group/fraction_without_signal") != 1.0 or learns_otherwise:
            return ""
        rollouts = [(leaf, path) for trace in traces for leaf, path in trace.scored_rollouts()]
        num = len(rollouts)
        begin = "no group has a learning signal: "
        if not num or len(traces[0].modes) == 1:
            return f"{begin}a group of one rollout has nothing to compare with; raise algorithm.group_size"
        if all(leaf.success for leaf, _ in rollouts):
            return (
                f"{begin}{'the rollout' if num == 1 else f'all {num} rollouts'} solved the "
                "tasks; train on harder tasks"
            )
        reasons = failure_reasons(traces, limits, context_length=self.context_length)
        summary = f"{begin}of {plural(num, 'rollout')} {reasons_line(reasons)}"
        num_unclosed = self._num_unclosed(traces)
        if num_unclosed > num / 2:
            return (
                f"{begin}{num_unclosed} of {plural(num, 'rollout')} ended without a closing tag; "
                f"{_COLD_START} "
                "teaches the format" + (f" ({reasons_line(reasons)})" if reasons else "")
            )
        num_invalid = sum(leaf.outcome is Outcome.INVALID for leaf, _ in rollouts)
        if num_invalid > num / 2:
            return f"{summary}; {_COLD_START} teaches the format"
        if sum(count for reason, count in reasons.items() if reason.startswith(CUT)) > num / 2:
            return f"{summary}; raise the limit, or teach shorter answers by a cold start"
        return (
            f"{summary} and all rollouts of a group have the same return; train on easier tasks, begin with "
            f"{_COLD_START}, or raise algorithm.group_size"
        )

    def _num_unclosed(self, traces: Sequence[Trace]) -> int:
        """Rollouts whose last turn has none of the tags that end a turn."""
        tags = tuple(tag for tag in self.stop if tag.startswith("</"))
        if not tags:
            return 0
        last = [
            next((node for node in reversed(path) if node.trainable), None)
            for trace in traces
            for _, path in trace.scored_rollouts()
        ]
        return sum(node is not None and not any(tag in node.message.content for tag in tags) for node in last)

    def _without_retrieval(self, traces: Sequence[Trace], values: Mapping[str, float], limits: Limits) -> str:
        if values.get("retrieval/num_inserted") != 0.0:
            return ""
        hybrid = [
            (leaf, path)
            for trace in traces
            for leaf, path in trace.scored_rollouts()
            if has_part(trace.modes[leaf.rollout], HYBRID)
        ]
        if not hybrid:
            return ""
        begin = f"none of {plural(len(hybrid), 'hybrid rollout')} got a retrieved step: "
        num_short = sum(sum(node.trainable for node in path) <= 1 for _, path in hybrid)
        if "retrieval/rate" not in values:
            reasons = failure_reasons(traces, limits, context_length=self.context_length)
            why = f" ({reasons_line(reasons)})" if reasons else ""
            return (
                f"{begin}steps are retrieved from the second turn on, and {num_short} of them ended in their "
                f"first turn{why}; a cold start teaches the format, or the limits are too small"
            )
        if values.get("retrieval/num_refused"):
            return (
                f"{begin}the environment refused "
                f"{plural(values['retrieval/num_refused'], 'retrieved action')}"
            )
        if values.get("retrieval/num_dropped"):
            return (
                f"{begin}{plural(values['retrieval/num_dropped'], 'step')} found no room: raise "
                f"rollout.max_response_tokens (now {self.settings.rollout.max_response_tokens}), lower "
                "rollout.max_turn_tokens, or, for retrieved turns, raise rollout.max_splice_tokens (now "
                f"{self.settings.rollout.max_splice_tokens})"
            )
        if values.get("retrieval/num_no_candidate"):
            return begin + self._describe_missing_steps(values)
        retrieval = getattr(getattr(self.settings.algorithm, "parts", None), "retrieval", None)
        if retrieval is not None and retrieval.final_probability is not None:
            return ""  # the probability fades, as planned
        return f"{begin}no turn drew a retrieval; raise the retrieval's probability"

    def _without_help(self, traces: Sequence[Trace], values: Mapping[str, float]) -> str:
        """Why the teacher of self-distillation has no help, if most rollouts have none for one reason."""
        settings, prefix = self.settings.algorithm.distill, "distill/num_without_help_"
        share = values.get("distill/share_rollouts")
        if settings is None or share is None:
            return ""
        counts = {name.removeprefix(prefix): num for name, num in values.items() if name.startswith(prefix)}
        num, most = max(((num, reason) for reason, num in counts.items()), default=(0.0, ""))
        begin = f"{plural(num, 'rollout has', 'rollouts have')} no help for their teacher: "
        if most == NO_ROOM and num > sum(counts.values()) / 2 and num > values.get("rollout/num", 0.0) / 2:
            return (
                f"{begin}it is longer than algorithm.distill.max_help_tokens = {settings.max_help_tokens}, "
                f"or than the room that the context of {self.context_length} tokens leaves"
            )
        if share or not num:
            return ""
        if most == "no_sibling":
            returns = [leaf.episode_return or 0.0 for trace in traces for leaf, _ in trace.scored_rollouts()]
            return (
                f"{begin}no sibling reached algorithm.distill.threshold = {settings.threshold:g}; the "
                f"highest return of the step is {max(returns):g}"
            )
        return f"{begin}{most.replace('_', ' ')} (algorithm.distill.help = {', '.join(settings.help)})"

    def _describe_missing_steps(self, values: Mapping[str, float]) -> str:
        """The filters that left no step of the buffer for a retrieval."""
        retrieval = getattr(getattr(self.settings.algorithm, "parts", None), "retrieval", None)
        size = f" ({plural(values['buffer/num_steps'], 'step')})" if "buffer/num_steps" in values else ""
        text = f"the buffer{size} has no step for {plural(values['retrieval/num_no_candidate'], 'retrieval')}"
        if retrieval is None:
            return text
        scope = f"algorithm.retrieval.scope = {retrieval.scope}"
        if retrieval.min_similarity is not None:
            return (
                f"{text}: none within {scope} reaches algorithm.retrieval.min_similarity = "
                f"{retrieval.min_similarity:g}"
            )
        return f"{text}: none within {scope} that the rollout had not seen (outrider buffer stats FILE)"


# Declared metrics of one step's rollouts (meanings: docs/metrics.md).


_MAX_NAME: Final = 80
_ENDPOINT_METRICS: Final[Mapping[str, str]] = {
    "num_requests": "num_requests",
    "num_refused_requests": "num_refused_requests",
    "num_ignored_fields": "num_ignored_fields",
    "num_unfit_calls": "num_unfit_calls",
    "num_failed_programs": "num_failed",
}
"""Metrics of the endpoint for agent programs, by those of an episode."""
_ORIGINS: Final[Mapping[str, Origin]] = {
    "policy": Origin.POLICY,
    "retrieved": Origin.BUFFER,
    "observation": Origin.ENVIRONMENT,
    "memory": Origin.MEMORY,
}


def rollout_metrics(traces: Sequence[Trace]) -> dict[str, float]:
    """Rewards, outcomes, lengths, turns, tools and tokens of a step's own rollouts; means exclude faults."""
    every = [rollout for trace in traces for rollout in trace.own_rollouts()]
    scored = [(leaf, path) for leaf, path in every if leaf.episode_return is not None]
    outcomes = Counter(leaf.outcome for leaf, _ in every)
    metrics = {f"rollout/num_{outcome.value}": float(outcomes[outcome]) for outcome in Outcome}
    metrics |= {
        "rollout/num": float(len(every)),
        "rollout/num_masked": float(len(every) - len(scored)),
        "group/num": float(len(traces)),
        "tokens/discarded": float(_num_discarded(traces)),
    }
    if not scored:
        return metrics
    nodes = _unique_nodes(path for _, path in scored)
    policy = [node for node in nodes if node.trainable and node.entropies]
    returns = [leaf.episode_return for leaf, _ in scored if leaf.episode_return is not None]
    # Per rollout: a node that several share counts in each.
    lengths = [_num_tokens(path) for _, path in scored]
    turns = [sum(node.trainable for node in path) for _, path in scored]
    policy_lengths = [sum(len(node.token_ids) for node in path if node.trainable) for _, path in scored]
    calls_on_paths = sum(_total(path, "num_tool_calls") for _, path in scored)
    executed = _num_executed_calls([path for _, path in scored])
    truncated = outcomes[Outcome.TRUNCATED_TOKENS] + outcomes[Outcome.TRUNCATED_TURNS]
    metrics |= {
        "reward/mean": fmean(returns),
        "reward/std": pstdev(returns),
        "reward/min": min(returns),
        "reward/max": max(returns),
        "reward/success_rate": fmean(float(leaf.success) for leaf, _ in scored),
        "rollout/length_tokens_mean": fmean(lengths),
        "rollout/length_tokens_max": float(max(lengths)),
        "rollout/policy_tokens_mean": fmean(policy_lengths),
        "rollout/turns_mean": fmean(turns),
        "rollout/turns_max": float(max(turns)),
        "rollout/num_tool_calls": executed,
        "rollout/tool_calls_per_leaf": calls_on_paths / len(scored),
        "rollout/num_tool_calls_shared": calls_on_paths - executed,
        "rollout/num_tool_calls_saved": _total(nodes, "num_calls_saved"),
        "rollout/num_tool_calls_refused": sum(
            leaf.metrics.get("num_refused_calls", 0.0) for leaf, _ in scored
        ),
        "rollout/num_invalid_actions": _total(nodes, "invalid"),
        "rollout/num_observations_cut": float(
            sum(
                node.origin is Origin.ENVIRONMENT and node.metadata.get("num_tokens_cut", 0) > 0
                for node in nodes
            )
        ),
    }
    rare_counts = {
        "rollout/num_restarts": float(sum(node.restarts for node in nodes)),
        "rollout/num_undecided_answers": sum(
            leaf.metrics.get("num_undecided_answers", 0.0) for leaf, _ in scored
        ),
    }
    metrics |= {name: number for name, number in rare_counts.items() if number}
    # Of the endpoint for agent programs; none if no program requested the policy.
    counted = [leaf.metrics for leaf, _ in scored if leaf.metrics.keys() >= set(_ENDPOINT_METRICS.values())]
    if counted:
        metrics |= {
            f"endpoint/{name}": sum(float(measured[key]) for measured in counted)
            for name, key in _ENDPOINT_METRICS.items()
        }
    metrics |= {
        "rollout/truncated_fraction": truncated / len(every),
        "entropy/token_mean": fmean(e for node in policy for e in node.entropies) if policy else 0.0,
        "entropy/turn_mean": fmean(node.mean_entropy for node in policy) if policy else 0.0,
    }
    for name, origin in _ORIGINS.items():
        metrics[f"tokens/{name}"] = float(sum(len(node.token_ids) for node in nodes if node.origin is origin))
    return metrics


def _num_executed_calls(paths: Sequence[Sequence[Node]]) -> float:
    """Tool calls that these rollouts executed. A node that several share was executed once, but a prefix by
    each of them, and a fork by replay executes the calls before it again.
    """
    uses: Counter[int] = Counter(id(node) for path in paths for node in path)
    children: dict[int, set[int]] = {}
    for path in paths:
        for node, following in pairwise(path):
            children.setdefault(id(node), set()).add(id(following))
    executed = 0.0
    seen: set[int] = set()
    for path in paths:
        before = 0.0
        for parent, node in zip([None, *path], path, strict=False):
            calls = float(node.metadata.get("num_tool_calls", 0))
            if id(node) not in seen:
                seen.add(id(node))
                executed += calls * (uses[id(node)] if node.metadata.get("is_prefix") else 1)
                if node.metadata.get("is_replayed") and parent is not None:
                    num_ended = len(children[id(parent)]) - 1  # forks without a fault
                    executed += before * min(num_ended, node.metadata.get("num_forks", 0))
            before += calls
    return executed


def _num_discarded(traces: Sequence[Trace]) -> int:
    """Policy tokens that are in no rollout with a return, because a fault ended their try."""
    written = sum(len(node.token_ids) for trace in traces for node in trace.nodes if node.trainable)
    scored = _unique_nodes(path for trace in traces for _, path in trace.scored_rollouts())
    return written - sum(len(node.token_ids) for node in scored if node.trainable)


def _unique_nodes(paths: Iterable[Sequence[Node]]) -> list[Node]:
    """The nodes of these paths; one that several rollouts share was written once."""
    return list({id(node): node for path in paths for node in path}.values())


def diversity(traces: Sequence[Trace]) -> float | None:
    """Mean over groups of 1 - mean pairwise cosine of the policy's texts (bags of words); None without
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
    """Groups without a learning signal by reason, and means of the algorithm's measurements."""
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
    rollouts = [rollout for trace in traces for rollout in trace.scored_rollouts()]
    retrieved, plain = (
        [(leaf, path) for leaf, path in rollouts if any(node.origin is Origin.BUFFER for node in path) is has]
        for has in (True, False)
    )
    num_hybrid = sum(
        has_part(trace.modes[leaf.rollout], HYBRID) for trace in traces for leaf, _ in trace.scored_rollouts()
    )
    nodes = _unique_nodes(path for _, path in rollouts)
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
    """Means of the metrics of environments and agent programs, over the rollouts that have the metric.

    Invalid characters in names are replaced; names that become equal get a number.
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
    """Make a name the last part of a metric's name, without slashes, braces and unprintable characters."""
    return re.sub(r"[/{}\s]|[^\x20-\x7e\u00a0-\uffff]", "_", name.strip())[:_MAX_NAME] or "unnamed"


def measured_means(group_advantages: Sequence[GroupAdvantages]) -> dict[str, float]:
    """Means of the algorithm's measurements over the step, without names that have no value, and without
    counts, which other functions sum.
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
    return sum(node.num_response_tokens for node in path)


def _total(nodes: Sequence[Node], name: str) -> float:
    return float(sum(node.metadata.get(name, 0) for node in nodes))


def evaluation_metrics(evaluation: Evaluation, panel: str = "") -> dict[str, float]:
    """The metrics of an evaluation. ``panel`` names an evaluation set other than the main one."""
    values = {
        "eval/score": evaluation.score,
        "eval/ci_low": evaluation.ci_low,
        "eval/ci_high": evaluation.ci_high,
        "eval/mean_return": evaluation.mean_return,
        "eval/num_tasks": float(evaluation.num_tasks),
        "eval/num_faults": float(evaluation.num_faults),
    }
    return {f"{name}/{panel}": value for name, value in values.items()} if panel else values


def evaluation_fields(evaluation: Evaluation) -> dict[str, float | str]:
    """The fields of an evaluation in a log for programs."""
    names = ("label", "step", "score", "ci_low", "ci_high", "mean_return", "num_tasks", "num_faults")
    return {name: getattr(evaluation, name) for name in names}


# The record of a training step.


def step_record(
    parts: Components,
    report: SampledStep,
    group_advantages: Sequence[GroupAdvantages],
    *,
    mix_metrics: Mapping[str, float],
    update_metrics: Mapping[str, float],
    counts_before: Sequence[Mapping[str, int]],
) -> dict[str, float]:
    """All metrics of a step except those of the clock. ``mix_metrics`` are those of added off-policy groups.

    The algorithm's counts are totals of the whole training; a step's own are the difference to
    ``counts_before``.
    """
    algorithm, traces = parts.algorithm, report.traces
    values = rollout_metrics(traces) | advantage_metrics(group_advantages) | algorithm.measure(traces)
    if parts.settings.algorithm.distill is not None:
        values |= help_metrics(traces)
    if any(hook.first_wave is not None for hook in algorithm.hooks):
        values |= branch_metrics(traces)
    if parts.settings.environment.reports_metrics:
        values |= environment_metrics(traces)
    values |= {**mix_metrics, **update_metrics}
    if now := algorithm.counts():
        counts = {name: number - counts_before[0].get(name, 0) for name, number in now[0].items()}
        values |= retrieval_metrics(traces, group_advantages, counts)
    values["rollout/num_retries"] = float(report.faults["retries"])
    values["rollout/num_close_faults"] = float(report.faults["close"])
    for kind in ("copy", "reflection", "expert"):
        if num := report.faults[kind]:
            values[f"rollout/num_{kind}_faults"] = float(num)
    if report.is_filtered:
        values |= report.metrics(parts.settings.train.tasks_per_step)
    if report.loop_lag_s is not None:
        values["time/loop_lag"] = report.loop_lag_s
    if (diversity_value := diversity(traces)) is not None:
        values["rollout/diversity"] = diversity_value
    return values
