"""Branching at uncertain steps (ARPO, arXiv 2507.19849; AEPO, arXiv 2510.14545): formulas and the hook that
decides about forks.

Entropies are in nats; ``u`` is a uniform draw in [0, 1). The first ``window`` tokens of the turn after a tool
result are the look-ahead: they stay in the rollout that sampled them, and forks begin before them.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from outrider.algorithms.advantages import has_spread
from outrider.algorithms.base import Attribution, ObjectiveSettings
from outrider.config import Settings
from outrider.rollout.hooks import EpisodeState, StatelessHook
from outrider.trace import Node, Trace

Reduce = Literal["mean", "sum"]
Normalizer = Literal["log_vocabulary", "vocabulary", "none"]
Decision = Literal["bernoulli", "threshold", "aepo_released"]


def segment_entropy(
    token_entropies: Sequence[float],
    *,
    vocabulary_size: int,
    window: int = 20,
    reduce: Reduce = "mean",
    normalizer: Normalizer = "log_vocabulary",
) -> float:
    """Return the entropy of a segment's first ``window`` tokens: mean or sum, divided by ln V, V or nothing.

    An empty segment has 0. Raises ValueError for a vocabulary of fewer than two entries.
    """
    if vocabulary_size < 2:
        raise ValueError(f"a vocabulary of {vocabulary_size} has no entropy")
    first = token_entropies[:window]
    if not first:
        return 0.0
    value = math.fsum(first) / (len(first) if reduce == "mean" else 1)
    return (
        value
        / {"log_vocabulary": math.log(vocabulary_size), "vocabulary": vocabulary_size, "none": 1}[normalizer]
    )


def branch_probability(
    *, change: float, base: float, weight: float, penalty: float = 0.0, streak: int = 0
) -> float:
    """Return ``clip((p + w dH) (1 - penalty l), 0, 1)``; ``streak`` l counts consecutive branched steps
    (AEPO), 0 in ARPO.
    """
    # The factor is bounded at 0: a negative factor would turn a negative probability positive.
    return min(1.0, max(0.0, (base + weight * change) * max(0.0, 1.0 - penalty * streak)))


def branches(
    u: float,
    *,
    change: float,
    base: float,
    weight: float,
    decision: Decision = "bernoulli",
    threshold: float = 0.5,
    penalty: float = 0.0,
    streak: int = 0,
) -> bool:
    """Decide whether to fork.

    ``bernoulli`` draws with :func:`branch_probability` (the released ARPO, ``clip(u - w dH, 0, 1) <= p``, is
    equivalent for p in (0, 1), and ignores the entropy for p = 1). ``threshold`` forks iff that probability
    exceeds ``threshold`` (ARPO section 3.1). ``aepo_released`` forks iff ``clip((u + w dH) (1 - penalty l),
    0, 1) >= p``.
    """
    if decision == "aepo_released":
        return min(1.0, max(0.0, (u + weight * change) * max(0.0, 1.0 - penalty * streak))) >= base
    if decision == "threshold":
        return (
            branch_probability(change=change, base=base, weight=weight, penalty=penalty, streak=streak)
            > threshold
        )
    if penalty == 0.0 or streak == 0:
        return min(1.0, max(0.0, u - weight * change)) <= base
    return u < branch_probability(change=change, base=base, weight=weight, penalty=penalty, streak=streak)


def first_wave_budget(*, total: int, entropy_root: float, entropy_tools: float) -> int:
    """Return the number of rollouts that begin at the prompt (AEPO):
    ``floor(k sigmoid(0.5 (H_root - H_tool))) + 1``, between 1 and k.

    The paper uses the real number k * sigmoid; the + 1 comes from the rounding of the released code.
    """
    share = 1.0 / (1.0 + math.exp(-0.5 * (entropy_root - entropy_tools)))
    return min(total, max(1, math.floor(total * share) + 1))


def entropy_advantage_factors(token_entropies: Sequence[float], *, weight: float) -> list[float]:
    """Return ``1 + a z`` per token; z is the z-score of its entropy with the unbiased std (AEPO). Without
    spread all factors are 1.
    """
    count = len(token_entropies)
    if not has_spread(np.array(token_entropies)):
        return [1.0] * count
    mean = math.fsum(token_entropies) / count
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in token_entropies) / (count - 1))
    return [1.0 + weight * (value - mean) / std for value in token_entropies]


class BranchSettings(Settings):
    """When rollouts fork. ``first_wave`` N rollouts begin at the prompt (None: half of the group);
    ``num_children`` Z draws are made at a fork point.

    ``base_probability`` p, ``entropy_weight`` w, ``threshold`` tau and ``window`` k as in the papers.
    ``source``: the entropy after the tool result or, as in the released code, of the turn with the call.
    ``pre_monitor``: sample one rollout first, whose entropies determine N (AEPO). ``attribution``: advantage
    of a shared token.
    """

    first_wave: int | None = Field(None, ge=1)
    num_children: int = Field(1, ge=1)
    window: int = Field(20, ge=1)
    base_probability: float = Field(0.5, ge=0, le=1)
    entropy_weight: float = Field(0.2, ge=0)
    decision: Decision = "bernoulli"
    """``bernoulli`` draws with the fork probability, ``threshold`` forks if it exceeds ``threshold``,
    ``aepo_released`` is the rule of the released AEPO code.
    """
    threshold: float = Field(0.5, ge=0, le=1)
    source: Literal["after_result", "previous_segment"] = "after_result"
    reduce: Reduce = "mean"
    """Mean or sum of the entropies in the window."""
    normalizer: Normalizer = "log_vocabulary"
    """The entropy is divided by the logarithm of the vocabulary size, by the size, or by nothing."""
    attribution: Attribution = "soft"
    pre_monitor: bool = False
    branch_penalty: float = Field(0.0, ge=0, le=1)
    """Reduction of the fork probability per consecutive step that forked (AEPO; 0: none)."""
    penalty_scope: Literal["lineage", "prompt"] = "lineage"
    """Consecutive forks are counted along one rollout (``lineage``) or over all rollouts of a prompt."""

    def num_first(self, group_size: int) -> int:
        """Return N for a group of this size."""
        return self.first_wave or max(1, group_size // 2)


def require_countable(objective: ObjectiveSettings, attribution: Attribution) -> None:
    """Raise ValueError for an objective that cannot count tokens shared by several rollouts."""
    correction, rejection = objective.sampler_correction, objective.sampler_rejection
    if (
        objective.loss.type == "gspo"
        or (correction is not None and correction.level != "token")
        or (rejection is not None and rejection.scope != "token")
    ):
        raise ValueError(
            "branching shares tokens between rollouts with different sequence ratios: use ratios of tokens"
        )
    if attribution == "hard" and objective.positive_nll > 0:
        raise ValueError(
            "attribution = hard trains a shared token for one rollout only, so positive_nll cannot weight it "
            "by the success of all"
        )
    if attribution == "hard" and objective.aggregation == "sequence_mean_token_mean":
        raise ValueError(
            "attribution = hard counts a shared token once, which aggregation = sequence_mean_token_mean "
            "cannot; use token_mean"
        )


class BranchHook(StatelessHook):
    """Decides after every tool result how many rollouts fork there."""

    def __init__(
        self, settings: BranchSettings, *, group_size: int, vocabulary_size: int, every_action: bool = False
    ) -> None:
        self.settings = settings
        self.group_size = group_size
        self.vocabulary_size = vocabulary_size
        # Moves of a simulator are not tool calls, but every one of them was executed.
        self.every_action = every_action
        self.first_wave = 1 if settings.pre_monitor else settings.num_first(group_size)
        self.streak_scope = settings.penalty_scope

    def num_forks(self, state: EpisodeState) -> int | None:
        """Return the number of successful draws after a turn that followed an executed call. The draws use
        the turn's own random stream.
        """
        result = state.last_result
        if state.turn == 0 or result is None or (self.settings.pre_monitor and state.rollout == 0):
            return None
        if not (result.num_tool_calls or (self.every_action and not result.invalid)):
            return None
        s = self.settings
        # At least two, because the turn is not the first of the rollout.
        written = [node for node in state.trace.path(state.last_node.node_id) if node.trainable]
        change = self._entropy(written[-1 if s.source == "after_result" else -2]) - self._entropy(written[0])
        rule = partial(
            branches,
            change=change,
            base=s.base_probability,
            weight=s.entropy_weight,
            decision=s.decision,
            threshold=s.threshold,
            penalty=s.branch_penalty,
            streak=state.branch_streak,
        )
        # A new stream at every call, so that a repeated call for the same turn draws the same numbers.
        random = state.stream("branch")
        state.last_node.metadata["entropy_change"] = change
        return sum(rule(float(random.random())) for _ in range(s.num_children))

    def budget(self, trace: Trace) -> int | None:
        """Return N for the rest of a group, from its first rollout (AEPO's pre-monitoring). That rollout
        stays in the group.
        """
        if not self.settings.pre_monitor:
            return None
        written = [node for _, path in trace.rollouts() for node in path if node.trainable]
        if not written:
            return self.settings.num_first(
                self.group_size
            )  # an infrastructure fault: no entropies to base N on
        # the released script averages over all segments, the paper over those after a tool call
        is_released = self.settings.decision == "aepo_released"
        after_tools = written if is_released else written[1:] or written
        tools = sum(self._entropy(node) for node in after_tools) / len(after_tools)
        return first_wave_budget(
            total=self.group_size, entropy_root=self._entropy(written[0]), entropy_tools=tools
        )

    def _entropy(self, node: Node) -> float:
        s = self.settings
        return segment_entropy(
            node.entropies,
            vocabulary_size=self.vocabulary_size,
            window=s.window,
            reduce=s.reduce,
            normalizer=s.normalizer,
        )
