"""No goal is in two splits, for every environment that ships with its own tasks."""

from collections.abc import Callable, Hashable, Mapping
from itertools import combinations
from typing import Any

import pytest

from outrider.environments.base import SPLITS, TaskSet, make_task_set, split_tasks
from outrider.plugins.registry import BUILT_IN, read_settings
from outrider.types import Task

# Tasks of these environments are the user's, and gym and openenv draw seeds of which no two splits share one.
OF_USERS = {"tools", "agent", "verifiers", "openenv", "gym"}
Content = Callable[[Task, TaskSet], Hashable]


def instruction(task: Task, task_set: TaskSet) -> Hashable:
    return task.question


def opening(task: Task, task_set: TaskSet) -> Hashable:
    return tuple(message.content for message in task_set.make()(task).reset(0))


def of_metadata(*names: str) -> Content:
    """Instructions of these worlds recur on purpose ("put a mug on the desk"); their worlds must not."""
    return lambda task, task_set: tuple(str(task.metadata[name]) for name in names)


def goals_by_split(content: Content, section: Mapping[str, Any]) -> dict[str, set[Hashable]]:
    task_set = make_task_set(read_settings("environments", section))  # type: ignore[arg-type]
    return {split: {content(task, task_set) for task in split_tasks(task_set, split)} for split in SPLITS}


CONTENTS: Mapping[str, tuple[Content, Mapping[str, Any]]] = {
    "factbook": (instruction, {"hops": (1,), "passages": "facts"}),
    "webshop": (instruction, {}),
    "reasoning_gym": (instruction, {}),
    "scienceworld": (of_metadata("task_name", "variation"), {}),
    "textworld": (of_metadata("games", "split", "index"), {}),
    "house": (opening, {}),
    "alfworld": (of_metadata("digest"), {}),
}
SLOW_TO_MAKE = ("factbook", "reasoning_gym")  # their own test files have fast tests of their splits


def test_every_environment_is_listed() -> None:
    assert {*CONTENTS, *OF_USERS} == set(BUILT_IN["environments"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in SLOW_TO_MAKE else []) for name in CONTENTS],
)
def test_no_goal_is_in_two_splits(name: str) -> None:
    content, options = CONTENTS[name]
    goals = goals_by_split(content, {"type": name, **options})
    assert all(goals.values())
    for one, other in combinations(SPLITS, 2):
        assert not goals[one] & goals[other], f"{one} and {other} share goals"


@pytest.mark.parametrize("split_by", ["goal", "product"])
@pytest.mark.parametrize("goal_seed", [0, 7])
def test_no_shopping_instruction_is_in_two_splits(split_by: str, goal_seed: int) -> None:
    """Neither with its price nor without it: a limit that was drawn anew makes no new goal."""
    section = {"type": "webshop", "split_by": split_by, "goal_seed": goal_seed}
    for content in (instruction, of_metadata("product", "attributes", "options")):
        goals = goals_by_split(content, section)
        for one, other in combinations(SPLITS, 2):
            assert not goals[one] & goals[other]
