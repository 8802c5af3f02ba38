"""Houses: fixed by their seed, solvable by the expert, honest about what was refused, and told as they
are.
"""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.base import StepResult, make_task_set
from outrider.environments.house import (
    FURNITURE,
    HALL,
    ROOMS,
    THINGS,
    HouseConfig,
    HouseEnvironment,
    HousePlan,
    HouseSettings,
    make_house,
    solution,
)
from outrider.errors import ConfigError
from outrider.types import Task

PLAN = HousePlan(
    parent={"kitchen": HALL, "pantry": "kitchen", "attic": HALL},
    furniture={"kitchen": "drawer", "pantry": "barrel", "attic": "chest"},
    contents={"pantry": "lamp", "attic": "coin", "kitchen": "iron key"},
    locks={"attic": "iron key"},
)


@st.composite
def configs(draw: Any) -> HouseConfig:
    num_rooms = draw(st.integers(1, 10))
    num_locked = draw(st.integers(0, min(4, (num_rooms - 1) // 2)))
    house = HouseSettings(
        num_rooms=num_rooms,
        num_locked=num_locked,
        num_things=draw(st.integers(1, num_rooms - num_locked)),
        depth=draw(st.integers(1, 4)),
    )
    return HouseConfig(
        house=house, house_seed=draw(st.integers(0, 99)), num_train=2, num_test=2, max_moves=60
    )


class _Settings(HouseConfig):
    """Settings with one given house; a task's question is the goal."""

    plan: Any = PLAN

    def find(self, task: Task) -> tuple[HousePlan, str]:
        return self.plan, task.question


def start(goal: str = "coin", max_moves: int = 20, plan: HousePlan = PLAN) -> HouseEnvironment:
    house = HouseEnvironment(_Settings(max_moves=max_moves, plan=plan))
    house.reset(Task(key="t", question=goal), 0)
    return house


def act(house: HouseEnvironment, command: str) -> StepResult:
    return house.step(f"<action>{command}</action>")


@settings(max_examples=5)
@given(config=configs())
def test_the_expert_solves_every_house_with_the_fewest_commands(config: HouseConfig) -> None:
    family = HouseEnvironment.build(config)
    for task in (*family.tasks("train"), *family.tasks("test")):
        steps = family.expert(task, seed=0)
        assert (
            steps is not None and steps[-1].is_terminal and not any(step.is_terminal for step in steps[:-1])
        )
        plan = make_house(
            config.house, config.house_seed, str(task.metadata["split"]), int(str(task.metadata["index"]))
        )
        assert len(steps) == fewest_commands(plan, str(task.metadata["thing"]))
        short = (
            HouseEnvironment.build(config.model_copy(update={"max_moves": len(steps) - 1}))
            if len(steps) > 1
            else None
        )
        assert short is None or short.expert(task, seed=0) is None


def fewest_commands(plan: HousePlan, goal: str) -> int:
    """By breadth-first search over commands in the environment itself."""
    commands = [f"go {room}" for room in (HALL, *plan.parent)] + [
        f"open {one}" for one in plan.furniture.values()
    ]
    needed = {goal, plan.locks.get(plan.find_room(goal))} - {None}
    commands += [f"take {one}" for one in needed]
    environment = start(goal, 10**6, plan)
    border, seen, depth = [environment], set(), 0
    while True:
        depth += 1
        following = []
        for state in border:
            for command in commands:
                twin = state.copy()
                outcome = act(twin, command)
                if outcome.done:
                    return depth
                mark = (twin.room, twin.opened, twin.carried)
                if not outcome.refused and mark not in seen:
                    seen.add(mark)
                    following.append(twin)
        border = following


@given(config=configs(), split=st.sampled_from(["train", "test"]))
def test_houses_are_well_formed(config: HouseConfig, split: str) -> None:
    plan, house = make_house(config.house, config.house_seed, split, 0), config.house
    assert set(plan.parent) == set(plan.furniture) <= set(ROOMS) and len(plan.parent) == house.num_rooms
    assert len(set(plan.furniture.values())) == house.num_rooms and set(plan.furniture.values()) <= set(
        FURNITURE
    )
    assert len(plan.things()) == house.num_things and set(plan.things()) <= set(THINGS)
    assert len(plan.locks) == house.num_locked and len(set(plan.contents.values())) == len(plan.contents)
    for room, key in plan.locks.items():
        assert plan.find_room(key) not in plan.locks and room not in plan.parent.values()
    for room in plan.parent:
        assert 1 <= len(plan.way(HALL, room)) <= house.depth
        walk = (HALL, *plan.way(HALL, room))
        assert all(after in plan.doors(before) for before, after in pairwise(walk))


def test_a_house_is_the_same_on_every_machine_and_more_houses_leave_the_first() -> None:
    plan = make_house(HouseSettings(num_rooms=4, num_things=2, depth=2, num_locked=1), 0, "train", 0)
    assert plan.parent == {"library": HALL, "kitchen": "library", "studio": HALL, "stable": HALL}
    assert plan.furniture == {
        "library": "cabinet",
        "kitchen": "drawer",
        "studio": "crate",
        "stable": "barrel",
    }
    assert plan.contents == {"studio": "silver key", "stable": "mirror", "kitchen": "book"}
    assert plan.locks == {"stable": "silver key"}
    first = HouseEnvironment.tasks(HouseConfig(num_train=2), "train")
    assert {task.key for task in first} < {
        task.key for task in HouseEnvironment.tasks(HouseConfig(num_train=5), "train")
    }
    others = HouseEnvironment.tasks(HouseConfig(num_train=2, house_seed=1), "train")
    assert not {task.key for task in first} & {task.key for task in others}
    houses = [
        make_house(HouseSettings(), 0, split, number) for split in ("train", "test") for number in range(4)
    ]
    assert len({tuple(house.contents.items()) for house in houses}) == 8


def test_tasks_of_one_house_share_a_world_and_alternate_between_houses() -> None:
    tasks = HouseEnvironment.tasks(HouseConfig(num_test=3), "test")
    assert (
        len({task.metadata["world"] for task in tasks[:3]}) == 3
        and len({task.metadata["world"] for task in tasks}) == 3
    )
    assert len({task.key for task in tasks}) == 18
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        HouseEnvironment.tasks(HouseConfig(), "dev")


def test_observations_are_true_and_impossible_commands_are_refused() -> None:
    environment = start()
    task = Task(key="t", question="coin")
    assert environment.reset(task, 0) == environment.reset(task, 1)
    told = [
        ("go pantry", True, "No door leads from the hall to the pantry."),
        ("go attic", True, "The door to the attic is locked, it needs the iron key."),
        ("take iron key", True, "You see no iron key in the hall."),
        ("open drawer", True, "There is no drawer in the hall."),
        ("go kitchen", False, "You go to the kitchen."),
        # it lies in the drawer, which is shut
        ("take iron key", True, "You see no iron key in the kitchen."),
        ("open drawer", False, "In the drawer in the kitchen is the iron key."),
        ("take iron key", False, "You take the iron key."),
        ("open drawer", False, "In the drawer in the kitchen is nothing."),
        ("take iron key", True, "You see no iron key in the kitchen."),
        ("go hall", False, "You go to the hall."),
        ("go attic", False, "You go to the attic."),
        ("open chest", False, "In the chest in the attic is the coin."),
    ]
    for command, refused, answer in told:
        outcome = act(environment, command)
        assert (outcome.refused, outcome.text.splitlines()[0], outcome.done) == (refused, answer, False)
        assert outcome.carried_out is not refused and outcome.reward == 0.0
        assert "You look for the coin." in outcome.text
    last = act(environment, "take coin")
    assert (last.reward, last.done, last.truncated, last.text) == (1.0, True, False, "You take the coin.")
    assert environment.metrics["num_refused"] == 6


@pytest.mark.parametrize("text", [
    "", "go kitchen", "<action></action>", "<action>go</action>", "<action>fly home</action>",
    "<action>go kitchen</action><action>go hall</action>", "<action>" + "x" * 300 + "</action>",
])  # fmt: skip
def test_text_without_a_command_changes_nothing_and_costs_no_move(text: str) -> None:
    environment = start(max_moves=1)
    outcome = environment.step(text)
    assert outcome.invalid and not outcome.refused and not outcome.done and outcome.text
    assert environment.metrics == {
        "num_moves": 0.0,
        "num_turns": 1.0,
        "num_invalid": 1.0,
        "num_refused": 0.0,
    }


def test_moves_that_run_out_cut_the_episode_and_the_last_one_may_win() -> None:
    cut = start("lamp", max_moves=3)
    outcomes = [act(cut, command) for command in ("go kitchen", "go attic", "go pantry")]
    assert [(one.done, one.truncated) for one in outcomes] == [(False, False), (False, False), (True, True)]
    assert outcomes[-1].reward == 0.0
    won = start("lamp", max_moves=4)
    assert [act(won, command).reward for command in solution(PLAN, "lamp")] == [0.0] * 3 + [1.0]


def test_a_copy_is_independent() -> None:
    environment = start()
    act(environment, "go kitchen")
    twin = environment.copy()
    act(twin, "open drawer")
    act(twin, "take iron key")
    assert act(environment, "take iron key").refused and act(twin, "go hall").carried_out
    assert act(twin, "go attic").carried_out and environment.metrics["num_moves"] == 2
    assert re.search("You are in the kitchen", act(environment, "go attic").text)


def test_the_family_is_made_from_its_settings_and_knows_its_own_tasks() -> None:
    family = make_task_set(HouseConfig())
    assert family.name == "house" and family.stateful and family.stop == ("</action>",)
    with pytest.raises(ConfigError, match="no task of the houses"):
        family.make()(Task(key="t", question="q", metadata={"houses": "other"})).reset(0)


@pytest.mark.parametrize("changes", [
    {"num_train": 0, "num_valid": 0, "num_test": 0}, {"house": {"num_rooms": 3, "num_things": 4}},
    {"house": {"num_rooms": 2, "num_things": 1, "num_locked": 2}}, {"max_moves": 0},
])  # fmt: skip
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HouseConfig.model_validate(changes)
