"""Expert paths: timeouts, retries and faults; errors of the settings stay what they are."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from outrider.config import validate
from outrider.errors import ConfigError, EnvironmentFault
from outrider.rollout.experts import play_experts
from outrider.rollout.settings import Limits
from outrider.training.experts import play_expert, request_expert_paths
from outrider.training.settings import RunSettings
from outrider.types import Step, Task
from tests.rollout.fakes import TOKENIZER
from tests.toy import ToyEnvironment, ToyTaskSet


def settings(**train: float) -> RunSettings:
    return validate(
        RunSettings, {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "train": train}
    )


class Stubborn(ToyTaskSet):
    """Asked about task 0, it does not answer until it is closed, for the first ``num_hangs`` times."""

    def __init__(self, num_hangs: int) -> None:
        super().__init__()
        self.num_hangs = num_hangs
        self.asked: Counter[str] = Counter()
        self.released = threading.Event()
        self.num_family_closed = 0

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        self.asked[task.key] += 1
        if task.key == "toy/0" and self.asked[task.key] <= self.num_hangs:
            released = self.released
            released.wait(60)
        return super().expert(task, seed)

    def close(self) -> None:
        self.num_family_closed += 1
        self.released.set()
        self.released = threading.Event()


@pytest.mark.parametrize(("num_hangs", "num_asked"), [(1, 2), (9, 2)])
def test_an_expert_that_hangs_times_out_and_is_retried(num_hangs: int, num_asked: int) -> None:
    family = Stubborn(num_hangs)
    began = time.monotonic()
    paths, reasons = request_expert_paths(
        family, family.tasks("train"), settings(expert_timeout_s=0.3, max_retries=1), training_step=0
    )
    assert time.monotonic() - began < 30
    assert family.asked == {"toy/0": num_asked, "toy/1": 1, "toy/2": 1}
    assert family.num_family_closed == min(num_hangs, 2) + 1
    assert paths["toy/1"] and paths["toy/2"] is None
    if num_hangs == 1:
        assert paths["toy/0"] and reasons == []
    else:
        assert "toy/0" not in paths and reasons == ["the expert of toy/0: no answer within 0.3 s"]


def test_a_mistake_in_the_settings_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ToyTaskSet()

    def refuse(task: Task, seed: int) -> Sequence[Step]:
        raise ConfigError("no game fits in 20 draws")

    monkeypatch.setattr(family, "expert", refuse)
    with pytest.raises(ConfigError, match="20 draws"):
        request_expert_paths(family, family.tasks("train"), settings(), training_step=0)


def test_a_fault_of_an_expert_is_retried_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ToyTaskSet()
    asked: list[str] = []

    def broken(task: Task, seed: int) -> Sequence[Step]:
        asked.append(task.key)
        raise EnvironmentFault("no simulator")

    monkeypatch.setattr(family, "expert", broken)
    paths, reasons = request_expert_paths(
        family, family.tasks("train")[:1], settings(max_retries=2), training_step=0
    )
    assert (paths, asked, reasons) == ({}, ["toy/0"] * 3, ["the expert of toy/0: no simulator"])


def test_repeated_requests_of_experts_and_repeated_rollouts_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family = ToyTaskSet()
    num_tries: Counter[str] = Counter()

    def fails_once(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        num_tries[name] += 1
        if num_tries[name] == 1:
            raise EnvironmentFault(f"{name} is not ready")
        return function(*arguments)

    monkeypatch.setattr(family, "expert", partial(fails_once, "expert", family.expert))
    task = family.tasks("train")[0]
    paths, reasons = request_expert_paths(family, [task], settings(max_retries=1), training_step=0)
    assert reasons == [] and "repeated: the expert of toy/0: expert is not ready" in caplog.text
    reset = ToyEnvironment.reset
    monkeypatch.setattr(ToyEnvironment, "reset", lambda *given: fails_once("the simulator", reset, *given))
    [trace] = play_experts(
        tasks=[task], expert=lambda task: paths[task.key], factory=family.make(), tokenizer=TOKENIZER,
        limits=Limits(), stop=family.stop, run_seed=0, context_length=9999,
    )  # fmt: skip
    assert trace.leaves[0].success and "1 fault, 1 try was repeated: environment_fault" in caplog.text


@pytest.mark.parametrize("step", [0, 1, 7])
def test_an_expert_path_belongs_to_the_episode_that_is_played(step: int) -> None:
    """The toy's hidden number comes from the seed of the reset, and so does what its expert answers."""
    family, chosen = ToyTaskSet(1), settings()
    [task] = family.tasks("train")
    paths, _ = request_expert_paths(family, [task], chosen, training_step=step)
    [trace] = play_experts(
        tasks=[task], expert=lambda task: paths[task.key], factory=family.make(), tokenizer=TOKENIZER,
        limits=Limits(), stop=family.stop, run_seed=chosen.seed, context_length=4096, training_step=step,
    )  # fmt: skip
    assert trace.leaves[0].success and trace.leaves[0].episode_return == 2.0
    played = play_expert(family, family.make(), task, chosen)
    assert played is not None and played[1]
