"""ALFWorld's games made offline: rules, transcripts of the package's engine, the planner, frozen tasks."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.alfworld import made_games as texts
from outrider.environments.alfworld.environment import (
    PROMPT,
    AlfworldConfig,
    AlfworldEnvironment,
    OfflineGame,
)
from outrider.environments.alfworld.made_games import (
    PUT,
    TASK_TYPES,
    VERBS,
    Goal,
    Scene,
    commands,
    contents,
    floor_plans,
    is_reached,
    make_scene,
    shortest_plan,
    split_plans,
    tables,
)
from outrider.environments.base import (
    SPLITS,
    CopyableEnvironment,
    Env,
    EnvironmentEpisode,
    EnvironmentTaskSet,
    StepResult,
    make_task_set,
)
from outrider.environments.text_games import Game
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError
from outrider.types import Message, Task
from tests.environments.alfworld_goals import holds

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "alfworld.json").read_text())
KITCHEN = Scene(
    floor_plan=1,
    receptacles={
        "countertop 1": "CounterTop", "fridge 1": "Fridge", "microwave 1": "Microwave",
        "sinkbasin 1": "SinkBasin",
    },
    things={
        "bread 1": "Bread", "knife 1": "Knife", "apple 2": "Apple", "apple 1": "Apple", "cup 1": "Cup",
    },
    locations={
        "bread 1": "fridge 1", "knife 1": "countertop 1", "apple 2": "countertop 1", "apple 1": "fridge 1",
        "cup 1": "countertop 1",
    },
    goal=Goal(
        task_type="pick_heat_then_place_in_recep", thing="Apple", receptacle="Fridge",
        text="put a hot apple in fridge",
    ),
)  # fmt: skip
IN_FRIDGE = "The fridge 1 is open. In it, you see a bread 1, and a apple 1."
ON_COUNTERTOP = "On the countertop 1, you see a knife 1, a apple 2, and a cup 1."


@st.composite
def scenes(draw: Any) -> Scene:
    return make_scene(
        draw(st.integers(0, 50)), draw(st.sampled_from(SPLITS)), draw(st.sampled_from(TASK_TYPES)),
        draw(st.integers(0, 99)),
    )  # fmt: skip


@lru_cache(maxsize=1000)
def near_commands(scene: Scene) -> st.SearchStrategy[str]:
    """Text that looks like a command of this room, possible or not."""
    verbs, names = st.sampled_from(VERBS), st.sampled_from([*scene.things, *scene.receptacles])
    return st.one_of(
        st.text(max_size=20),
        st.builds("{} {}".format, verbs, names),
        st.builds("{} {} with {}".format, verbs, names, names),
        st.builds("take {} from {}".format, names, names),
        st.builds("move {} to {}".format, names, names),
    )


def walk(data: Any, game: OfflineGame, most: int = 25) -> Iterator[str]:
    """Random commands, more often those that act; the caller executes each one."""
    for _ in range(data.draw(st.integers(1, most), label="length")):
        found = game.commands()
        near = [one for one in found if one.partition(" ")[0] not in ("go", "look", "help", "inventory")]
        yield data.draw(st.sampled_from(near if near and data.draw(st.booleans()) else found))


class OneScene(AlfworldEnvironment):
    """Its game is the scene in ``shared``."""

    def open_game(self) -> Game:
        return OfflineGame(self.shared)


def start(scene: Scene = KITCHEN, **changes: Any) -> EnvironmentEpisode:
    environment = EnvironmentEpisode(OneScene(AlfworldConfig(**changes), scene), Task(key="t", question="q"))
    environment.reset(0)
    return environment


def act(environment: Env, command: str) -> StepResult:
    return environment.step(Message(role="assistant", content=f"I think. <action>{command}</action>"))


# --- the rules ---


@pytest.mark.parametrize("vector", VECTORS, ids=lambda one: "-".join(map(str, one["game"][2:])))
def test_a_game_plays_like_in_the_packages_engine(vector: dict[str, Any]) -> None:
    """Recorded there by ``python -m tests.environments.alfworld_pddl``: texts, possible commands and wins."""
    scene = make_scene(*vector["game"])
    for part in ("walk", "plan"):
        game = OfflineGame(scene)
        assert (game.opening, list(game.commands())) == (vector["opening"], vector["commands"])
        for turn in vector[part]:
            reply = game.act(turn["command"])
            assert (reply.text, reply.won, reply.refused) == (turn["text"], turn["won"], turn["refused"])
            admitted = "\n".join(game.commands()).encode()
            assert hashlib.sha256(admitted).hexdigest() == turn["admitted"], turn["command"]
    assert vector["plan"][-1]["won"] and [turn["command"] for turn in vector["plan"]] == list(
        shortest_plan(scene)
    )


def test_the_recorded_walks_try_every_command() -> None:
    done = {
        turn["command"].partition(" ")[0] for one in VECTORS for part in ("walk", "plan")
        for turn in one[part] if not turn["refused"]
    }  # fmt: skip
    assert done == set(VERBS) - {"put"}
    assert {one["game"][2] for one in VECTORS} == set(TASK_TYPES)
    assert any(turn["refused"] for one in VECTORS for turn in one["walk"])


@given(scene=scenes(), data=st.data())
def test_impossible_commands_change_nothing_and_others_keep_the_state_consistent(
    scene: Scene, data: Any
) -> None:
    game = OfflineGame(scene)
    for command in walk(data, game, 12):
        before = game.state.copy()
        verb, rest = command.partition(" ")[::2]
        other = data.draw(near_commands(scene))
        if other not in game.commands():
            reply = game.act(other)
            assert reply.refused and reply.text == "Nothing happens." and game.state == before
        reply = game.act(command)
        after = game.state
        assert not reply.refused and reply.won == is_reached(scene, after)
        assert (
            set(after.locations) | ({after.carried} - {None}) == set(scene.things)
            and after.carried not in after.locations
        )
        if verb in ("look", "inventory", "help", "examine"):
            assert after == before
        if verb in ("heat", "cool", "clean"):
            kind = {"heat": "Microwave", "cool": "Fridge", "clean": "SinkBasin"}[verb]
            assert (
                scene.receptacles[rest.rpartition(" with ")[2]] == kind == scene.receptacles[str(after.here)]
            )
            assert rest.startswith(str(after.carried))
        if verb in ("take", "move"):
            here = scene.receptacles[str(after.here)]
            assert here not in tables().openable or after.here in after.opened
            assert (before.carried is None) == (verb == "take")
        if verb == "move":
            assert scene.things[str(before.carried)] in tables().can_hold[scene.receptacles[str(after.here)]]
        assert not after.hot & after.cool


@given(scene=scenes(), data=st.data())
def test_the_goal_is_reached_exactly_by_the_formula_of_the_original(scene: Scene, data: Any) -> None:
    game = OfflineGame(scene)
    script = data.draw(st.sampled_from([list(shortest_plan(scene)), []]))
    assert not holds(scene, game.state)
    for command in script[:-1]:
        assert not game.act(command).won and not holds(scene, game.state)
    if script:
        assert game.act(script[-1]).won and holds(scene, game.state)
    for command in walk(data, game, 8):
        assert game.act(command).won == holds(scene, game.state)


@given(scene=scenes(), data=st.data())
def test_contents_of_a_closed_receptacle_are_hidden_and_out_of_reach(scene: Scene, data: Any) -> None:
    game = OfflineGame(scene)
    for command in walk(data, game):
        reply, here = game.act(command), game.state.here
        if here is None:
            continue
        is_shut = scene.receptacles[here] in tables().openable and here not in game.state.opened
        inside = contents(scene, game.state, here)
        if command.startswith(("go to", f"examine {here}", "open")):
            assert reply.text.endswith(f"The {here} is closed.") is is_shut
            assert is_shut or all(f"a {name}" in reply.text for name in inside)
        assert not is_shut or not any(one.startswith(("take", "move")) for one in game.commands())


def test_a_kitchen_by_hand() -> None:
    game = OfflineGame(KITCHEN)
    assert game.opening.splitlines()[2:] == [
        "You are in the middle of a room. Looking quickly around you, you see a countertop 1, a fridge 1, "
        "a microwave 1, and a sinkbasin 1.",
        "",
        "Your task is to: put a hot apple in fridge.",
    ]
    for command, expected in (
        ("inventory", "You are not carrying anything."),
        ("take knife 1 from countertop 1", "Nothing happens."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("take bread 1 from fridge 1", "Nothing happens."),
        ("open fridge 1", f"You open the fridge 1. {IN_FRIDGE}"),
        ("close fridge 1", "You close the fridge 1."),
        ("go to countertop 1", f"You arrive at countertop 1. {ON_COUNTERTOP}"),
        ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
        ("inventory", "You are carrying: a knife 1."),
        ("slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1."),
        ("heat knife 1 with microwave 1", "Nothing happens."),
        ("look", "You are facing the countertop 1. Next to it, you see nothing."),
        ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
        ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
        ("examine apple 2", "This is a sliced apple 2."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("cool apple 2 with fridge 1", "You cool the apple 2 using the fridge 1."),
        ("examine apple 2", "This is a cool sliced apple 2."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat apple 2 with microwave 1", "You heat the apple 2 using the microwave 1."),
        ("examine apple 2", "This is a hot sliced apple 2."),
        ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
        ("clean apple 2 with sinkbasin 1", "You clean the apple 2 using the sinkbasin 1."),
        ("examine apple 2", "This is a hot and clean sliced apple 2."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("move apple 2 to fridge 1", "Nothing happens."),
        ("open fridge 1", f"You open the fridge 1. {IN_FRIDGE}"),
    ):  # fmt: skip
        reply = game.act(command)
        assert (reply.text, reply.won) == (expected, False), command
    assert game.act("move apple 2 to fridge 1").won


# --- games and splits ---


def test_splits_share_no_floor_plan_and_hold_out_what_the_original_does() -> None:
    numbers = {split: {plan.number for plan in split_plans(split)} for split in SPLITS}
    assert [len(numbers[split]) for split in SPLITS] == [80, 16, 24]
    assert set.union(*numbers.values()) == {plan.number for plan in floor_plans()}
    assert numbers["test"] == {base + one for base in (0, 200, 300, 400) for one in range(1, 7)}
    family = AlfworldEnvironment.build(AlfworldConfig(num_train=120, num_valid=120, num_test=120))
    for split in SPLITS:
        played = {task.metadata["floor_plan"] for task in family.tasks(split)}
        assert played <= numbers[split] and len(played) > len(numbers[split]) / 2
        assert {task.metadata["task_type"] for task in family.tasks(split)} == set(TASK_TYPES)


@given(scene=scenes())
def test_games_are_well_formed(scene: Scene) -> None:
    known, goal = tables(), scene.goal
    [plan] = [one for one in floor_plans() if one.number == scene.floor_plan]
    assert plan.room in known.goal_rooms[goal.task_type]
    assert set(scene.locations) == set(scene.things) and set(scene.locations.values()) <= set(
        scene.receptacles
    )
    for thing, place in scene.locations.items():
        kind, receptacle = scene.things[thing], scene.receptacles[place]
        assert kind == "DeskLamp" or kind in known.can_hold[receptacle]
        assert (kind, receptacle) != (goal.thing, goal.receptacle)
    assert goal.receptacle == "" or goal.thing in known.can_hold[goal.receptacle]
    number = sum(kind == goal.thing for kind in scene.things.values())
    assert (2 if goal.task_type == "pick_two_obj_and_place" else 1) <= number <= 3
    assert goal.thing.lower() in goal.text and "{" not in goal.text


@given(scene=scenes())
def test_the_plan_is_the_shortest(scene: Scene) -> None:
    assert len(shortest_plan(scene)) == fewest_commands(scene)


def fewest_commands(scene: Scene) -> int:
    """By breadth-first search in the game itself, over the things and receptacles that can matter."""
    goal = scene.goal
    things = {name for name, kind in scene.things.items() if kind in (goal.thing, "DeskLamp")}
    kinds = {goal.receptacle, "SinkBasin", "Microwave", "Fridge"}
    near = {scene.locations[name] for name in things} | {
        name for name, kind in scene.receptacles.items() if kind in kinds
    }
    # Of equal receptacles that nothing of it lies in, one is as good as another; two hands are not needed.
    spare: dict[str, int] = {}
    occupied = {scene.locations[name] for name in things}
    for name in sorted(near - occupied):
        spare[scene.receptacles[name]] = spare.get(scene.receptacles[name], 0) + 1
        if spare[scene.receptacles[name]] > 1:
            near.discard(name)
    wanted = ("go", "open", "take", "move", "heat", "cool", "clean", "use")
    border, seen, depth = [OfflineGame(scene)], set(), 0
    while True:
        depth += 1
        following = []
        for game in border:
            for command in commands(scene, game.state).values():
                about = {command.thing, command.receptacle} - {""}
                if command.verb not in wanted or not about <= things | near:
                    continue
                twin = game.copy()
                if twin.act(command.text).won:
                    return depth
                state = twin.state
                places = frozenset((name, state.locations.get(name)) for name in things)
                done = (
                    frozenset(state.hot),
                    frozenset(state.cool),
                    frozenset(state.clean),
                    frozenset(state.toggled),
                )
                mark = (state.here, state.carried, places, frozenset(state.opened), done)
                if mark not in seen:
                    seen.add(mark)
                    following.append(twin)
        border = following


def test_the_expert_solves_games_with_possible_commands() -> None:
    family = AlfworldEnvironment.build(AlfworldConfig(num_train=150, num_valid=50, num_test=50))
    lengths = set()
    for task in (task for split in SPLITS for task in family.tasks(split)):
        steps = family.expert(task, seed=0)
        assert steps is not None and steps[-1].is_terminal and not any(one.is_terminal for one in steps[:-1])
        assert not any(one.observation == texts.NOTHING_HAPPENS for one in steps)
        lengths.add(len(steps))
    assert min(lengths) >= 3 and max(lengths) <= 12


def test_an_expert_beyond_max_moves_is_none() -> None:
    family = AlfworldEnvironment.build(AlfworldConfig(max_moves=5, num_test=24))
    lengths = [(task, len(shortest_plan(scene_of(task)))) for task in family.tasks("test")]
    assert min(length for _, length in lengths) < 5 < max(length for _, length in lengths)
    for task, length in lengths:
        steps = family.expert(task, 0)
        assert steps is None if length > 5 else steps is not None and len(steps) == length


def scene_of(task: Task) -> Scene:
    found = task.metadata
    return make_scene(0, found["split"], found["task_type"], found["index"])  # type: ignore[arg-type]


def test_games_are_frozen_and_a_larger_number_keeps_the_first() -> None:
    frozen = {
        "train": "b2324ed46d7091eb6b2f45ba0427bc896494893191dcbfb1f14f9dbcd19fc0c9",
        "valid": "68f5b66615c94bfd65ca62c51596dee11a7582c6ca9784882efc8c30e79cf923",
        "test": "6954986cce166c6f74deb6167d95e415f01bf75324e2bded68b6d294628544ab",
    }
    family = AlfworldEnvironment.build(AlfworldConfig())
    assert {split: hash_tasks(family.tasks(split)) for split in SPLITS} == frozen
    more = AlfworldEnvironment.build(AlfworldConfig(num_test=80)).tasks("test")
    assert list(family.tasks("test")) == list(more[:60])
    heated = AlfworldEnvironment.build(
        AlfworldConfig(task_types=("pick_heat_then_place_in_recep",), num_test=5)
    )
    assert all(task in more for task in heated.tasks("test"))
    others = AlfworldEnvironment.build(AlfworldConfig(game_seed=1)).tasks("test")
    assert not {task.metadata["digest"] for task in others} & {task.metadata["digest"] for task in more}


def test_the_digest_depends_on_every_part_of_a_game() -> None:
    changed: list[dict[str, Any]] = [
        {"floor_plan": 2}, {"receptacles": {**KITCHEN.receptacles, "safe 1": "Safe"}},
        {"things": {**KITCHEN.things, "cup 1": "Mug"}},
        {"locations": {**KITCHEN.locations, "cup 1": "fridge 1"}},
        {"goal": Goal(task_type="pick_and_place_simple", thing="Cup", receptacle="Fridge", text="t")},
    ]  # fmt: skip
    digests = {KITCHEN.digest, *(replace(KITCHEN, **one).digest for one in changed)}
    assert len(digests) == 6 and replace(KITCHEN).digest == KITCHEN.digest


# --- an episode ---


def test_a_won_game_pays_once_and_ends() -> None:
    environment = start()
    plan = shortest_plan(KITCHEN)
    results = [act(environment, command) for command in plan]
    assert [one.reward for one in results] == [0.0] * (len(plan) - 1) + [1.0]
    assert [one.done for one in results] == [False] * (len(plan) - 1) + [True] and not results[-1].truncated
    record = environment.result()
    assert (record.episode_return, record.success, record.metrics["num_moves"]) == (1.0, True, len(plan))
    with pytest.raises(RuntimeError, match="has ended"):
        act(environment, "look")


def test_reward_scale_is_the_return_of_a_won_game() -> None:
    environment = start(reward_scale=10.0)
    assert act(environment, "look").reward == environment.result().episode_return == 0.0
    last = [act(environment, command) for command in shortest_plan(KITCHEN)][-1]
    assert last.reward == environment.result().episode_return == 10.0


def test_impossible_commands_are_refused_and_unknown_ones_invalid() -> None:
    environment = start(max_moves=4)
    refused, invalid, mute = (
        act(environment, "open microwave 1"),
        act(environment, "fly away"),
        environment.step(Message(role="assistant", content="hm")),
    )
    assert (refused.refused, refused.invalid, refused.text) == (True, False, "Nothing happens.")
    assert (invalid.refused, invalid.invalid, invalid.text) == (False, True, "Nothing happens.")
    assert mute.invalid and "<action>" in mute.text
    assert act(environment, "go to microwave 1").carried_out
    last = act(environment, "inventory")
    assert last.done and last.truncated and last.reward == 0.0 and not environment.result().success
    assert environment.result().metrics == {
        "num_moves": 4.0, "num_turns": 5.0, "num_invalid": 2.0, "num_refused": 1.0, "cut_by_moves": 1.0,
    }  # fmt: skip


@given(data=st.data())
def test_a_copy_is_independent_and_a_replay_is_exact(data: Any) -> None:
    task = data.draw(st.sampled_from(AlfworldEnvironment.build(AlfworldConfig()).tasks("valid")))
    factory = AlfworldEnvironment.build(AlfworldConfig()).make()
    environment, again = factory(task), factory(task)
    assert isinstance(environment, CopyableEnvironment) and environment.reset(0) == again.reset(5)
    done = []
    for command in walk(data, environment.environment.game, 10):  # type: ignore[arg-type]
        done.append((command, act(environment, command)))
        if done[-1][1].done:
            break
    assert [act(again, command) for command, _ in done] == [result for _, result in done]
    if done[-1][1].done:
        return
    twin = environment.copy()
    state = environment.environment.game.state.copy()
    for command in walk(data, twin.environment.game, 5):  # type: ignore[arg-type]
        if act(twin, command).done:
            break
    assert environment.environment.game.state == state == again.environment.game.state
    assert act(environment, "inventory") == act(again, "inventory")


# --- settings and the family ---


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_train": 0, "num_valid": 0, "num_test": 0}, "nothing to play"),
        ({"num_test": None}, "num_test: none means all published games; set data"),
        ({"task_types": ["look_at_obj_in_light"] * 2}, "contains a type twice"),
        ({"task_types": []}, "at least 1 item"), ({"task_types": ["pick_and_wash"]}, "pick_and_place_simple"),
        ({"max_moves": 0}, "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        AlfworldConfig.model_validate(changes)


def test_the_task_set_refuses_tasks_of_other_games() -> None:
    family = make_task_set(AlfworldConfig())
    assert isinstance(family, EnvironmentTaskSet) and family.stateful and family.stop == ("</action>",)
    assert AlfworldConfig().replayed_differently() == [] and AlfworldConfig().waiting_s(64) == 0.0
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        family.tasks("dev")
    [task] = AlfworldEnvironment.build(AlfworldConfig(num_test=1)).tasks("test")
    for changed, expected in (
        ({"games": "offline-9"}, "no task of the ALFWorld games"), ({"digest": "0"}, "another game"),
        ({"task_type": "wash"}, "of no type"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=expected):
            family.make()(Task(key="t", question="q", metadata={**task.metadata, **changed})).reset(0)


def test_prompts_name_only_commands_of_the_grammar() -> None:
    """The command for putting a thing down was renamed in ALFWorld 0.4; a prompt or an example with the old
    one teaches commands that the games do not know.
    """
    listed = PROMPT.partition("(for example: open fridge 1): ")[2].partition(".\n")[0]
    commands = [command.strip() for command in listed.split(",")]
    assert len(commands) > 10
    assert {command.split()[0] for command in commands} == set(VERBS) - {"help", "put"}
    assert PUT.format(o="OBJECT", r="RECEPTACLE") in commands
    root = files("outrider")
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for folder in (root / "environments/prompts/alfworld", root / "protocols")
        for entry in folder.iterdir()
        if entry.name.endswith((".txt", ".toml"))
    }
    assert len(texts) > 10
    for name, text in {**texts, "prompt": PROMPT}.items():
        assert not re.search(r"\bput\b[^.\n]*\bin/on\b", text), name
