"""The tasks of a run, and what may be wrong with them although they can be played: evaluation tasks that are
training tasks, questions that occur twice, and questions with different answers.

Tasks with answers are compared by their questions (and metadata), others by their keys too: what a simulator
says first may be the same for many tasks.
"""

import json
import unicodedata
from collections.abc import Sequence
from typing import Final

from outrider.config import Settings
from outrider.environments.base import TaskSet
from outrider.environments.families import split_tasks
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import DataError, OutriderError
from outrider.rollout.evaluate import EvaluationSettings
from outrider.train.settings import RunSettings
from outrider.types import Task

_LONGEST: Final = 60  # characters of a question in a message


def num_training_tasks(train: Sequence[Task], evaluation: Sequence[Task]) -> int:
    """How many of the evaluation tasks are training tasks."""
    known = {_identity(task) for task in train}
    return sum(_identity(task) in known for task in evaluation)


def kind_of_tasks(num_tasks: int, num_training: int) -> str:
    """What evaluation tasks are called: ``held-out tasks`` if none of them is a training task."""
    if not num_training:
        return "held-out tasks"
    if num_training >= num_tasks:
        return "training tasks"
    return f"tasks, {num_training} of them training tasks"


def train_overlap_lines(num_training: int, num_tasks: int, split: str) -> list[str]:
    """One line if evaluation tasks are training tasks, else none."""
    if not num_training:
        return []
    which = "all" if num_training == num_tasks else f"{num_training} of the"
    return [
        f"EVALUATION ON TRAINING TASKS: {which} {num_tasks} evaluation tasks (split {split}) are training "
        "tasks; a score on them does not measure generalization"
    ]


def repetition_lines(tasks: Sequence[Task], split: str) -> list[str]:
    """One line for questions that occur more than once, and one for those of them with different answers."""
    groups: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        if task.answers:
            groups.setdefault(_identity(task), []).append(task)
    repeated = [group for group in groups.values() if len(group) > 1]
    several = [group for group in repeated if len({frozenset(_answers(task)) for task in group}) > 1]
    equal = [group for group in repeated if group not in several]
    lines = []
    if equal:
        count = sum(map(len, equal))
        lines.append(
            f"{split}: {len(equal)} question(s) occur more than once ({count} of {len(tasks)} tasks), "
            f"for example {_cut(equal[0][0].question)!r}"
        )
    if several:
        answers = " and ".join(repr(task.answers[0]) for task in several[0][:2])
        lines.append(
            f"{split}: {len(several)} question(s) occur with different answers, "
            f"for example {_cut(several[0][0].question)!r} with {answers}"
        )
    return lines


def task_notes(
    family: TaskSet, settings: RunSettings, train: Sequence[Task], evaluation: Sequence[Task]
) -> tuple[int, list[str]]:
    """How many of the evaluation tasks are training tasks, and lines about that and about questions that
    occur twice.
    """
    split = settings.evaluation.split
    known = tasks_to_compare(family, settings, train, settings.evaluation)
    num_training = num_training_tasks(known, evaluation)
    lines = train_overlap_lines(num_training, len(evaluation), split) + repetition_lines(train, "train")
    return num_training, lines + (repetition_lines(evaluation, split) if split != "train" else [])


def training_tasks(task_set: TaskSet, settings: RunSettings) -> Sequence[Task]:
    """None if nothing is trained. Raises DataError if they do not fill a step."""
    from outrider.train.data.stages import require_tasks

    num_steps, size = settings.train.num_steps, settings.train.tasks_per_step
    tasks = split_tasks(task_set, "train") if num_steps or settings.cold_start.num_examples else ()
    if num_steps and len(tasks) < size:
        raise DataError(f"{len(tasks)} training tasks are fewer than train.tasks_per_step = {size}")
    if num_steps:
        require_tasks(settings.train, tasks)
    return tasks


def read_eval_tasks(task_set: TaskSet, settings: EvaluationSettings) -> Sequence[Task]:
    """The first ``num_tasks`` of the split. Raises DataError if they are not the panel that the recipe
    names.
    """
    tasks = split_tasks(task_set, settings.split)[: settings.num_tasks]
    tasks_hash = hash_tasks(tasks)
    if settings.panel is not None and tasks_hash != settings.panel:
        raise DataError(
            f"the {len(tasks)} tasks of the split {settings.split!r} are not the panel of the recipe: "
            f"evaluation.panel is {settings.panel}, theirs is {tasks_hash} (evaluation.panel=none takes any)"
        )
    return tasks


def tasks_to_compare(
    task_set: TaskSet, settings: RunSettings, train: Sequence[Task], evaluation: EvaluationSettings
) -> Sequence[Task]:
    """The training tasks that evaluation tasks are compared with: those of the run, and in an evaluation
    without training those of the recipe, if it has a file of them.
    """
    if train or evaluation.split == "train":
        return train or split_tasks(task_set, "train")
    dataset = getattr(settings.environment, "train", None)
    path = getattr(dataset, "path", None)
    if not isinstance(dataset, Settings) or path is None or not path.is_file():
        return ()
    try:
        return split_tasks(task_set, "train")
    except OutriderError:  # an evaluation does not need them
        return ()


def _identity(task: Task) -> tuple[str, ...]:
    metadata = json.dumps(dict(task.metadata), sort_keys=True, default=str)
    return (_normal(task.question), metadata) if task.answers else (task.key, task.question, metadata)


def _answers(task: Task) -> Sequence[str]:
    return [_normal(answer) for answer in task.answers]


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" ?.!")


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"
