"""EMPO² (arXiv 2602.23008): a memory of tips to explore with, and updates that make the tips unnecessary.

A quarter of the groups act with tips; two thirds of those are trained as if there had been none. Modes are
drawn in :mod:`outrider.algorithms.empo2.modes`, tips enter the loop in :mod:`outrider.algorithms.empo2.hook`,
and the off-policy update is in :mod:`outrider.algorithms.common.loss_kinds`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import model_validator

from outrider.algorithms.algorithm import Algorithm, Arrays
from outrider.algorithms.base import (
    GroupAdvantages,
    ObjectiveSettings,
    OffPolicyObjective,
    assign_advantages,
    outcome_advantages,
)
from outrider.algorithms.common.group_settings import with_preset
from outrider.algorithms.common.loss_settings import ClipLoss, LossSettings
from outrider.algorithms.context import AlgorithmContext
from outrider.algorithms.empo2.hook import MemorySettings
from outrider.algorithms.empo2.metrics import tip_metrics
from outrider.algorithms.empo2.modes import PLAIN
from outrider.algorithms.empo2.tips import Tips, TipSettings, no_tips
from outrider.memory.changes import MemoryChange
from outrider.memory.embedder import Embedder
from outrider.trace import Trace

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


class Empo2Settings(TipSettings, OffPolicyObjective):
    """:class:`~outrider.algorithms.empo2.tips.TipSettings` and a ``preset``, which fills what is not
    given.
    """

    type: Literal["empo2"] = "empo2"
    preset: Literal["empo2", "empo2-alg1", "empo2-centered", "empo2-released"] = "empo2"
    loss: LossSettings = ClipLoss(clip_high=0.3, dual_clip=10.0)

    def idle(self) -> frozenset[str]:
        """And how to train without tips that nobody sees."""
        off = {"old_context", "student_mask", "min_probability"}
        return super().idle() | (set() if self.memory_probability else off)

    @property
    def tip_memory(self) -> MemorySettings:
        """The section ``memory``."""
        return self.memory

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Tips that are wanted and can never be shown."""
        return no_tips(self, "algorithm", num_groups=num_groups, num_tasks=num_tasks)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(PRESETS, data, default="empo2")


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
        self.part = Tips(
            settings,
            advantage=settings.advantage,
            embedder=embedder,
            num_tokens=num_tokens,
            groups_per_step=groups_per_step,
            seed=seed,
        )
        self.tips, self.novelty, self.hooks = self.part.hook, self.part.novelty, self.part.hooks

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
        return self.objective.label if self.settings.acts else "grpo"

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of the step's tips."""
        return tip_metrics(traces, self.tips)

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """One mode for all rollouts of a group."""
        return (self.part.mode(step, group),) * self.settings.group_size

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Group-normalised returns, with what new states add, on every policy token."""
        measured = self.part.reward_novelty(trace)
        advantages = outcome_advantages(trace, self.objective.advantage)
        assign_advantages(trace, advantages)
        trace.without_memory = self.part.leaves_out(trace)
        return GroupAdvantages(advantages=advantages, measurements=self.part.measurements(trace, measured))

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        return self.part.state()

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        self.part.restore(state, arrays)

    def memory_changes(self) -> list[MemoryChange]:
        """Of the tips."""
        return self.tips.memory.pop_changes()
