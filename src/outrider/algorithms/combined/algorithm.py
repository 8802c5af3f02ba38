"""Retrieval (RAPO), branching (ARPO, AEPO) and tips (EMPO²) in one rollout loop and one update.

Nothing here has a formula of its own: hooks, factors and memories are those of the single methods, in an
order that docs/algorithms/combined.md gives reasons for.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.algorithms.algorithm import Algorithm, Arrays
from outrider.algorithms.arpo.algorithm import scale_by_entropy
from outrider.algorithms.arpo.hook import BranchHook
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings, assign_advantages, outcome_advantages
from outrider.algorithms.combined.settings import CombinedSettings
from outrider.algorithms.context import AlgorithmContext
from outrider.algorithms.empo2.metrics import tip_metrics
from outrider.algorithms.empo2.tips import Tips
from outrider.algorithms.rapo.credit import retrieval_advantages
from outrider.algorithms.rapo.formulas import combined_advantages_per_rollout
from outrider.algorithms.rapo.hook import RetrievalHook
from outrider.memory.changes import MemoryChange
from outrider.memory.embedder import Embedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.rollout.hooks import Hook
from outrider.rollout.modes import HYBRID, ON_POLICY, join_modes
from outrider.trace import Trace


class Combined(Algorithm):
    """Tips act first, then retrieval, then the decision to branch; credit goes from returns and novelty over
    retrievals to shared tokens and entropies.
    """

    Settings = CombinedSettings

    def __init__(
        self,
        settings: CombinedSettings,
        *,
        buffer: StepTraceBuffer | None = None,
        num_training_steps: int = 1,
        vocabulary_size: int = 2,
        every_action: bool = False,
        embedder: Embedder | None = None,
        num_tokens: Callable[[str], int] = len,
        groups_per_step: int = 1,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.tips: Tips | None = None
        if settings.tips is not None:
            if embedder is None:
                raise ValueError("tips need an embedder")
            self.tips = Tips(
                settings.tips,
                advantage=settings.advantage,
                embedder=embedder,
                num_tokens=num_tokens,
                groups_per_step=groups_per_step,
                seed=seed,
            )
        self._retrieval: tuple[RetrievalHook, ...] = ()
        if settings.retrieval is not None and settings.retrieves and buffer is not None:
            hook = RetrievalHook(settings.retrieval, buffer=buffer, num_training_steps=num_training_steps)
            self._retrieval = (hook,)
        branching: tuple[Hook, ...] = ()
        if settings.branch is not None:
            branching = (
                BranchHook(
                    settings.branch,
                    group_size=settings.group_size,
                    vocabulary_size=vocabulary_size,
                    every_action=every_action,
                ),
            )
        # A tip ends the user's message, and a retrieved step begins the assistant's: this is their order in
        # the context. Whoever leaves a rollout leaves behind both.
        tip_hooks = self.tips.hooks if self.tips is not None else ()
        self.hooks: tuple[Hook, ...] = (*tip_hooks, *self._retrieval, *branching)
        self.modes = self._modes(None)

    @classmethod
    def build(cls, settings: CombinedSettings, context: AlgorithmContext) -> "Combined":
        """For a run."""
        return cls(
            settings,
            buffer=context.buffer,
            num_training_steps=context.num_training_steps,
            vocabulary_size=context.vocabulary_size,
            every_action=context.is_stateful,
            embedder=context.load_embedder(settings.tips.memory.embedder) if settings.tips else None,
            num_tokens=context.count_tokens,
            groups_per_step=context.groups_per_step,
            seed=context.seed,
        )

    @property
    def label(self) -> str:
        """Without a method that acts it is GRPO, bit for bit."""
        pays = self.settings.tips is not None and self.settings.tips.acts
        return self.objective.label if self.hooks or pays else "grpo"

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """One mode of tips for a group, and of its rollouts the last ``num_hybrid`` may retrieve."""
        return self._modes(None if self.tips is None else self.tips.mode(step, group))

    def _modes(self, tip_mode: str | None) -> tuple[str, ...]:
        size, retrieval = self.settings.group_size, self.settings.retrieval
        if retrieval is None:
            return (tip_mode or ON_POLICY,) * size
        own = (ON_POLICY,) * (size - retrieval.num_hybrid) + (HYBRID,) * retrieval.num_hybrid
        return own if tip_mode is None else tuple(join_modes(tip_mode, mode) for mode in own)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Advantages of returns and novelty, times RAPO's factor, to shared tokens by ``attribution``, times
        AEPO's factor.
        """
        measurements: dict[str, list[float]] = {}
        if self.tips is not None:
            measurements |= self.tips.measurements(trace, self.tips.reward_novelty(trace))
            trace.without_memory = self.tips.leaves_out(trace)
        advantages, scales = outcome_advantages(trace, self.objective.advantage), None
        if self.settings.retrieval is not None:
            retrieval = retrieval_advantages(trace, self.settings.retrieval)
            advantages = combined_advantages_per_rollout(outcome=advantages, factors=retrieval.factors)
            scales = retrieval.scales
            measurements |= retrieval.measurements
        branch = self.settings.branch
        assign_advantages(trace, advantages, scales, attribution=branch.attribution if branch else None)
        if branch is not None and branch.entropy_advantage:
            scale_by_entropy(trace, weight=branch.entropy_advantage)
        return GroupAdvantages(advantages=advantages, measurements=measurements)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of the step's tips."""
        return {} if self.tips is None else tip_metrics(traces, self.tips.hook)

    @property
    def remembers(self) -> bool:
        """Where there are tips, or novelty."""
        return self.tips is not None

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        return ({}, {}) if self.tips is None else self.tips.state()

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        if self.tips is not None:
            self.tips.restore(state, arrays)

    def memory_changes(self) -> list[MemoryChange]:
        """Of the tips, where there are any."""
        return [] if self.tips is None else self.tips.hook.memory.pop_changes()

    def counts(self) -> list[dict[str, int]]:
        """Counts of the retrieval hook."""
        return [dict(hook.counts) for hook in self._retrieval]

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Back to what :meth:`counts` gave."""
        for hook, counts in zip(self._retrieval, saved, strict=True):
            hook.counts = Counter(counts)
