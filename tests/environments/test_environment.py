"""The base class of environments: defaults, tuples, copies, experts, shared resources, native tools."""

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from outrider.environments.base import (
    CopyableEnvironment,
    Environment,
    EnvironmentSettings,
    Episode,
    EpisodeResult,
    StepResult,
    settings_of,
)
from outrider.errors import (
    ConfigError,
    DataError,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolFault,
    ToolUnavailable,
)
from outrider.rollout.faults import locate_invalid_result
from outrider.testing import check_environment
from outrider.tools.functions import tool_class
from outrider.types import Message, Step, Task


class Guess(Environment):
    """Find a number."""

    class Settings(EnvironmentSettings):
        highest: int = 7

    @classmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        first = 1 if split == "train" else 2
        return [Task(key=f"{split}/{n}", question=str(n)) for n in range(first, settings.highest + 1, 2)]

    def reset(self, task: Task, seed: int) -> str:
        self.hidden, self.guesses = int(task.question), []
        self.metrics["seed"] = seed
        return f"Guess a number from 1 to {self.settings.highest}."

    def step(self, action: str) -> StepResult | tuple[str, float, bool]:
        found = re.search(r"\d{1,6}", action)
        if found is None:
            return StepResult(message="No number.", invalid=True)
        self.guesses.append(int(found[0]))
        if self.guesses[-1] == self.hidden:
            return StepResult(reward=1.0, done=True)
        return ("Higher." if self.guesses[-1] < self.hidden else "Lower."), -0.25, len(self.guesses) > 3

    def expert(self) -> Sequence[str]:
        return ["1", str(self.hidden)]


class House(Guess):
    class Settings(Guess.Settings):
        call_format: ClassVar[str] = "hermes"

    def look(self, where: str) -> str:
        """Look somewhere.

        Args:
            where: the place
        """
        return f"Nothing is {where}."

    def tools(self) -> Sequence[Callable[..., Any]]:
        return [self.look]

    def step(self, action: str) -> Any:
        if not self.turn.tool_calls and not self.turn.problems:
            return None, float(action == "found"), True
        answers = [self.look(**call.arguments) for call in self.turn.tool_calls]
        return " ".join([*answers, *self.turn.problems]), 0.0, False


def episode(environment: type[Environment], **settings: Any) -> Any:
    task_set = environment.build(environment.Settings(**settings))
    return task_set.make()(task_set.tasks("train")[1])


def act(env: Any, text: str) -> StepResult:
    return Episode(env).act(text)


def test_the_defaults_of_the_base_class() -> None:
    check_environment(Guess)
    check_environment(Guess(Guess.Settings(highest=9)), texts=["3", "9"])
    env = episode(Guess)
    assert Episode(env).start(5) == (Message(role="user", content="Guess a number from 1 to 7."),)
    assert act(env, "1") == StepResult(messages=(Message(role="user", content="Higher."),), reward=-0.25)
    assert isinstance(env, CopyableEnvironment)
    twin = env.copy()
    assert act(twin, "3").done and not act(env, "what").carried_out
    assert Episode(twin).result() == EpisodeResult(episode_return=0.75, success=True, metrics={"seed": 5.0})
    assert Episode(env).result().episode_return == -0.25 and not Episode(env).result().success
    assert twin.environment.guesses == [1, 3] and env.environment.guesses == [1]
    assert Episode(env).start(6) and Episode(env).result().episode_return == 0.0
    task_set = Guess.build(Guess.Settings())
    assert (task_set.name, task_set.stop, task_set.stateful) == ("guess", (), True)


def test_texts_of_an_expert_are_played() -> None:
    task_set = Guess.build(Guess.Settings())
    steps = task_set.expert(task_set.tasks("train")[1], 0)
    assert steps == (
        Step(text="1", observation="Higher."),
        Step(text="3", observation="", is_terminal=True),
    )

    class Lost(Guess):
        def expert(self) -> Sequence[str]:
            return ["1", "2"]

    class Recorded(Guess):
        def expert(self) -> Any:
            return [Step(text="3", observation="seen", is_terminal=True)]

    class Nobody(Guess):
        expert = Environment.expert

    task = task_set.tasks("train")[1]
    assert Lost.build(Lost.Settings()).expert(task, 0) is None
    assert Nobody.build(Nobody.Settings()).expert(task, 0) is None
    assert Recorded.build(Recorded.Settings()).expert(task, 0) == [
        Step(text="3", observation="seen", is_terminal=True)
    ]


def test_the_shared_object_is_opened_once_and_closed_with_the_factory() -> None:
    class Simulator:
        opened: ClassVar[list["Simulator"]] = []

        def __init__(self) -> None:
            self.lock, self.is_open = threading.Lock(), True  # a lock cannot be copied
            self.opened.append(self)

        def close(self) -> None:
            self.is_open = False

    class Simulated(Guess):
        num_closed = 0

        @classmethod
        def open_shared(cls, settings: Any) -> Simulator:
            return Simulator()

        def close(self) -> None:
            type(self).num_closed += 1

    task_set = Simulated.build(Simulated.Settings())
    factory = task_set.make()
    first, second = (factory(task) for task in task_set.tasks("train")[:2])
    Episode(first).start(0)
    (simulator,) = Simulator.opened
    assert (
        first.environment.shared is second.environment.shared is first.copy().environment.shared is simulator
    )
    first.close()
    first.close()
    assert Simulated.num_closed == 1 and simulator.is_open
    factory.close()
    factory.close()
    assert not simulator.is_open
    task_set.expert(task_set.tasks("train")[1], 0)
    task_set.close()
    assert len(Simulator.opened) == 2 and not Simulator.opened[1].is_open


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("text", InvalidResult, "no StepResult and no"),
        (("a", 1.0), InvalidResult, "no StepResult and no"),
        (("a", "high", False), InvalidResult, "reward is 'high'"),
        (("a", float("nan"), False), NonFiniteResult, "reward is nan"),
        ((3, 1.0, False), InvalidResult, "the observation is 3"),
        (("a", 1.0, True, False, {}), InvalidResult, "environments of Gymnasium with type = gym"),
    ],
)
def test_a_wrong_answer_is_reported(answer: Any, error: type[Exception], message: str) -> None:
    class Wrong(Guess):
        def step(self, action: str) -> Any:
            return answer

    env = episode(Wrong)
    Episode(env).start(0)
    with pytest.raises(error, match=message):
        act(env, "1")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("protocol", "inlin", "protocol is 'inlin'"),
        ("stop", "</a>", r"write stop = \('</a>',\)"),
        ("stop_strings", classmethod(lambda *_: "</a>"), r"write return \('</a>',\)"),
        ("stop_strings", classmethod(lambda *_: None), "stop_strings returned None, no tuple"),
        ("tasks", lambda *_: [], r"Wrong\.tasks is not a class method: write @classmethod above it"),
        ("open_shared", lambda *_: None, "open_shared is not a class method"),
        ("stop_strings", lambda *_: (), "stop_strings is not a class method"),
    ],
)
def test_a_wrong_attribute_of_the_class_is_refused(attribute: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        type("Wrong", (Guess,), {attribute: value}).build(Guess.Settings())


def test_tasks_and_turns_of_an_expert_may_be_generators_but_no_text() -> None:
    class Lazy(Guess):
        @classmethod
        def tasks(cls, settings: Any, split: str) -> Any:
            return (task for task in super().tasks(settings, split))

        def expert(self) -> Any:
            return (text for text in super().expert())

    check_environment(Lazy, expert_solves=True)
    task_set = type("Text", (Guess,), {"expert": lambda self: "1"}).build(Guess.Settings())
    with pytest.raises(InvalidResult, match="what expert returned is a text"):
        task_set.expert(task_set.tasks("train")[0], 0)
    nothing = type("Nothing", (Guess,), {"tasks": classmethod(lambda cls, settings, split: None)})
    with pytest.raises(DataError, match=r"Nothing\.tasks returned None"):
        nothing.build(Guess.Settings()).tasks("train")


def test_a_list_of_stop_strings_becomes_a_tuple() -> None:
    listed = type("Listed", (Guess,), {"stop_strings": classmethod(lambda *_: ["</a>"])})
    assert listed.build(Guess.Settings()).stop == ("</a>",)


def test_a_turn_of_an_expert_is_a_text_or_a_step() -> None:
    task_set = type("Numbers", (Guess,), {"expert": lambda self: ["1", 3]}).build(Guess.Settings())
    with pytest.raises(InvalidResult, match=r"the turn 3 \(int\), no text and no Step: write str\(...\)"):
        task_set.expert(task_set.tasks("train")[1], 0)


@pytest.mark.parametrize("cause", [EnvironmentFault("no JVM"), ToolFault("no server"), None])
def test_a_fault_that_stops_the_start_of_an_expert_can_be_tried_again(cause: Exception | None) -> None:
    class Unavailable(Guess):
        @classmethod
        def open_shared(cls, settings: Any) -> Any:
            raise ToolUnavailable("not here") from cause

    task_set = Unavailable.build(Guess.Settings())
    with pytest.raises(type(cause) if cause else ToolUnavailable):
        task_set.expert(task_set.tasks("train")[0], 0)


def test_no_step_after_the_end() -> None:
    env = episode(Guess)
    Episode(env).start(0)
    act(env, "3")
    for over in (env, env.copy()):
        with pytest.raises(RuntimeError, match="the episode of Guess has ended"):
            act(over, "3")
    assert env.result().episode_return == 1.0
    Episode(env).start(0)
    assert not act(env, "1").done


def _no_super(self: Any, settings: Any, shared: Any) -> None:
    return None


async def _async_step(self: Any, action: str) -> StepResult:
    return StepResult(done=True)


def _raises(self: Any, *_: Any) -> Any:
    raise KeyError("lamp")


class _Required(Guess.Settings):
    lowest: int


def _new_tasks(cls: Any, settings: Any, split: str) -> list[Task]:
    return [Task(key=f"{split}/{next(_NUMBERS)}", question="1")]


_NUMBERS = count()


def _set_of_numbers(cls: Any, settings: Any, split: str) -> list[Task]:
    return [Task(key="a", question="1", metadata={"level": {1, 2}})]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"__init__": _no_super}, r"__init__ must call super\(\).__init__\(settings, shared\)"),
        ({"step": _async_step}, "step is an async function; define it with def"),
        ({"reset": _raises}, "reset raises KeyError: 'lamp'"),
        ({"copy": _raises}, r"copy raises KeyError: 'lamp'; define copy\(\) or set can_copy = False"),
        ({"expert": _raises}, "the expert: KeyError: 'lamp'"),
        ({"Settings": type("Settings", (), {"highest": 7})}, "write class Settings.outrider.Environment"),
        ({"Settings": _Required}, r"check an instance, Wrong\(Wrong.Settings\(...\)\): 1 validation error"),
        ({"tasks": classmethod(_raises)}, "tasks raises for the split 'train': KeyError: 'lamp'"),
        ({"tasks": classmethod(lambda *_: ["a"])}, "task 1 is a value of type str, no Task"),
        ({"tasks": classmethod(_set_of_numbers)}, r"metadata\['level'\] of task 'a' must be a value of JSON"),
        (
            {"tasks": classmethod(lambda *_: [Task(key="a", question="1", metadata={1: 2})])},  # type: ignore[dict-item]
            "metadata of task 'a' must have texts as keys",
        ),
        ({"tasks": classmethod(lambda *_: None)}, r"Wrong.tasks returned None, no list of Task"),
        ({"tasks": classmethod(lambda *_: [Task(key="a", question="1")] * 2)}, "the same key 'a'"),
        ({"tasks": classmethod(_new_tasks)}, "differs when its tasks are read again"),
        ({"tasks": classmethod(lambda *_: [Task(key="a", question="1")])}, "is in 'train' and in 'test'"),
    ],
)
def test_check_environment_reports_problems(members: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_environment(type("Wrong", (Guess,), members))


def test_attributes_of_an_object_that_a_run_does_not_pass_on() -> None:
    class World(Guess):
        def __init__(self, settings: Any = None, shared: Any = None, *, bonus: float = 1.0) -> None:
            super().__init__(settings, shared)
            self.bonus = bonus

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings_of(World()) == World().settings
        with pytest.raises(UserWarning, match="what it has in bonus is not passed on"):
            settings_of(World(bonus=5.0))
        played = Guess()
        played.reset(Task(key="train/1", question="1"), 0)
        played.episode_return = 1.0
        assert settings_of(played) == played.settings


def test_an_object_may_need_what_a_run_shares_and_what_reset_sets() -> None:
    class Shared(Guess):
        def __init__(self, settings: Any, shared: Any) -> None:
            super().__init__(settings, shared)
            self.index = shared["index"]

        def close(self) -> None:
            self.guesses.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings_of(Shared(None, {"index": 1}))
        with pytest.raises(ConfigError, match=r"as .*Shared\(settings, shared\), which fails"):
            environment = Shared(None, {"index": 1})
            environment.shared = None
            settings_of(environment)


def test_a_fault_names_the_class_of_the_user() -> None:
    error = locate_invalid_result(episode(Guess), "train/1", InvalidResult("reward is None"))
    assert f"the environment {__name__}.Guess, task train/1" in str(error)


def test_an_inline_environment_and_one_without_copies() -> None:
    class Inline(Guess):
        protocol = "inline"
        can_copy = False

    env = episode(Inline)
    Episode(env).start(0)
    assert act(env, "1").observations[0].role == "inline"
    assert not isinstance(env, CopyableEnvironment)
    assert Episode(env).call_format is None


def test_native_calls() -> None:
    check_environment(House)
    env = episode(House)
    Episode(env).start(0)
    assert Episode(env).call_format == "hermes"
    assert [schema["name"] for schema in env.tool_schemas] == ["look"]
    (seen,) = act(env, '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>').observations
    assert (seen.role, seen.content, seen.tool_name) == ("tool", "Nothing is here.", "look")
    (seen,) = act(env, '<tool_call>{"name": "look", "arguments": {}}</tool_call>').observations
    assert seen.role == "tool" and "where" in seen.content
    assert act(env.copy(), "found").reward == 1.0
    assert act(env, "found").done and Episode(env).result().success


class Shop(Guess):
    @classmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        return [Task(key=f"{split}/{n}", question="Buy.", metadata={"list": ["milk", "tea"]}) for n in (1, 2)]

    def reset(self, task: Task, seed: int) -> str:
        self.left = task.metadata["list"]
        return task.question

    def step(self, action: str) -> tuple[str, float, bool]:
        if action in self.left:
            self.left.remove(action)
        return "", float(not self.task.metadata["list"]), not self.left

    def expert(self) -> Sequence[str]:
        return list(self.left)


def test_an_episode_may_change_the_lists_of_its_task() -> None:
    check_environment(Shop)
    task_set = Shop.build(Shop.Settings())
    make, task = task_set.make(), task_set.tasks("train")[0]
    for _ in range(2):
        env = make(task)
        Episode(env).start(0)
        act(env, "milk")
        assert [act(fork, "tea").reward for fork in (env.copy(), env.copy(), env)] == [1.0, 1.0, 1.0]


def test_a_fork_by_an_own_copy_has_its_own_task() -> None:
    class Copied(Shop):
        def copy(self) -> Any:
            return copy(self)

        def step(self, action: str) -> tuple[str, float, bool]:
            self.task.metadata["list"].pop()
            return "", float(len(self.task.metadata["list"])), False

    env = episode(Copied)
    Episode(env).start(0)
    assert [act(fork, "milk").reward for fork in (env.copy(), env.copy(), env)] == [1.0, 1.0, 1.0]


def test_schemas_in_the_form_of_openai() -> None:
    class Nested(House):
        def tools(self) -> Any:
            return [{"type": "function", "function": dict(tool_class(self.look).schema)}]

    check_environment(Nested)
    env = episode(Nested)
    Episode(env).start(0)
    (seen,) = act(env, '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>').observations
    assert seen.content == "Nothing is here."

    class Nameless(House):
        def tools(self) -> Any:
            return [{"type": "function", "function": {"description": "?"}}]

    with pytest.raises(InvalidResult, match="the schema of a tool needs a name"):
        Episode(episode(Nameless)).start(0)


def test_a_class_without_a_method_is_an_error_before_the_run() -> None:
    from outrider.config import load_settings
    from outrider.training.settings import RunSettings

    sections = {
        "model": {"name": "m"},
        "environment": {"type": f"{__name__}:Unfinished"},
        "algorithm": {"type": "grpo"},
    }
    with pytest.raises(ConfigError, match=r"Unfinished .* is not an environment: it has no method step"):
        load_settings(RunSettings, file=None, overrides=[], sections=sections)


class Unfinished(Environment):
    """No method ``step``."""

    @classmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        return []

    def reset(self, task: Task, seed: int) -> str:
        return ""


class Limited(Environment):
    """Its shared object has an attribute that the tool environments use for something else."""

    @classmethod
    def open_shared(cls, settings: object) -> object:
        return SimpleNamespace(call_budget=10)

    @classmethod
    def tasks(cls, settings: object, split: str) -> list[Task]:
        return [Task(key=split, question="?")]

    def reset(self, task: Task, seed: int) -> str:
        return "?"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


def test_a_shared_object_may_have_any_attributes() -> None:
    assert Limited.build(Limited.Settings()).make().call_budget is None  # type: ignore[attr-defined]
