"""Task sets from their settings, and the splits of tasks. Nothing here needs a model."""

from typing import Annotated, Any, Final, Literal, TypeAlias, cast, get_args

from outrider.environments.base import EnvironmentSettings, TaskSet
from outrider.errors import ConfigError, DataError
from outrider.plugins.registry import Section, build, resolve
from outrider.types import Role, Task

EnvironmentConfig: TypeAlias = Annotated[EnvironmentSettings, Section("environments")]
"""The section ``environment``: settings of the environment that ``type`` names."""
Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)


def known_split(split: str, environment: str) -> Split:
    """``split`` if it is one of :data:`SPLITS`. Raises ConfigError otherwise."""
    for known in SPLITS:
        if known == split:
            return known
    raise ConfigError(f"unknown split {split!r}; {environment} has {', '.join(SPLITS)}")


def split_size(config: Any, split: Split) -> int | None:
    """``config.num_train``, ``num_valid`` or ``num_test``."""
    size: int | None = getattr(config, f"num_{split}")
    return size


def require_tasks(config: Any) -> None:
    """Raises ValueError if no split of the settings has a task."""
    if not any(split_size(config, split) != 0 for split in SPLITS):
        raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")


def make_task_set(config: EnvironmentSettings) -> TaskSet:
    """Build the task set that ``config.type`` names."""
    return cast(TaskSet, build("environments", config, None))


def split_tasks(task_set: TaskSet, split: str) -> list[Task]:
    """The tasks of a split.

    Raises DataError for a value that is no task and for two tasks with the same key: their groups would draw
    the same random numbers, and only one of them would be played.
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
    """Whether an action changes hidden state."""
    return bool(getattr(resolve("environments", config.type), "stateful", True))


def is_inline(config: EnvironmentSettings) -> bool:
    """Whether an observation continues the open assistant message instead of being a message of its own."""
    if config.call_format is not None:
        return False
    return getattr(resolve("environments", config.type), "protocol", "chat") == "inline"


def observation_roles(config: EnvironmentSettings) -> tuple[Role, ...]:
    """The roles of the messages that answer a turn."""
    if config.call_format is not None:
        return ("tool",)
    return ("inline",) if is_inline(config) else ("user",)
