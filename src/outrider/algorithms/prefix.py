"""Groups that start behind steps of a demonstration (POPE, arXiv 2601.18779; AdaPrefix-GRPO,
arXiv 2607.07674).

A controller of each task lengthens its prefix while too few rollouts of its guided groups succeed, and
shortens it to nothing as they succeed. The prefix is context and is never trained on. Sources and deviations
are in docs/algorithms/small_methods.md.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Final, Self

from pydantic import Field, model_validator

from outrider.algorithms.base import StepPlay
from outrider.algorithms.tips import PLAIN, ModeSchedule
from outrider.config import Settings
from outrider.rollout.hooks import Demonstration, EpisodeState, Hook, has_part
from outrider.trace import Trace
from outrider.types import Origin, Task

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings

GUIDED: Final = "guided"
"""Mode of the rollouts of a guided group."""


class PrefixSettings(Settings):
    """Guided groups start behind the first k steps of an expert's solution of their task. k grows by one
    step, up to all but the last one, if fewer than ``low`` of a guided group's rollouts succeed, and shrinks
    by one if more than ``high`` do; 0: the task needs no prefix.
    """

    share: float = Field(0.5, gt=0, le=1)
    """Share of the sampled groups that are guided (with ``dynamic_sampling`` about this share of them). All
    others start at the prompt.
    """
    start: float = Field(0.0, ge=0, le=1)
    """Share of the possible prefix (all steps but the last) behind which a task's first guided group starts.
    With 0, a task gets a prefix only if its first guided group fails without one.
    """
    low: float = Field(0.25, ge=0, le=1)
    """Share of solved rollouts below which the task's next guided group gets one step more."""
    high: float = Field(0.5, ge=0, le=1)
    """Share of solved rollouts above which it gets one step less."""

    @model_validator(mode="after")
    def _validate(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"prefix.low {self.low:g} exceeds prefix.high {self.high:g}")
        return self

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError if no expert exists, or if the environment cannot repeat its steps."""
        environment = run.environment
        if not environment.has_experts:
            raise ValueError(
                f"algorithm.prefix needs experts, and environment.type = {environment.type} has none: remove "
                "[algorithm.prefix], or write a method `expert` (docs/environments.md)"
            )
        if environment.rebuilt_prompt_tokens is not None:
            raise ValueError(
                'algorithm.prefix begins conversations for the policy, and environment.context = "window" '
                'builds every prompt anew: set environment.context = "chat", or remove [algorithm.prefix]'
            )
        if environment.keeps_conversations:
            raise ValueError(
                f"algorithm.prefix does not support environment.type = {environment.type}, whose program "
                "manages the conversation: remove [algorithm.prefix]"
            )
        if refused := environment.replayed_differently():
            raise ValueError(
                "algorithm.prefix replays steps of an expert, and these tasks replay differently: "
                f"{', '.join(refused)}; leave them out, or remove [algorithm.prefix]"
            )
        if run.cluster.max_staleness > 1:
            raise ValueError(
                "algorithm.prefix does not support cluster.max_staleness above 1: a group has to end before "
                "the next prefix of its task is known"
            )


class PrefixHook(Hook):
    """Puts the prefix in front of the rollouts of guided groups. ``lengths`` has the k of each task that was
    guided before, ``texts`` the turns of the prefixes of the groups that are sampled now.
    """

    def __init__(
        self,
        settings: PrefixSettings,
        *,
        groups_per_step: int = 1,
        first_group: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.lengths: dict[str, int] = {}
        self.texts: dict[str, tuple[str, ...]] = {}
        self._schedule = ModeSchedule(
            memory_probability=settings.share,
            off_policy_probability=0.0,
            seed=seed,
            groups_per_step=groups_per_step,
            first_group=first_group,
        )

    def is_guided(self, step: int, group: int) -> bool:
        """Whether group number ``group`` of a training step is guided, in exact proportions."""
        return self._schedule.mode_of(step, group) != PLAIN

    def prepare(self, tasks: Sequence[Task], modes: Sequence[Sequence[str]], *, play: StepPlay) -> list[str]:
        """Request the experts of guided groups. A task without an expert starts at its prompt.

        Returns the reasons of experts that failed.
        """
        guided = [
            task
            for task, own in zip(tasks, modes, strict=True)
            if has_part(own[0], GUIDED) and self.lengths.get(task.key) != 0
        ]
        paths, reasons = play.request_expert_paths(guided) if guided else ({}, [])
        self.texts = {}
        for key, steps in paths.items():
            if steps:
                longest = len(steps) - 1
                length = self.lengths.setdefault(key, round(self.settings.start * longest))
                self.texts[key] = tuple(step.text for step in steps[: min(length, longest)])
        return reasons

    def before_turn(self, state: EpisodeState) -> Sequence[Demonstration]:
        texts = () if state.turn else self.texts.get(state.task.key, ())
        return [Demonstration(text=text) for text in texts]

    def adapt(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Adapt the prefix of each task to its guided group, and return metrics of the step's groups."""
        guided, unguided, used = list[float](), list[float](), list[int]()
        num_missing = 0
        for trace in traces:
            solved = [float(leaf.success) for leaf, _ in trace.scored_rollouts()]
            if not solved:
                continue
            length, key = prefix_length(trace), trace.task.key
            (guided if length else unguided).extend(solved)
            if not has_part(trace.modes[0], GUIDED):
                continue
            if not length and self.lengths.get(key) != 0:
                num_missing += 1  # no expert, one whose only step is the last one, or a too long first step
                continue
            used.append(length)
            self.lengths[key] = self._next_length(trace, length, fmean(solved))
        metrics = {
            "prefix/num_groups": float(sum(length > 0 for length in used)),
            "prefix/num_missing": float(num_missing),
            "prefix/num_tasks": float(sum(length > 0 for length in self.lengths.values())),
        }
        means: Mapping[str, Sequence[float]] = {
            "prefix/length_mean": used,
            "prefix/success_guided": guided,
            "prefix/success_unguided": unguided,
        }
        return metrics | {name: fmean(values) for name, values in means.items() if values}

    def _next_length(self, trace: Trace, length: int, solved: float) -> int:
        if not any(node.trainable for node in trace.nodes):
            return max(0, length - 1)  # the limits of a rollout end before the prefix
        return max(0, length + (solved < self.settings.low) - (solved > self.settings.high))

    def snapshot(self) -> dict[str, tuple[str, ...]]:
        return self.texts

    def restore(self, snapshot: dict[str, tuple[str, ...]]) -> None:
        self.texts = dict(snapshot)


def prefix_length(trace: Trace) -> int:
    """Return the number of a demonstrator's turns before those of the policy, in the rollouts of a group."""
    return max(
        (
            sum(node.origin is Origin.DEMONSTRATION for node in path)
            for leaf, path in trace.scored_rollouts()
            if not leaf.is_demonstration
        ),
        default=0,
    )
