"""EMPO² (arXiv 2602.23008): a memory of tips to explore with, and updates that make the tips unnecessary.

A quarter of the groups act with tips; two thirds of those are trained as if there had been none. Modes are
drawn in :mod:`outrider.algorithms.empo2.modes`, tips enter the loop in :mod:`outrider.algorithms.empo2.hook`,
and the off-policy update is in :mod:`outrider.algorithms.common.loss_kinds`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from outrider.algorithms.algorithm import Algorithm, Arrays
from outrider.algorithms.base import (
    GroupCredit,
    ObjectiveSettings,
    OffPolicyObjective,
    group_advantages,
    outcome_advantages,
    write_credit,
)
from outrider.algorithms.common.group_settings import with_preset
from outrider.algorithms.common.loss_settings import ClipLoss, LossSettings
from outrider.algorithms.context import AlgorithmContext
from outrider.algorithms.empo2.hook import MemorySettings, TipHook
from outrider.algorithms.empo2.metrics import tip_metrics
from outrider.algorithms.empo2.modes import PLAIN, TIPS_OFF, ModeSchedule
from outrider.algorithms.empo2.novelty import CountNovelty, DistilledNovelty, Novelty
from outrider.memory.distillation import DistillationSettings
from outrider.memory.embedder import Embedder
from outrider.rollout.hooks import Hook
from outrider.trace import Node, Trace, played_turns

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "empo2": {},
    "empo2-alg1": {"old_context": "student"},
    "empo2-centered": {"advantage": "group_centered", "intrinsic_where_tied": False},
    "empo2-released": {
        "student_mask": "turn",
        "intrinsic_coefficient": 0.0,
        "memory": {
            "state_key": "chat",
            "max_tip_tokens": 32,
            "max_shown_tokens": 1024,
            "max_prompt_tokens": 4096,
        },
    },
}


class Empo2Settings(OffPolicyObjective):
    """``memory_probability`` p of the groups act with tips; ``off_policy_probability`` q of those are trained
    without them.

    ``intrinsic_coefficient`` c: a state visited n times adds c / n to the return before the advantage (0:
    off); a state is new when its cosine with all of its task's is below ``novelty_threshold``. ``novelty`` =
    ``rnd`` adds c times the scaled error of a predictor that has learned the states of all tasks, by the
    section ``rnd`` (random network distillation: appendix F).
    ``intrinsic_where_tied``: also where the returns of a group tie, so that novelty alone makes the advantage
    (the paper); False leaves such a group without a signal, and its states counted. A ``preset`` fills what
    is not given.
    """

    type: Literal["empo2"] = "empo2"
    preset: Literal["empo2", "empo2-alg1", "empo2-centered", "empo2-released"] = "empo2"
    loss: LossSettings = ClipLoss(clip_high=0.3, dual_clip=10.0)
    memory_probability: float = Field(0.25, ge=0, le=1)
    off_policy_probability: float = Field(2 / 3, ge=0, le=1)
    intrinsic_coefficient: float = Field(0.01, ge=0)
    intrinsic_where_tied: bool = True
    novelty: Literal["count", "rnd"] = "count"
    novelty_threshold: float = Field(0.9, ge=-1, le=1)
    rnd: DistillationSettings = DistillationSettings()
    memory: MemorySettings = MemorySettings()

    def idle(self) -> frozenset[str]:
        """How to count states that add nothing to a return, and what tips need that nobody sees."""
        states = {"rnd"} if self.novelty == "count" else {"novelty_threshold"}
        if not self.intrinsic_coefficient:
            states = {"intrinsic_where_tied", "novelty", "novelty_threshold", "rnd"}
        shown = {"off_policy_probability", "memory", "old_context", "student_mask", "min_probability"}
        return super().idle() | states | (set() if self.memory_probability else shown)

    @property
    def tip_memory(self) -> MemorySettings:
        """The section ``memory``."""
        return self.memory

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Tips that are wanted and can never be shown."""
        if not never_shows_a_tip(self, num_groups=num_groups, num_tasks=num_tasks):
            return []
        return [
            f"NO TIPS: {num_groups} groups play none of the {num_tasks} tasks twice, "
            "and a task is shown its own tips only; algorithm.memory.scope=all shares them"
        ]

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(PRESETS, given, default="empo2")


class Empo2(Algorithm):
    """GRPO's credit on returns with an intrinsic part; tips by mode. With p = 0 and c = 0 it is GRPO, bit for
    bit.
    """

    Settings = Empo2Settings

    def __init__(
        self,
        settings: Empo2Settings,
        *,
        embedder: Embedder,
        num_tokens: Callable[[str], int],
        groups_per_step: int,
        seed: int,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.modes: tuple[str, ...] = (PLAIN,) * settings.group_size
        self.tips = TipHook(settings.memory, embedder=embedder, num_tokens=num_tokens, seed=seed)
        self.hooks: tuple[Hook, ...] = (self.tips,) if settings.memory_probability else ()
        self.novelty: Novelty = (
            CountNovelty(threshold=settings.novelty_threshold)
            if settings.novelty == "count"
            else DistilledNovelty(embedder.dim, settings.rnd, seed=seed)
        )
        self._embedder = embedder
        self._groups_per_step = groups_per_step
        self._schedule = ModeSchedule(
            memory_probability=settings.memory_probability,
            off_policy_probability=settings.off_policy_probability,
            seed=seed,
        )

    @classmethod
    def build(cls, settings: Empo2Settings, context: AlgorithmContext) -> "Empo2":
        """For a run."""
        return cls(
            settings,
            embedder=context.load_embedder(settings.memory.embedder),
            num_tokens=context.count_tokens,
            groups_per_step=context.groups_per_step,
            seed=context.seed,
        )

    @property
    def label(self) -> str:
        """Without tips and novelty it is GRPO, bit for bit."""
        return self.objective.label if self.hooks or self.settings.intrinsic_coefficient > 0 else "grpo"

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of the step's tips."""
        return tip_metrics(traces, self.tips)

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """One mode for all rollouts of a group."""
        return (self._schedule.mode(step * self._groups_per_step + group),) * self.settings.group_size

    def credit(self, trace: Trace) -> GroupCredit:
        """Group-normalised returns, with what new states add, on every policy token."""
        measured = self._reward_novelty(trace) if self.settings.intrinsic_coefficient else []
        advantages = outcome_advantages(trace, self.objective.advantage)
        write_credit(trace, advantages)
        trace.without_memory = trace.modes[0] == TIPS_OFF
        intrinsic = [leaf.intrinsic for leaf, _ in trace.scored_rollouts()]
        return GroupCredit(
            advantages=advantages,
            measurements={"tips/intrinsic_mean": intrinsic, self.novelty.metric: measured},
        )

    def _reward_novelty(self, trace: Trace) -> list[float]:
        """What is measured of all states of the group, seen together: rollouts that see the same get the
        same.

        Visits are counted by task, whatever the tips' scope is: the reward is for what is new in this task.
        """
        kept = [(leaf, states_of(path)) for leaf, path in trace.scored_rollouts()]
        texts = [text for _, states in kept for text in states]
        if not texts:
            return []
        returns = [leaf.episode_return for leaf, _ in trace.scored_rollouts()]
        is_paid = (
            self.settings.intrinsic_where_tied
            or group_advantages(returns, self.objective.advantage).has_signal
        )
        # Counted even where nothing is paid: what was seen is not new the next time.
        bonuses, measured = self.novelty.see(trace.task.key, list(self._embedder.embed(texts)))
        rest = iter(bonuses)
        for leaf, states in kept:
            mine = [next(rest) for _ in states]
            leaf.intrinsic = (
                intrinsic_return(mine, coefficient=self.settings.intrinsic_coefficient) if is_paid else 0.0
            )
        return measured

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        tips, tip_arrays = self.tips.memory.snapshot()
        novelty, novelty_arrays = self.novelty.snapshot()
        return {"tips": tips, "novelty": novelty}, {**tip_arrays, **novelty_arrays}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        self.tips.memory.restore(state["tips"], arrays)
        self.novelty.restore(state["novelty"], arrays)


def never_shows_a_tip(settings: Empo2Settings, *, num_groups: int, num_tasks: int) -> bool:
    """Whether a run of ``num_groups`` groups on ``num_tasks`` training tasks, from an empty memory, wants
    tips and can show none.

    An epoch plays every task once at most, and a buffer per task holds what earlier groups of that task
    wrote.
    """
    return settings.memory_probability > 0 and settings.memory.scope == "task" and 0 < num_groups <= num_tasks


def states_of(path: Sequence[Node]) -> list[str]:
    """The states of an episode: what each turn acted on, one per turn (section 4.2: the reward of a step is
    that of its state).

    What is said after the last turn is no state: nothing acts on it, it is in the path only where the loop
    cut the episode, and counted there it would pay an episode for being cut.
    """
    return [turn.observation for turn in played_turns(path)]


def intrinsic_return(bonuses: Sequence[float], *, coefficient: float) -> float:
    """``c`` times the sum of what the states of an episode are worth."""
    return coefficient * sum(bonuses)
