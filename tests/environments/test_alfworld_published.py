"""ALFWorld's published games: which files count, the engine's adapter against a strict stand-in, and the
package itself where it is installed.
"""

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.environments.alfworld import environment as published
from outrider.environments.alfworld.environment import AlfworldConfig, AlfworldEnvironment, OfflineGame
from outrider.environments.alfworld.made_games import TASK_TYPES, TaskType, make_scene, shortest_plan
from outrider.environments.base import Env, StepResult, TaskSet
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, DataError, EnvironmentFault, ToolUnavailable
from outrider.testing import check_environment
from outrider.types import Message
from tests.environments.alfworld_pddl import write_game

FOLDERS = ("train", "valid_seen", "valid_unseen")
_INSIDE: list[str] = []


class StrictEngine:
    """A made game behind the package's interface. Rejects calls out of order and at the same time."""

    def __init__(self, breaks_at: str = "") -> None:
        self._breaks_at = breaks_at
        self._path: Path | None = None
        self._game: OfflineGame | None = None
        self._over = False

    def load(self, path: str, /) -> None:
        with _alone():
            self._path = Path(path)

    def reset(self) -> Mapping[str, Any]:
        with _alone():
            assert self._path is not None, "reset before load"
            made = json.loads(self._path.read_text())["made"]
            self._game, self._over = OfflineGame(make_scene(*made)), False
            return {**self._state(self._game.opening), "policy_commands": shortest_plan(self._game.scene)}

    def step(self, command: str, /) -> tuple[Mapping[str, Any], float, bool]:
        with _alone():
            assert self._game is not None and not self._over, "step before reset, or after the end"
            if command == self._breaks_at:
                raise ValueError("the planner broke")
            reply = self._game.act(command)
            self._over = reply.won
            return {**self._state(reply.text), "won": reply.won}, float(reply.won), reply.won

    def _state(self, feedback: str) -> dict[str, Any]:
        assert self._game is not None
        return {"feedback": feedback, "admissible_commands": list(reversed(self._game.commands()))}


class _alone:
    def __enter__(self) -> None:
        assert not _INSIDE, "two calls at a time"
        _INSIDE.append("in")

    def __exit__(self, *error: object) -> None:
        _INSIDE.clear()


def write(root: Path, name: str, made: tuple[Any, ...] | None = None, **changes: Any) -> None:
    """A game's folder as the published ones are; ``made`` is what the stand-in plays."""
    made = made or (0, "train", "pick_and_place_simple", 0)
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text(json.dumps({"task_type": changes.pop("task_type", made[2])}))
    grammar = (
        'grammar :: """ {"task": [{"rhs": "Your task is to: ' + make_scene(*made).goal.text + '."}]} """'
    )
    game = {"made": made, "grammar": grammar, "solvable": True, **changes}
    (folder / "game.tw-pddl").write_text(json.dumps(game))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for number, folder in enumerate(FOLDERS):
        for index, task_type in enumerate(TASK_TYPES):
            write(
                tmp_path / folder,
                f"{task_type}-A-None-B-{number}/trial_{index}",
                (number, "train", task_type, index),
            )
    return tmp_path


def family(data: Path, new_engine: Callable[[], Any] = StrictEngine, **more: Any) -> TaskSet:
    class Substituted(AlfworldEnvironment):
        @staticmethod
        def new_engine(*, with_plan: bool = False) -> Any:
            return new_engine()

    return Substituted.build(AlfworldConfig(data=data, **more))


def act(environment: Env, command: str) -> StepResult:
    return environment.step(Message(role="assistant", content=f"<action>{command}</action>"))


def test_the_contract_of_an_environment_holds(data: Path) -> None:
    check_environment(family(data), num_tasks=3)
    check_environment(family(data, show_admissible=True), split="test", num_tasks=2)


def test_the_same_games_as_in_the_package_are_used(data: Path) -> None:
    test = data / "valid_unseen"
    write(test, "pick_and_place_with_movable_recep-A/trial_1")
    write(test, "pick_heat_then_place_in_recep-AppleSliced-None/trial_1")
    write(test, "pick_two_obj_and_place-X/trial_1", solvable=False)
    write(test, "pick_two_obj_and_place-X/trial_2", solvable=None)
    write(test, "look_at_obj_in_light-A/trial_1", task_type="another")
    (test / "without-a-game").mkdir()
    (test / "without-a-game" / "traj_data.json").write_text("{}")
    for split, number in (("train", 0), ("valid", 1), ("test", 2)):
        tasks = family(data).tasks(split)
        names = [f"{one}-A-None-B-{number}/trial_{index}" for index, one in enumerate(TASK_TYPES)]
        assert [task.metadata["name"] for task in tasks] == sorted(names)
        assert {task.question for task in tasks} == {
            make_scene(number, "train", one, index).goal.text for index, one in enumerate(TASK_TYPES)
        }
    assert [len(family(data, num_test=size).tasks("test")) for size in (0, 4, None)] == [0, 4, 6]
    chosen = family(data, task_types=("pick_heat_then_place_in_recep",)).tasks("test")
    assert [task.metadata["task_type"] for task in chosen] == ["pick_heat_then_place_in_recep"]


def test_tasks_depend_on_the_content_of_files_and_not_on_their_folder(data: Path, tmp_path: Path) -> None:
    first = hash_tasks(family(data).tasks("test"))
    moved = data.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert hash_tasks(family(moved).tasks("test")) == first
    file = next((moved / "valid_unseen").rglob("game.tw-pddl"))
    file.write_text(file.read_text() + "\n")
    assert hash_tasks(family(moved).tasks("test")) != first


def test_tasks_do_not_depend_on_the_order_of_the_folder_s_listing(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = family(data).tasks("test")
    listed = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *arguments: reversed(list(listed(*arguments))))
    again = family(data).tasks("test")
    assert [task.key for task in again] == [task.key for task in first]
    assert hash_tasks(again) == hash_tasks(first)


@pytest.mark.parametrize("broken", ["", "[]", '{"solvable": true}', '{"grammar": 3, "solvable": true}', "{"])
def test_missing_and_malformed_game_files_are_reported(tmp_path: Path, broken: str) -> None:
    with pytest.raises(
        DataError, match=r"train contains no solvable ALFWorld game .*outrider data get alfworld"
    ):
        family(tmp_path / "nowhere").tasks("train")
    write(tmp_path / "train", "one")
    (tmp_path / "train" / "one" / "game.tw-pddl").write_text(broken)
    with pytest.raises(DataError, match="one is no ALFWorld game: ") as caught:
        family(tmp_path).tasks("train")
    assert "\n" not in str(caught.value)


def test_the_engines_planner_is_the_expert(data: Path) -> None:
    ours = family(data, max_moves=8)
    for task in ours.tasks("train"):
        steps = ours.expert(task, 0)
        index = TASK_TYPES.index(task.metadata["task_type"])  # type: ignore[arg-type]
        plan = shortest_plan(make_scene(0, "train", TASK_TYPES[index], index))
        if len(plan) > 8:
            assert steps is None
        else:
            assert steps is not None and [one.text for one in steps] == [
                f"<action>{one}</action>" for one in plan
            ]
            assert steps[-1].is_terminal


def test_a_copy_is_made_by_replay_and_is_independent(data: Path) -> None:
    ours = family(data)
    task = ours.tasks("train")[0]
    environment = ours.make()(task)
    environment.reset(0)
    there = next(one for one in environment.environment.game.commands() if one.startswith("go to"))
    act(environment, there)
    assert act(environment, "dance").invalid
    twin = environment.copy()
    assert twin.result() == environment.result() and act(twin, "look") == act(environment, "look")
    act(twin, next(one for one in twin.environment.game.commands() if one.startswith("go to")))
    assert there.removeprefix("go to ") in act(environment, "look").text
    environment.close()
    assert act(twin, "look").carried_out
    with pytest.raises(EnvironmentFault, match="is closed"):
        act(environment, "look")


def test_engines_of_a_process_take_turns(data: Path) -> None:
    ours = family(data)
    factory, tasks = ours.make(), ours.tasks("train")
    begin = threading.Barrier(4)

    def play(number: int) -> list[str]:
        environment = factory(tasks[number % len(tasks)])
        begin.wait()
        environment.reset(0)
        return [act(environment, "look").text for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(play, range(4)))
    assert [len(set(one)) for one in told] == [1] * 4
    assert AlfworldConfig(data=data).waiting_s(8) > 0


def test_engines_are_reused_unless_they_broke(data: Path) -> None:
    made: list[StrictEngine] = []

    def engine() -> StrictEngine:
        made.append(StrictEngine(breaks_at="inventory"))
        return made[-1]

    ours = family(data, engine)
    factory = ours.make()
    for task in ours.tasks("train"):
        environment = factory(task)
        prompt = environment.reset(0)
        assert task.question in prompt[0].content and act(environment, "look").carried_out
        environment.close()
        environment.close()
    assert len(made) == 1
    environment = factory(task)
    with pytest.raises(EnvironmentFault, match="the game broke"):
        environment.reset(0)
        act(environment, "inventory")
    with pytest.raises(EnvironmentFault, match="it is closed"):
        act(environment, "look")
    environment.close()
    factory(task).reset(0)
    assert len(made) == 2


def test_task_sets_of_a_process_share_their_engines(data: Path) -> None:
    made: list[StrictEngine] = []

    def engine() -> StrictEngine:
        made.append(StrictEngine())
        return made[-1]

    task_set = family(data, engine)
    for task in task_set.tasks("train")[:3]:
        assert task_set.expert(task, 0)
        task_set.close()
    assert len(made) == 2  # one of them plans


def test_an_engine_in_use_is_not_reused_when_its_game_is_closed(data: Path) -> None:
    """The loop closes slow episodes; their threads must not act in the game of another episode."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(StrictEngine):
        def step(self, command: str, /) -> tuple[Mapping[str, Any], float, bool]:
            inside.set()
            assert go_on.wait(30)
            return super().step(command)

    engines = published.Engines(lambda **_: Slow())
    path = next((data / "train").rglob("game.tw-pddl"))
    game = published.PublishedGame(path, engines)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(game.act, "look")
        assert inside.wait(30)
        game.close()
        go_on.set()
        assert late.result().text
    assert engines._free[False] == []


def test_an_engine_that_breaks_is_a_fault_and_no_reward(data: Path) -> None:
    broken = family(data, lambda: StrictEngine(breaks_at="look"))
    environment = broken.make()(broken.tasks("train")[0])
    environment.reset(0)
    with pytest.raises(EnvironmentFault, match="ALFWorld: the game broke: ValueError: the planner broke"):
        act(environment, "look")

    def never() -> Any:
        raise OSError("no library")

    with pytest.raises(
        ToolUnavailable, match=r"does not run here: ALFWorld: cannot start the game .*no library"
    ):
        family(data, never).make()


def test_tasks_of_other_games_are_refused(data: Path) -> None:
    task = AlfworldEnvironment.build(AlfworldConfig()).tasks("train")[0]
    with pytest.raises(ConfigError, match="no task of the ALFWorld games published"):
        family(data).make()(task).reset(0)
    with pytest.raises(ConfigError, match="no task of the ALFWorld games offline-0"):
        AlfworldEnvironment.build(AlfworldConfig()).expert(family(data).tasks("train")[0], 0)


def test_a_missing_package_is_reported_with_the_command_to_install_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = published.importlib.util.find_spec
    monkeypatch.setattr(
        published.importlib.util, "find_spec",
        lambda name, *more: None if name == "fast_downward" else find(name, *more),
    )  # fmt: skip
    with pytest.raises(ToolUnavailable, match=r"fast_downward: pip install 'outrider\[alfworld\]'"):
        AlfworldEnvironment.build(AlfworldConfig(data=data)).make()
    monkeypatch.setattr(published.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(published.importlib.metadata, "version", lambda name: "0.3.5")
    with pytest.raises(ToolUnavailable, match=r"ALFWorld 0\.3\.5 found, but its games need version 0\.4\.2"):
        published.check_package()


# --- the package itself ---


@pytest.fixture
def package() -> None:
    for name in ("alfworld", "textworld", "fast_downward"):
        pytest.importorskip(name, reason="ALFWorld's package is an optional extra")


@pytest.mark.parametrize("task_type", ["pick_clean_then_place_in_recep", "look_at_obj_in_light"])
def test_the_package_plays_a_made_game_the_same(package: None, tmp_path: Path, task_type: TaskType) -> None:
    scene = make_scene(3, "train", task_type, 1)
    root = tmp_path / "train" / "one"
    write_game(root, scene)
    ours = AlfworldEnvironment.build(AlfworldConfig(data=tmp_path, num_valid=0, num_test=0))
    [task] = ours.tasks("train")
    assert task.question == scene.goal.text
    environment, made = ours.make()(task), OfflineGame(scene)
    assert made.opening in environment.reset(0)[0].content
    for command in shortest_plan(scene)[:-1]:
        assert act(environment, command).text == made.act(command).text
        assert environment.environment.game.commands() == made.commands()
    twin = environment.copy()
    assert act(twin, "fly").invalid
    last = act(environment, shortest_plan(scene)[-1])
    assert last.done and last.reward == 1.0 and environment.result().success and not twin.result().success
    steps = ours.expert(task, 0)
    assert steps is not None and len(steps) == len(shortest_plan(scene))


def test_the_shipped_tables_are_those_of_the_package(package: None) -> None:
    import alfworld
    from benchmarks.alfworld_floor_plans import OUT, read_package, written

    shipped = OUT.read_text()
    found = read_package(Path(alfworld.__file__).parent, json.loads(shipped)["license"])
    assert written(found) == shipped


def test_games_of_a_release_with_another_command_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts and examples with "move ... to ..." fail in games that know "put ... in/on ..."."""
    template = 'action PutObject {\n    template :: "%s";\n}'
    for index, command in enumerate(("move {o} to {r}", "put {o} in/on {r}", "put {o} in/on {r}")):
        made = (0, "train", "pick_and_place_simple", index)
        write(tmp_path / "train", f"g{index}", made, grammar=template % command)
    assert len(family(tmp_path).tasks("train")) == 3
    [record] = caplog.records
    assert "put a thing down with 'put {o} in/on {r}', and the prompt names 'move {o} to {r}'" in (
        record.getMessage()
    )
