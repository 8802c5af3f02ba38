"""ScienceWorld without Java, with a scripted simulator and a fake gateway."""

import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.base import Env, EnvironmentEpisode, EnvironmentTaskSet, StepResult, TaskSet
from outrider.environments.scienceworld import tasks as scienceworld_tasks
from outrider.environments.scienceworld.environment import ScienceWorldConfig, ScienceWorldEnvironment
from outrider.environments.scienceworld.simulator import JavaSimulator, Opening, Reply, SimulatorPool
from outrider.environments.text_games import parse_action, render_action
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message


@dataclass(slots=True, kw_only=True)
class ScriptedSimulator:
    """Answers with the given replies in order; dies if there are no more."""

    replies: list[Reply] = field(default_factory=list)
    valid: tuple[str, ...] = ("look around",)
    acted: list[str] = field(default_factory=list)
    alive: bool = True

    def load(self, *, task_name: str, variation: int, simplification: str) -> Opening:
        return Opening(
            task_text=f"Your task is {task_name}.",
            observation="A room.\n",
            action_templates=("open OBJ", "wait"),
        )

    def act(self, action: str) -> Reply:
        self.acted.append(action)
        if not self.replies:
            self.alive = False
            raise EnvironmentFault("the scripted simulator died")
        return self.replies.pop(0)

    def valid_actions(self) -> tuple[str, ...]:
        return self.valid

    def gold_actions(self, *, task_name: str, variation: int, simplification: str) -> tuple[str, ...]:
        return ("open door", "take cup", "unneeded")

    def num_variations(self, task_name: str) -> int:
        return scienceworld_tasks.NUM_VARIATIONS[task_name]

    def is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.alive = False


def reply(score: int, *, moves: int = 1, text: str = "Done.", completed: bool = False) -> Reply:
    return Reply(observation=text, score=score, completed=completed, num_moves=moves)


def task_set_of(start: Callable[[], Any], **settings: object) -> EnvironmentTaskSet:
    class Substituted(ScienceWorldEnvironment):
        @classmethod
        def start_simulator(cls, settings: ScienceWorldConfig) -> Any:
            return start()

    return EnvironmentTaskSet(Substituted, ScienceWorldConfig.model_validate(settings))


def play_one(simulator: ScriptedSimulator, **settings: object) -> EnvironmentEpisode:
    task_set = task_set_of(lambda: simulator, **settings)
    environment = task_set.make()(task_set.tasks("train")[0])
    environment.reset(0)
    return environment


def act(environment: Env, action: str = "look around") -> StepResult:
    return environment.step(Message(role="assistant", content=f"I think. <action>{action}</action>"))


class Starter:
    """Starts scripted simulators and stores them."""

    def __init__(self, make: Callable[[], ScriptedSimulator] = ScriptedSimulator) -> None:
        self.make = make
        self.started: list[ScriptedSimulator] = []

    def __call__(self) -> ScriptedSimulator:
        self.started.append(self.make())
        return self.started[-1]


# --- the record (vector scienceworld_return of EMPO2's reference checks) ---


@pytest.mark.parametrize(
    ("scores", "rewards", "total"),
    [([0, 3, 3, 13, 27, 83, 100], [0, 3, 0, 10, 14, 56, 17], 100), ([0, 7, -100], [0, 7, -107], -100)],
)
def test_rewards_are_score_changes_and_the_return_is_the_last_score(
    scores: list[int], rewards: list[int], total: int
) -> None:
    environment = play_one(
        ScriptedSimulator(replies=[reply(score, completed=score == 100) for score in scores])
    )
    results = [act(environment) for _ in scores]
    assert [result.reward for result in results] == rewards
    assert [result.done for result in results] == [False] * (len(scores) - 1) + [True]
    record = environment.result()
    assert (record.episode_return, record.success, record.metrics["score"]) == (total, total == 100, total)
    assert record.metrics["wrong_focus"] == (total < 0)


@given(
    scores=st.lists(st.integers(0, 99), max_size=6),
    last=st.integers(-100, 100),
    clip=st.booleans(),
    scale=st.sampled_from([1.0, 0.01, 2.5]),
)
def test_rewards_always_add_up_to_the_return(scores: list[int], last: int, clip: bool, scale: float) -> None:
    simulator = ScriptedSimulator(replies=[reply(score) for score in [*scores, last]])
    environment = play_one(simulator, clip_negative=clip, reward_scale=scale)
    total = sum(act(environment).reward for _ in [*scores, last])
    record = environment.result()
    assert total == pytest.approx(record.episode_return)
    assert record.episode_return == pytest.approx(scale * (max(last, 0) if clip else last))
    assert record.metrics["score"] == last  # raw, whatever the options


def test_max_moves_truncates_but_a_win_on_the_last_move_counts() -> None:
    cut = play_one(ScriptedSimulator(replies=[reply(10, moves=9), reply(10, moves=19)]), max_moves=10)
    assert not act(cut).done
    last = act(cut)
    assert last.done and last.truncated
    assert (cut.result().metrics["cut_by_moves"], cut.result().success) == (1.0, False)
    won = play_one(ScriptedSimulator(replies=[reply(100, moves=10, completed=True)]), max_moves=10)
    last = act(won)
    assert last.done and not last.truncated
    assert (won.result().metrics["cut_by_moves"], won.result().success) == (0.0, True)


def test_stepping_a_finished_episode_is_an_error() -> None:
    environment = play_one(ScriptedSimulator(replies=[reply(-100)]))
    act(environment)
    with pytest.raises(RuntimeError, match="has ended"):
        act(environment)


# --- what the policy writes ---


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thinking about it.\n<action>Open  Door\nto kitchen</action>", "open door to kitchen"),
        ("I should write <action> soon: <action>wait1</action>", "wait1"),
        ("<action>0</action> trailing", "0"),
    ],
)
def test_one_tagged_action_is_parsed(text: str, action: str) -> None:
    assert parse_action(text) == (action, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "open",
        "<action>open",
        "<action> </action>",
        "<action>a</action><action>b</action>",
        f"<action>{'x' * 201}</action>",
    ],
)
def test_unreadable_text_is_answered_without_touching_the_simulator(text: str) -> None:
    simulator = ScriptedSimulator()
    environment = play_one(simulator)
    result = environment.step(Message(role="assistant", content=text))
    assert (result.invalid, result.reward, result.done) == (True, 0.0, False)
    assert "command" in result.text
    assert simulator.acted == []
    assert environment.result().metrics["num_invalid"] == 1


@given(text=st.text(alphabet=st.sampled_from(list("<>/action ab\n")), max_size=60))
def test_parsing_never_raises_and_gives_either_an_action_or_a_problem(text: str) -> None:
    action, problem = parse_action(text)
    assert bool(action) != bool(problem)
    assert "\n" not in action


@given(action=st.text(alphabet="abcdef 0123", min_size=1).filter(lambda text: bool(text.strip())))
def test_a_rendered_action_is_parsed_back(action: str) -> None:
    canonical = " ".join(action.split())
    assert parse_action(render_action(canonical)) == (canonical, "")


def test_an_unknown_action_is_invalid_and_an_ambiguous_one_is_not() -> None:
    refusal = reply(0, moves=0, text="No known action matches that input.")
    question = reply(
        0, moves=0, text="Ambiguous request: Please enter the number for the action you intended"
    )
    environment = play_one(ScriptedSimulator(replies=[refusal, question]))
    assert act(environment).invalid
    assert not act(environment).invalid
    metrics = environment.result().metrics
    assert (metrics["num_invalid"], metrics["num_ambiguous"], metrics["num_turns"]) == (1, 1, 2)


REFUSALS = """\
The door is not open.
It's not clear how to get there from here.
The door is already open.
The sink is not moveable.
The fridge isn't open, so you can't see inside.
It's not clear how to read that.
The table is not edible.
I'm not sure how to use the table.
The inventory the thermometer is in is not movable.
The sink is already activated.
The table is not closeable.
You can't move something into itself.
Something can't be connected to itself.
You can't pick up a gas directly.
There is only one thing (glass cup)
That can't be moved there, because the fridge isn't open.
The sink does not contain any liquids to dunk into.
""".splitlines()


@pytest.mark.parametrize("said", REFUSALS)
def test_actions_that_the_simulator_did_not_execute_are_refused(said: str) -> None:
    """Only the text shows it. A question waits for its answer, so it is no refusal."""
    others = (
        "The door is now open.", "You move to the kitchen.", "A room.\nThe door is not open.",
        "the thermometer measures 10 degrees",
        "Ambiguous request: Please enter the number for the action you intended",
        "In your inventory, you see:\n\tan orange",
    )  # fmt: skip
    environment = play_one(
        ScriptedSimulator(replies=[reply(0, text=text) for text in (said, f"{said}\n", *others)])
    )
    results = [act(environment) for _ in range(2 + len(others))]
    assert [result.refused for result in results] == [True, True] + [False] * len(others)
    assert all(not result.invalid and result.reward == 0 and not result.done for result in results)


def test_the_prompt_contains_task_rules_templates_and_first_observation() -> None:
    family = task_set_of(ScriptedSimulator)
    (message,) = family.make()(family.tasks("train")[0]).reset(3)
    assert message.role == "user"
    for part in ("Your task is find-animal.", "<action>", "open OBJ, wait", "focus", "A room."):
        assert part in message.content


def test_valid_actions_are_listed_on_demand_up_to_a_limit() -> None:
    valid = tuple(f"open door {index}" for index in range(5))
    quiet = play_one(ScriptedSimulator(replies=[reply(0)], valid=valid))
    assert "open door" not in act(quiet).text
    loud = play_one(
        ScriptedSimulator(replies=[reply(0)], valid=valid), show_valid_actions=True, num_shown_actions=3
    )
    shown = act(loud).text
    assert "open door 2" in shown and "open door 3" not in shown and "and 2 more" in shown


# --- action correction (vector action_correction_jaccard) ---

_VALID = ("look around", "focus on light bulb", "focus on picture", "open door to kitchen", "go to workshop")


def test_action_correction_takes_the_most_similar_valid_action() -> None:
    similarities = [scienceworld_tasks.word_jaccard("focus on red light bulb", action) for action in _VALID]
    assert similarities == pytest.approx([0.0, 0.8, 1 / 3, 0.0, 0.0])
    assert scienceworld_tasks.nearest_action("focus on red light bulb", _VALID) == "focus on light bulb"
    assert (
        scienceworld_tasks.nearest_action("b a", ("a b", "b a")) == "b a"
    )  # a valid action stays what it is
    assert scienceworld_tasks.nearest_action("x a", ("a b", "a c")) == "a b"  # ties go to the first
    assert scienceworld_tasks.nearest_action("sing", _VALID) is None


def test_action_correction_is_optional_and_keeps_the_answer_to_a_question() -> None:
    plain = ScriptedSimulator(replies=[reply(0)], valid=_VALID)
    act(play_one(plain), "focus on red light bulb")
    assert plain.acted == ["focus on red light bulb"]
    question = reply(0, text="Ambiguous request: Please enter the number")
    corrected = ScriptedSimulator(replies=[question, reply(0)], valid=(*_VALID, "put 0"))
    environment = play_one(corrected, correct_actions=True)
    act(environment, "focus on red light bulb")
    act(environment, "0")
    assert corrected.acted == ["focus on light bulb", "0"]
    assert environment.result().metrics["num_corrected"] == 1


# --- the pool ---


def test_a_death_is_a_fault_at_once_and_the_next_episode_gets_a_new_simulator() -> None:
    starter = Starter()
    family = task_set_of(starter)
    factory = family.make()
    environment = factory(family.tasks("train")[0])
    environment.reset(0)
    with pytest.raises(EnvironmentFault, match="died"):
        act(environment)
    with pytest.raises(EnvironmentFault, match="no simulator"):
        act(environment)
    environment.reset(0)
    assert len(starter.started) == 2 and starter.started[1].alive
    assert (factory._shared.num_starts, factory._shared.num_replaced) == (2, 1)
    factory.close()
    factory.close()
    assert not starter.started[1].alive


def test_a_finished_episode_frees_its_simulator_and_an_unfinished_one_keeps_it() -> None:
    family = task_set_of(lambda: ScriptedSimulator(replies=[reply(-100)]), borrow_limit_s=0.05)
    factory = family.make()
    first, second = (factory(family.tasks("train")[0]) for _ in range(2))
    first.reset(0)
    with pytest.raises(EnvironmentFault, match="all 1 are on loan"):
        second.reset(0)
    assert act(first).done
    second.reset(0)
    first.close()  # already given back: must not free the simulator of the second
    with pytest.raises(EnvironmentFault, match="on loan"):
        first.reset(0)


def test_a_failed_start_can_be_repeated() -> None:
    attempts: list[int] = []

    def start() -> ScriptedSimulator:
        attempts.append(1)
        if len(attempts) == 1:
            raise EnvironmentFault("did not start")
        return ScriptedSimulator()

    pool = SimulatorPool(start=start, num_workers=1, borrow_limit_s=0.05)
    with pytest.raises(EnvironmentFault, match="did not start"):
        pool.borrow()
    assert pool.borrow().is_alive()


def test_a_pool_closed_during_a_start_leaves_no_simulator() -> None:
    starting, go_on = threading.Event(), threading.Event()
    late = ScriptedSimulator()

    def start() -> ScriptedSimulator:
        starting.set()
        assert go_on.wait(5)
        return late

    pool = SimulatorPool(start=start, num_workers=1, borrow_limit_s=1)
    failures: list[EnvironmentFault] = []

    def borrow() -> None:
        try:
            pool.borrow()
        except EnvironmentFault as error:
            failures.append(error)

    thread = threading.Thread(target=borrow)
    thread.start()
    assert starting.wait(5)
    pool.close()
    go_on.set()
    thread.join(5)
    assert failures and not late.alive


def test_a_simulator_that_cannot_start_stops_the_run_before_the_first_rollout() -> None:
    def start() -> ScriptedSimulator:
        raise EnvironmentFault("no memory")

    with pytest.raises(ToolUnavailable, match="no memory"):
        task_set_of(start).make()


def test_without_java_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolUnavailable, match="needs Java"):
        ScienceWorldEnvironment.build(ScienceWorldConfig()).make()


# --- tasks, config, expert ---


def test_the_splits_are_frozen_disjoint_and_complete() -> None:
    assert sum(scienceworld_tasks.NUM_VARIATIONS.values()) == 7207  # published size
    assert len(scienceworld_tasks.NUM_VARIATIONS) == 30
    for name, size in scienceworld_tasks.NUM_VARIATIONS.items():
        parts = [scienceworld_tasks.variations(name, split) for split in ("train", "valid", "test")]
        assert [index for part in parts for index in part] == list(range(size))
        assert all(len(part) > 0 for part in parts)
    assert scienceworld_tasks.variations("boil", "valid") == range(14, 21)  # read from the simulator


def test_tasks_are_in_the_order_of_the_settings() -> None:
    forward = ScienceWorldEnvironment.build(
        ScienceWorldConfig(task_names=("melt", "boil"), num_train_variations=2)
    )
    backward = ScienceWorldEnvironment.build(
        ScienceWorldConfig(task_names=("boil", "melt"), num_train_variations=2)
    )
    keys = [task.key for task in forward.tasks("train")]
    assert keys == [
        "scienceworld/melt/0",
        "scienceworld/melt/1",
        "scienceworld/boil/0",
        "scienceworld/boil/1",
    ]
    assert hash_tasks(forward.tasks("train")) != hash_tasks(backward.tasks("train"))
    assert hash_tasks(forward.tasks("train")) != hash_tasks(forward.tasks("test"))
    with pytest.raises(ConfigError, match="split"):
        forward.tasks("dev")


@pytest.mark.parametrize(
    "settings",
    [
        {"task_names": ["boill"]},
        {"task_names": []},
        {"task_names": ["boil", "boil"]},
        {"simplification": "easier"},
        {"task_names": ["power-component"], "simplification": "openDoors,noElectricalAction"},
        {"heap": "512"},
        {"max_move": 3},
        {"reward_scale": 0},
    ],
)
def test_an_impossible_config_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ScienceWorldConfig.model_validate(settings)


def test_the_expert_plays_the_gold_path_and_is_none_if_it_fails() -> None:
    def winning() -> ScriptedSimulator:
        return ScriptedSimulator(replies=[reply(50, text="Open."), reply(100, text="Taken.", completed=True)])

    family: TaskSet = task_set_of(winning)
    steps = family.expert(family.tasks("train")[0], 0)
    assert steps is not None
    assert [(step.text, step.observation, step.is_terminal) for step in steps] == [
        ("<action>open door</action>", "Open.", False),
        ("<action>take cup</action>", "Taken.", True),
    ]
    losing = task_set_of(lambda: ScriptedSimulator(replies=[reply(50)] * 3))
    assert losing.expert(losing.tasks("train")[0], 0) is None


def test_replay_is_exact_only_in_deterministic_mode() -> None:
    names = ("grow-plant", "boil")
    assert ScienceWorldConfig(task_names=names).replayed_differently() == []
    assert ScienceWorldConfig(task_names=names, deterministic=False).replayed_differently() == list(names)


# --- the gateway against a counterfeit Java that speaks its protocol ---

_COUNTERFEIT = """#!{python}
import socket, sys, time
mode = {mode!r}
if mode == "refuse":
    sys.stderr.write("Could not reserve enough space\\n")
    sys.exit(1)
if mode == "mute":
    time.sleep(60)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1]); print("secret", flush=True)
lines = server.accept()[0].makefile("rw", encoding="utf-8", newline="\\n")
def answer(text):
    lines.write(text + "\\n"); lines.flush()
def command():
    parts = [lines.readline().rstrip("\\n")]
    while parts[-1] not in ("e", "secret"):
        parts.append(lines.readline().rstrip("\\n"))
    return parts
assert command() == ["A", "secret"]; answer("!yv")
assert command()[0] == "i"; answer("!yro0")
step = command()
if mode == "stall": time.sleep(60)
if mode == "die": sys.exit(0)
if mode == "error": answer("!xsjava.lang.OutOfMemoryError"); time.sleep(60)
answer("!ys" + step[3][1:] + "|a\\\\nb\\\\\\\\n")
for text in ("!yd0.835", "!ybfalse", "!yi7"):
    command(); answer(text)
sys.stdout.write("x" * 300000); sys.stdout.flush()
assert command()[2] == "step"; answer("!ysnoise survived")
for text in ("!yd-1.0", "!ybtrue", "!yi8"):
    command(); answer(text)
time.sleep(60)
"""


def counterfeit(tmp_path: Path, mode: str, **limits: float) -> JavaSimulator:
    program = tmp_path / "java"
    program.write_text(_COUNTERFEIT.format(python=sys.executable, mode=mode))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    usual = {
        "start_limit_s": 0.5 if mode == "mute" else 10.0,
        "step_limit_s": 0.3 if mode == "stall" else 10.0,
    }
    return JavaSimulator(str(program), "", ScienceWorldConfig.model_validate(usual | limits))


def test_the_simulators_values_are_read_and_its_output_is_drained(tmp_path: Path) -> None:
    simulator = counterfeit(tmp_path, "fine")
    try:
        assert simulator.act("open\\door") == Reply(
            observation="open\\door|a\nb\\n", score=84, completed=False, num_moves=7
        )
        assert simulator.act("wait") == Reply(
            observation="noise survived", score=-100, completed=True, num_moves=8
        )
        assert simulator.is_alive()
    finally:
        simulator.close()
    simulator.close()
    assert not simulator.is_alive()
    with pytest.raises(EnvironmentFault, match="closed"):
        simulator.act("wait")


@pytest.mark.parametrize(
    ("mode", "what"), [("stall", "stalled longer than 0.3 s"), ("die", "died"), ("error", "OutOfMemoryError")]
)
def test_a_broken_call_is_a_fault_and_kills_the_process(tmp_path: Path, mode: str, what: str) -> None:
    simulator = counterfeit(tmp_path, mode)
    with pytest.raises(EnvironmentFault, match=what):
        simulator.act("wait")
    assert not simulator.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(simulator.pid, 0)


@pytest.mark.parametrize(
    ("mode", "what"), [("refuse", "did not start.*reserve enough space"), ("mute", "did not start")]
)
def test_a_process_that_does_not_start_is_a_fault_with_its_output(
    tmp_path: Path, mode: str, what: str
) -> None:
    with pytest.raises(EnvironmentFault, match=what):
        counterfeit(tmp_path, mode)


def test_closing_from_another_thread_ends_a_hanging_call(tmp_path: Path) -> None:
    simulator = counterfeit(tmp_path, "stall", step_limit_s=30.0)
    threading.Timer(0.2, simulator.close).start()
    with pytest.raises(EnvironmentFault):
        simulator.act("wait")


def test_a_reset_of_a_closed_environment_returns_its_simulator() -> None:
    family = task_set_of(ScriptedSimulator, num_workers=1, borrow_limit_s=5.0)
    factory = family.make()
    first, late = factory(family.tasks("train")[0]), factory(family.tasks("train")[1])
    first.reset(0)
    faults: list[EnvironmentFault] = []

    def wait() -> None:
        try:
            late.reset(0)
        except EnvironmentFault as fault:
            faults.append(fault)

    thread = threading.Thread(target=wait)
    thread.start()
    late.close()  # the loop's time limit passed: it closes and forgets the environment
    first.close()
    thread.join(timeout=30)
    assert len(faults) == 1 and "closed while it waited" in str(faults[0])
    factory(family.tasks("train")[2]).reset(0)  # the one simulator is free


def test_an_environment_can_be_reset_again_while_it_is_open() -> None:
    environment = play_one(ScriptedSimulator(replies=[reply(3), reply(5)]))
    act(environment)
    environment.reset(1)
    assert environment.result().episode_return == 0


def test_closing_during_a_call_kills_the_simulator_before_another_episode_gets_it() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Slow(ScriptedSimulator):
        def act(self, action: str) -> Reply:
            inside.set()
            leave.wait(30)
            return reply(3)

    starter = Starter(Slow)
    family = task_set_of(starter, num_workers=1, borrow_limit_s=5.0)
    factory = family.make()
    stuck = factory(family.tasks("train")[0])
    stuck.reset(0)
    thread = threading.Thread(target=act, args=(stuck,))
    thread.start()
    assert inside.wait(30)
    stuck.close()
    factory(family.tasks("train")[1]).reset(0)
    leave.set()
    thread.join(timeout=30)
    assert [simulator.alive for simulator in starter.started] == [False, True]
