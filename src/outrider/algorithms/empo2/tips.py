"""The tips of a run as a part of an algorithm: which groups see them, what new states are worth, and what is
remembered (EMPO², arXiv 2602.23008).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.algorithms.algorithm import Arrays
from outrider.algorithms.base import AdvantageKind, group_advantages
from outrider.algorithms.empo2.hook import MemorySettings, TipHook
from outrider.algorithms.empo2.modes import TIPS_OFF, ModeSchedule, TipMode, tip_mode
from outrider.algorithms.empo2.novelty import CountNovelty, DistilledNovelty, Novelty
from outrider.config import Settings
from outrider.memory.distillation import DistillationSettings
from outrider.memory.embedder import Embedder
from outrider.rollout.hooks import Hook
from outrider.trace import Node, Trace, policy_turns


class TipSettings(Settings):
    """``memory_probability`` p of the groups act with tips; ``off_policy_probability`` q of those are trained
    without them.

    ``intrinsic_coefficient`` c: a state visited n times adds c / n to the return before the advantage (0:
    off); a state is new when its cosine with all of its task's is below ``novelty_threshold``. ``novelty`` =
    ``rnd`` adds c times the scaled error of a predictor that has learned the states of all tasks, by the
    section ``rnd`` (random network distillation: appendix F).
    ``intrinsic_where_tied``: also where the returns of a group tie, so that novelty alone makes the advantage
    (the paper); False leaves such a group without a signal, and its states counted.
    """

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
        shown = set() if self.memory_probability else {"off_policy_probability", "memory"}
        return super().idle() | states | shown

    @property
    def acts(self) -> bool:
        """Whether any group sees tips, or is paid for what is new."""
        return self.memory_probability > 0 or self.intrinsic_coefficient > 0


class Tips:
    """Hook, schedule of the modes and novelty of one run."""

    def __init__(
        self,
        settings: TipSettings,
        *,
        advantage: AdvantageKind,
        embedder: Embedder,
        num_tokens: Callable[[str], int],
        groups_per_step: int,
        seed: int,
    ) -> None:
        self.settings = settings
        self.hook = TipHook(settings.memory, embedder=embedder, num_tokens=num_tokens, seed=seed)
        self.hooks: tuple[Hook, ...] = (self.hook,) if settings.memory_probability else ()
        self.novelty: Novelty = (
            CountNovelty(threshold=settings.novelty_threshold)
            if settings.novelty == "count"
            else DistilledNovelty(embedder.dim, settings.rnd, seed=seed)
        )
        self._advantage = advantage
        self._embedder = embedder
        self._groups_per_step = groups_per_step
        self._schedule = ModeSchedule(
            memory_probability=settings.memory_probability,
            off_policy_probability=settings.off_policy_probability,
            seed=seed,
        )

    def mode(self, step: int, group: int) -> TipMode:
        """The mode of all rollouts of a group."""
        return self._schedule.mode(step * self._groups_per_step + group)

    def leaves_out(self, trace: Trace) -> bool:
        """Whether the update renders the group without its tips."""
        return tip_mode(trace.modes[0]) == TIPS_OFF

    def measurements(self, trace: Trace, measured: Sequence[float]) -> dict[str, list[float]]:
        """What was paid for novelty, and what :meth:`reward_novelty` measured."""
        paid = [leaf.intrinsic for leaf, _ in trace.scored_rollouts()]
        return {"tips/intrinsic_mean": paid, self.novelty.metric: list(measured)}

    def reward_novelty(self, trace: Trace) -> list[float]:
        """What is measured of all states of the group, seen together: rollouts that see the same get the
        same.

        Visits are counted by task, whatever the tips' scope is: the reward is for what is new in this task.
        """
        if not self.settings.intrinsic_coefficient:
            return []
        rollouts = [(leaf, visited_states(path)) for leaf, path in trace.scored_rollouts()]
        texts = [text for _, states in rollouts for text in states]
        if not texts:
            return []
        returns = [leaf.episode_return for leaf, _ in trace.scored_rollouts()]
        is_paid = self.settings.intrinsic_where_tied or group_advantages(returns, self._advantage).has_signal
        # Counted even where nothing is paid: what was seen is not new the next time.
        bonuses, measured = self.novelty.see(trace.task.key, list(self._embedder.embed(texts)))
        rest = iter(bonuses)
        for leaf, states in rollouts:
            mine = [next(rest) for _ in states]
            leaf.intrinsic = (
                intrinsic_return(mine, coefficient=self.settings.intrinsic_coefficient) if is_paid else 0.0
            )
        return measured

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        tips, tip_arrays = self.hook.memory.snapshot()
        novelty, novelty_arrays = self.novelty.snapshot()
        # of rollouts that no step has measured yet: those that were played beside an update
        counts = {"counts": dict(self.hook.counts)} if self.hook.counts else {}
        return {"tips": tips, "novelty": novelty, **counts}, {**tip_arrays, **novelty_arrays}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        self.hook.memory.restore(state["tips"], arrays)
        self.hook.counts = Counter(state.get("counts", {}))
        self.novelty.restore(state["novelty"], arrays)


def never_shows_a_tip(settings: TipSettings, *, num_groups: int, num_tasks: int) -> bool:
    """Whether a run of ``num_groups`` groups on ``num_tasks`` training tasks, from an empty memory, wants
    tips and can show none.

    An epoch plays every task once at most, and a buffer per task holds what earlier groups of that task
    wrote.
    """
    return settings.memory_probability > 0 and settings.memory.scope == "task" and 0 < num_groups <= num_tasks


def no_tips(settings: TipSettings, section: str, *, num_groups: int, num_tasks: int) -> list[str]:
    """The warning of :func:`never_shows_a_tip`, or nothing; ``section`` is the place of the settings."""
    if not never_shows_a_tip(settings, num_groups=num_groups, num_tasks=num_tasks):
        return []
    return [
        f"NO TIPS: {num_groups} groups play none of the {num_tasks} tasks twice, "
        f"and a task is shown its own tips only; {section}.memory.scope=all shares them"
    ]


def visited_states(path: Sequence[Node]) -> list[str]:
    """The states of an episode: what each turn acted on, one per turn (section 4.2: the reward of a step is
    that of its state).

    What is said after the last turn is no state: nothing acts on it, it is in the path only where the loop
    cut the episode, and counted there it would pay an episode for being cut.
    """
    return [turn.observation for turn in policy_turns(path)]


def intrinsic_return(bonuses: Sequence[float], *, coefficient: float) -> float:
    """``c`` times the sum of what the states of an episode are worth."""
    return coefficient * sum(bonuses)
