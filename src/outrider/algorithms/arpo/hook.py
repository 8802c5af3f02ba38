"""The branching rule as a hook of the loop (arXiv 2507.19849 section 3.1; arXiv 2510.14545).

The first ``window`` tokens of the turn after a tool result are the look-ahead: the rollout that wrote them
keeps them, and the forks leave in front of them. Formulas: :mod:`outrider.algorithms.arpo.formulas`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from outrider.algorithms.arpo.formulas import (
    Decision,
    Normalizer,
    Reduce,
    branches,
    first_wave_budget,
    segment_entropy,
)
from outrider.algorithms.base import Attribution
from outrider.config import Settings
from outrider.rollout.hooks import EpisodeState, Forgetful
from outrider.trace import Node, Trace


class BranchSettings(Settings):
    """Where rollouts leave another one. ``first_wave`` N begin at the prompt; ``num_children`` Z tries a fork
    point.

    ``base_probability`` p, ``entropy_weight`` w, ``threshold`` tau, ``window`` k as in the papers.
    ``source``: the entropy after the tool result, or, as released, of the turn that made the call.
    ``pre_monitor``: one rollout first, whose entropies set N (AEPO). ``attribution``: what a shared token
    gets.
    """

    first_wave: int = Field(8, ge=1)
    num_children: int = Field(1, ge=1)
    window: int = Field(20, ge=1)
    base_probability: float = Field(0.5, ge=0, le=1)
    entropy_weight: float = Field(0.2, ge=0)
    decision: Decision = "bernoulli"
    threshold: float = Field(0.5, ge=0, le=1)
    source: Literal["after_result", "previous_segment"] = "after_result"
    reduce: Reduce = "mean"
    normalizer: Normalizer = "log_vocabulary"
    attribution: Attribution = "soft"
    pre_monitor: bool = False
    branch_penalty: float = Field(0.0, ge=0, le=1)
    penalty_scope: Literal["lineage", "prompt"] = "lineage"


def first_wave_problem(section: str, first_wave: int, group_size: int) -> str:
    """The message about a first wave that is larger than its group; ``section`` holds the key."""
    return (
        f"{section}first_wave {first_wave} exceeds group_size {group_size}: set {section}first_wave to "
        f"at most {group_size}, or algorithm.group_size to at least {first_wave}"
    )


def require_countable(
    attribution: Attribution,
    aggregation: str,
    *,
    whole_rollouts: bool = False,
    positive_nll: float = 0.0,
) -> None:
    """Raises ValueError: a token that counts for one of its rollouts only would make the lengths of the
    others wrong.

    So would a ratio of whole rollouts: leaves of one token would have different ones.
    """
    if whole_rollouts:
        raise ValueError(
            "branching shares tokens between rollouts, whose ratios as a whole differ: use ratios of tokens"
        )
    if attribution == "hard" and positive_nll > 0:
        raise ValueError(
            "attribution = hard gives a shared token to one rollout, "
            "whose success positive_nll would take for all"
        )
    if attribution == "hard" and aggregation == "sequence_mean_token_mean":
        raise ValueError(
            "attribution = hard counts a shared token once, which "
            "sequence_mean_token_mean cannot; use token_mean"
        )


class BranchHook(Forgetful):
    """Decides after every tool result how many rollouts leave there."""

    def __init__(
        self, settings: BranchSettings, *, group_size: int, vocabulary_size: int, every_action: bool = False
    ) -> None:
        self.settings = settings
        self.group_size = group_size
        self.vocabulary_size = vocabulary_size
        # a simulator's moves are no tool calls, but they are what was executed
        self.every_action = every_action
        self.first_wave = 1 if settings.pre_monitor else settings.first_wave
        self.streak_scope = settings.penalty_scope

    def before_turn(self, state: EpisodeState) -> Sequence[Any]:
        """Nothing to do."""
        return ()

    def after_turn(self, state: EpisodeState) -> None:
        """Nothing to do: the decision falls in front of the environment's step."""

    def after_group(self, trace: Trace) -> None:
        """Nothing to do: the hook remembers nothing."""

    def num_forks(self, state: EpisodeState) -> int | None:
        """Tries that succeed, after a turn that followed an executed call; each try draws from the turn's own
        stream.
        """
        result = state.last_result
        if state.turn == 0 or result is None or (self.settings.pre_monitor and state.rollout == 0):
            return None
        if not (result.num_tool_calls or (self.every_action and not result.invalid)):
            return None
        s = self.settings
        # Two at least: the turn is not the rollout's first.
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
        # Begins anew at every call: asked again about a point, the hook draws the same.
        random = state.stream("branch")
        state.last_node.metadata["entropy_change"] = change
        return sum(rule(float(random.random())) for _ in range(s.num_children))

    def budget(self, trace: Trace) -> int | None:
        """N for the rest of a group, from its first rollout (AEPO's pre-monitoring). That rollout stays in
        the group.
        """
        if not self.settings.pre_monitor:
            return None
        written = [node for _, path in trace.rollouts() for node in path if node.trainable]
        if not written:
            return self.settings.first_wave  # its infrastructure broke: nothing is known
        after_tools = written[1:] or written
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
