"""Stages of training: which of the training tasks a step can play (``train.stages``).

A function of the step alone: there is no state to save, so a run that goes on from any checkpoint is in the
stage that it was in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from outrider.errors import DataError
from outrider.train.learning_settings import StageSettings
from outrider.train.settings import TrainSettings
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``number`` counts from 0, ``begin`` is its first training step."""

    number: int
    begin: int
    tasks: Sequence[Task]


def find_stage(step: int, *, settings: TrainSettings, tasks: Sequence[Task]) -> Stage | None:
    """The stage of a training step, with its part of the training ``tasks``; None where a run has none."""
    if not settings.stages:
        return None
    number = _stage_number(step, settings.stages)
    begin = _stage_starts(settings.stages)[number]
    return Stage(number=number, begin=begin, tasks=stage_tasks(settings.stages[number], tasks))


def stage_tasks(stage: StageSettings, tasks: Sequence[Task]) -> list[Task]:
    """Those whose keys fit, in their order."""
    return [task for task in tasks if any(fnmatchcase(task.key, pattern) for pattern in stage.tasks)]


def require_tasks(settings: TrainSettings, tasks: Sequence[Task]) -> None:
    """Raises DataError where a pattern of a stage fits no training task."""
    for number, stage in enumerate(settings.stages, start=1):
        for pattern in stage.tasks:
            if not any(fnmatchcase(task.key, pattern) for task in tasks):
                raise DataError(
                    f"train.stages: {pattern!r} of stage {number} fits no training task; "
                    f"the first one is {tasks[0].key!r}"
                )


def count_groups(settings: TrainSettings, tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """Groups that a whole run plays and the tasks that they are drawn from: of all, or of the stages, where
    those of the same patterns count as one.
    """
    size = settings.tasks_per_step
    if not settings.stages:
        return [(settings.num_steps * size, len(tasks))]
    begins = [*_stage_starts(settings.stages), settings.num_steps]
    counts: dict[tuple[str, ...], tuple[int, int]] = {}
    for stage, begin, end in zip(settings.stages, begins[:-1], begins[1:], strict=True):
        num_tasks = len(stage_tasks(stage, tasks))
        before, _ = counts.get(stage.tasks, (0, num_tasks))
        counts[stage.tasks] = before + max(0, end - begin) * min(size, num_tasks), num_tasks
    return list(counts.values())


def stage_metrics(settings: TrainSettings, *, step: int) -> dict[str, float]:
    """The number of a training step's stage, from 1, under its declared name; empty where there is none."""
    return {"stage/number": 1.0 + _stage_number(step, settings.stages)} if settings.stages else {}


def stage_lines(settings: TrainSettings, tasks: Sequence[Task]) -> list[str]:
    """For the person who watches: what each stage plays, and which have too few tasks for a whole step.

    Nothing where no step is taken, as in an evaluation of the recipe.
    """
    if not settings.num_steps:
        return []
    size, lines = settings.tasks_per_step, list[str]()
    begins = [*_stage_starts(settings.stages), settings.num_steps]
    for number, stage in enumerate(settings.stages):
        num = len(stage_tasks(stage, tasks))
        few = f"; a step has {num} groups there, not {size}: no task comes twice" if num < size else ""
        lines.append(
            f"stage {number + 1} of {len(settings.stages)}: steps {begins[number] + 1} to "
            f"{begins[number + 1]} on {num} tasks ({', '.join(stage.tasks)}){few}"
        )
    return lines


def _stage_number(step: int, stages: Sequence[StageSettings]) -> int:
    return max(number for number, begin in enumerate(_stage_starts(stages)) if begin <= step)


def _stage_starts(stages: Sequence[StageSettings]) -> list[int]:
    return [0, *accumulate(stage.num_steps or 0 for stage in stages[:-1])]
