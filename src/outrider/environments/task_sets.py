"""Which settings make which task family; nothing here needs a model."""

from typing import Annotated, TypeAlias, cast

from outrider.environments.base import EnvironmentSettings, TaskSet
from outrider.errors import DataError
from outrider.plugins.registry import Section, build, resolve
from outrider.types import Role, Task

EnvironmentConfig: TypeAlias = Annotated[EnvironmentSettings, Section("environments")]
"""The section ``environment``: that of the family which its ``type`` names."""


def make_task_set(config: EnvironmentSettings) -> TaskSet:
    """The task family of an environment's settings."""
    return cast(TaskSet, build("environments", config, None))


def split_tasks(task_set: TaskSet, split: str) -> list[Task]:
    """The tasks of a split. Raises DataError for a value that is no task, and for two tasks with one key:
    their groups would draw the same random numbers, and only one of them would be played.
    """
    tasks = list(task_set.tasks(split))
    source = f"the split {split!r} of the environment {task_set.name}"
    first_numbers: dict[str, int] = {}
    for number, task in enumerate(tasks, start=1):
        if not isinstance(task, Task):
            raise DataError(f"{source}: task {number} is a value of type {type(task).__name__}, no Task")
        for name in ("key", "question"):
            if not isinstance(value := getattr(task, name), str):
                kind = type(value).__name__
                raise DataError(f"{source}: {name} of task {number} is {value!r} ({kind}), no text"[:300])
        if not task.key:
            raise DataError(f"{source}: task {number} has an empty key")
        if (first := first_numbers.setdefault(task.key, number)) != number:
            raise DataError(
                f"{source}: tasks {first} and {number} have the same key {task.key!r}; keys are unique"
            )
    return tasks


def is_stateful(config: EnvironmentSettings) -> bool:
    """Whether an action of this family changes hidden state."""
    return bool(getattr(resolve("environments", config.type), "stateful", True))


def is_inline(config: EnvironmentSettings) -> bool:
    """Whether an observation continues the open assistant message (``protocol``), and is no message of its
    own.
    """
    if config.call_format is not None:
        return False
    return getattr(resolve("environments", config.type), "protocol", "chat") == "inline"


def observation_roles(config: EnvironmentSettings) -> tuple[Role, ...]:
    """The roles of the messages that answer a turn."""
    if config.call_format is not None:
        return ("tool",)
    return ("inline",) if is_inline(config) else ("user",)
