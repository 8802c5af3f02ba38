"""Rewards, flags and metrics of other people's code: every number is a number, and everything else is refused
the same way in a run, by the check of an environment and in agent programs.
"""

import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.agent.server import read_reward
from outrider.environments.base import (
    EnvironmentSettings,
    Episode,
    EpisodeResult,
    StepResult,
    as_bool,
    as_count,
    as_float,
    as_metrics,
)
from outrider.errors import InvalidResult, NonFiniteResult
from outrider.testing import check_environment
from outrider.types import Message, Step, Task

NUMBERS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "Decimal": Decimal,
    "Fraction": Fraction,
    **{f"numpy.{kind}": np.dtype(kind).type for kind in
       ("bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "longdouble")},
    "array of no dimension": np.array,
    "masked array without a mask": lambda value: np.ma.array([value]),
    "array of one element": lambda value: np.array([value]),
    "array of objects": lambda value: np.array(value, dtype=object),
    **{f"torch.{kind}": lambda value, kind=kind: torch.tensor(value, dtype=getattr(torch, kind))
       for kind in ("bool", "int64", "float16", "bfloat16", "float32", "float64")},
    "tensor with a gradient": lambda value: torch.tensor(value, requires_grad=True),
}  # fmt: skip
NO_NUMBERS: dict[str, Any] = {
    "text": "0.5", "bytes": b"1", "numpy text": np.str_("1"), "complex": 1j,
    "numpy complex": np.complex64(1), "torch complex": torch.tensor(1j), "list": [1.0], "tuple": (1.0,),
    "mapping": {"reward": 1.0}, "None": None,
    "array": np.ones(2), "tensor": torch.ones(2), "empty array": np.array([]), "date": np.datetime64("2020"),
    "object": object(),
    "masked": np.ma.masked, "masked array": np.ma.array([1.0], mask=[True]),
    "masked scalar": np.ma.array(1.0, mask=True),
    "duration": np.timedelta64(1, "ns"), "date in nanoseconds": np.datetime64(1, "ns"),
    "array of durations": np.array([np.timedelta64(1, "ns")]),
    "objects of durations": np.array([np.timedelta64(1, "ns")], dtype=object),
}  # fmt: skip
NOT_FINITE: dict[str, Any] = {
    "nan": math.nan, "inf": math.inf, "numpy nan": np.float32("nan"), "tensor": torch.tensor(-math.inf),
    "Decimal": Decimal("NaN"), "huge": 10**400,
}  # fmt: skip


@dataclass(kw_only=True)
class Returned:
    """What an episode of :class:`World` returns; text ``go`` ends it."""

    reward: Any = 0.0
    done: Any = True
    episode_return: Any = 1.0
    success: Any = True
    metrics: Any = None
    num_tool_calls: Any = 0


class Answering:
    def __init__(self, returned: Returned) -> None:
        self.returned = returned

    def reset(self, seed: int) -> Sequence[Message]:
        return (Message(role="user", content="go?"),)

    def step(self, message: Message) -> StepResult:
        one = self.returned
        said = Message(role="user", content="on")
        return StepResult(message=said, reward=one.reward, done=one.done, num_tool_calls=one.num_tool_calls)

    def result(self) -> EpisodeResult:
        one = self.returned
        metrics = {} if one.metrics is None else one.metrics
        return EpisodeResult(episode_return=one.episode_return, success=one.success, metrics=metrics)

    def close(self) -> None:
        pass


class Factory:
    def __init__(self, returned: Returned) -> None:
        self.returned = returned

    def __call__(self, task: Task) -> Answering:
        return Answering(self.returned)

    def close(self) -> None:
        pass


class World:
    Settings = EnvironmentSettings
    name = "world"
    stop: tuple[str, ...] = ()
    stateful = False

    def __init__(self, returned: Returned) -> None:
        self.returned = returned

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(key=f"{split}/{number}", question="?") for number in range(2)]

    def make(self) -> Factory:
        return Factory(self.returned)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        return None

    def close(self) -> None:
        pass


def played(returned: Returned) -> tuple[StepResult, EpisodeResult]:
    episode = Episode(Answering(returned))
    episode.start(0)
    return episode.act("x"), episode.result()


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_every_number_is_one_of_python_s_own(kind: str, value: float) -> None:
    made = NUMBERS[kind](value)
    returned = Returned(
        reward=made, done=made, episode_return=made, success=made, metrics={"m": made}, num_tool_calls=made
    )
    step, record = played(returned)
    assert (step.reward, step.done, step.num_tool_calls) == (value, bool(value), int(value))
    assert (record.episode_return, record.success, record.metrics) == (value, bool(value), {"m": value})
    kinds = [type(one) for one in (step.reward, step.done, step.num_tool_calls, record.episode_return,
                                   record.success, record.metrics["m"])]  # fmt: skip
    assert kinds == [float, bool, int, float, bool, float]
    check_environment(World(returned))
    reward = read_reward({"reward": made, "success": made, "metrics": {"m": made}})
    assert (reward.value, reward.success, reward.metrics) == (value, bool(value), {"m": value})


@pytest.mark.parametrize(
    "field", ["reward", "done", "episode_return", "success", "metrics", "num_tool_calls"]
)
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_everything_else_is_refused_with_the_field(field: str, kind: str) -> None:
    value = NO_NUMBERS[kind]
    if field == "metrics":
        if value is None:
            pytest.skip("a metric that is None is left out")
        value = {"metrics of mine": value}
    returned = Returned(**{field: value})
    with pytest.raises(InvalidResult, match=field) as refused:
        played(returned)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    with pytest.raises(AssertionError, match=field):
        check_environment(World(returned))


@pytest.mark.parametrize("field", ["reward", "episode_return", "metrics"])
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_a_value_that_is_not_finite_is_a_fault_with_the_field(field: str, kind: str) -> None:
    value = {"metrics of mine": NOT_FINITE[kind]} if field == "metrics" else NOT_FINITE[kind]
    with pytest.raises(NonFiniteResult, match=f"{field}.*no finite number"):
        played(Returned(**{field: value}))
    with pytest.raises(AssertionError, match=field):
        check_environment(World(Returned(**{field: value})))


@pytest.mark.parametrize("value", [0.5, 2, -1, np.float32(0.5), torch.tensor(3)])
def test_a_graded_success_is_neither_true_nor_false(value: Any) -> None:
    with pytest.raises(InvalidResult, match=r"success is .* neither true nor false"):
        played(Returned(success=value))


def test_a_metric_that_is_none_is_left_out_and_names_become_text() -> None:
    assert as_metrics({"a": None, 3: np.int8(2)}) == {"3": 2.0} and as_metrics(None) == {}
    for wrong in ([1.0], "m", {"": 1.0}, {" ": 1.0}):
        with pytest.raises(InvalidResult):
            as_metrics(wrong)


@pytest.mark.parametrize("value", [0.5, -1, "1", None])
def test_a_count_is_whole(value: Any) -> None:
    with pytest.raises(InvalidResult, match="whole number"):
        as_count(value, "num_tool_calls")


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_number_keeps_its_value(value: float) -> None:
    for made in (value, np.float32(value), np.array(value), Decimal(value), Fraction(value)):
        assert as_float(made, "x") == value
    assert as_bool(value != 0, "x") is (value != 0)


@pytest.mark.parametrize("found", ["hello", Message(role="user", content="x"), None, 5, ["hello"], ()])
def test_a_prompt_is_a_sequence_of_messages(found: Any) -> None:
    class Odd(Answering):
        def reset(self, seed: int) -> Any:
            return found

    with pytest.raises(InvalidResult, match="reset"):
        Episode(Odd(Returned())).start(0)


@pytest.mark.parametrize("found", ["left", None, (1, 2, 3), {"reward": 1.0}])
def test_an_answer_of_another_class_is_refused(found: Any) -> None:
    class Odd(Answering):
        def step(self, message: Message) -> Any:
            return found

        def result(self) -> Any:
            return found

    with pytest.raises(InvalidResult, match="no StepResult"):
        Episode(Odd(Returned())).act("")
    with pytest.raises(InvalidResult, match="no EpisodeResult"):
        Episode(Odd(Returned())).result()


@pytest.mark.parametrize("content", [None, 5, b"x", ["x"], np.float32(1)])
def test_an_observation_is_text(content: Any) -> None:
    with pytest.raises(InvalidResult, match="no text"):
        Message(role="user", content=content)
    assert type(Message(role="user", content=np.str_("x")).content) is str


def test_the_errors_go_to_other_processes() -> None:
    for error in (InvalidResult("a"), NonFiniteResult("b")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def test_no_number_needs_torch() -> None:
    program = (
        "import sys; from outrider.environments.base import as_float; import numpy as np\n"
        "assert as_float(np.float32(0.5), 'x') == 0.5 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
