"""The contract checks fail where the contract is broken: one plug-in for each fault."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.algorithms.base import (
    Algorithm,
    GroupAdvantages,
    ObjectiveSettings,
    group_advantages,
    with_values,
    write_advantages,
)
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.engines.base import Generation, Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.house import HouseEnvironment
from outrider.testing import check_algorithm, check_engine, check_environment, check_tool
from outrider.tools.base import ToolOutput
from outrider.trace import Trace
from outrider.types import Message
from tests.tiny import tiny_tokenizer


def _raises(self: HouseEnvironment, action: str) -> StepResult:
    if not action:
        raise IndexError("empty")
    return HouseEnvironment.step(self, action)


def _draws(self: HouseEnvironment, action: str) -> StepResult:
    result = HouseEnvironment.step(self, action)
    return StepResult(message=str(random.random()), done=result.done)


def _no_record(self: HouseEnvironment) -> EpisodeResult:
    return EpisodeResult(episode_return=float("nan"), success=False)


_BEGUN = Message(role="assistant", content="I")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"step": _raises}, "step raises for '': IndexError"),
        ({"step": _draws}, "for the same seed"),
        ({"result": _no_record}, "no finite number"),
        ({"copy": lambda self: self}, "changes the result of the original"),
        ({"reset": lambda self, task, seed: ()}, "reset returned no message"),
        (
            {"reset": lambda self, task, seed: [Message(role="user", content="q"), _BEGUN]},
            "what reset returned ends with an assistant message",
        ),
        ({"step": lambda self, action: StepResult(message=_BEGUN)}, "what step returned ends with an assist"),
        ({"step": lambda self, action: StepResult(message=None)}, "does not end the episode"),
        ({"step": lambda self, action: "done"}, "no StepResult"),
    ],
)
def test_faults_of_an_environment(methods: dict[str, Callable[..., Any]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_environment(type("Broken", (HouseEnvironment,), methods))


def test_a_state_that_episodes_share_is_found() -> None:
    """Every episode alone is right; a step of one is in the answers to the other."""
    moves: list[str] = []

    def reset(self: HouseEnvironment, task: Any, seed: int) -> Any:
        moves.clear()
        return HouseEnvironment.reset(self, task, seed)

    def step(self: HouseEnvironment, action: str) -> StepResult:
        moves.append(action)
        result = HouseEnvironment.step(self, action)
        return replace(result, message=f"{result.message} {len(moves)} moves")

    members = {"reset": reset, "step": step, "can_copy": False}
    with pytest.raises(AssertionError, match="the episode differs while another one is played"):
        check_environment(type("Shared", (HouseEnvironment,), members))


class Upper:
    """A tool without a fault."""

    name = "upper"

    def run_text(self, text: str) -> Any:
        return ToolOutput(text=text.upper())

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "Up per"}, "is not a tag"),
        ({"run_text": lambda self, text: text}, "not a ToolOutput"),
        ({"run_text": lambda self, text: ToolOutput(text=str(1 / (len(text) - 5000)))}, "run_text raises"),
        (
            {"run_text": lambda self, text: ToolOutput(text=str(random.random()))},
            "in parallel with other calls",
        ),
        ({"usage": "Just call it."}, "usage does not contain <upper>"),
    ],
)
def test_faults_of_a_tool(changed: dict[str, Any], message: str) -> None:
    check_tool(Upper())
    with pytest.raises(AssertionError, match=message):
        check_tool(type("Broken", (Upper,), changed)())


def _infinite(self: Grpo, traces: Sequence[Trace]) -> list[GroupAdvantages]:
    found = Grpo.assign_step_advantages(self, traces)
    for one in found:
        one.advantages.values[:] = np.inf
    return found


def _undeclared(self: Grpo, traces: Sequence[Trace]) -> list[GroupAdvantages]:
    found = Grpo.assign_step_advantages(self, traces)
    for one in found:
        one.measurements["mine/secret"] = [1.0]
    return found


class StatelessHook(Grpo):
    """Credit depends on how many groups came before, and no checkpoint knows."""

    num_seen = 0

    def assign_step_advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        found = super().assign_step_advantages(traces)
        for trace in traces:
            for _, path in trace.rollouts():
                for node in path:
                    node.ratio_scale = 1.0 + self.num_seen
        self.num_seen += len(traces)
        return found

    def state(self) -> Any:
        return {}, {}

    def restore(self, state: Any, arrays: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (type("Broken", (Grpo,), {"assign_step_advantages": _infinite}), "an advantage is not finite"),
        (type("Broken", (Grpo,), {"assign_step_advantages": _undeclared}), "mine/secret.* is not declared"),
        (type("Broken", (Grpo,), {"assign_step_advantages": lambda self, traces: []}), "has 0 entries"),
        (type("Broken", (Grpo,), {"modes_of": lambda self, step, group: ()}), "modes_of"),
        (StatelessHook, "advantages differ after state and restore"),
    ],
)
def test_faults_of_an_algorithm(kind: type[Grpo], message: str) -> None:
    check_algorithm(Grpo(GrpoSettings()))
    with pytest.raises(AssertionError, match=message):
        check_algorithm(lambda: kind(GrpoSettings()))


class Script(ScriptedEngine):
    """One that says the same."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer=tiny_tokenizer(), script=lambda request, text: "abc"[: 1 + request.seed % 2]
        )


def _shuffled(self: Script, requests: Sequence[Request]) -> list[Generation]:
    return ScriptedEngine.generate(self, requests)[::-1]


def _too_long(self: Script, requests: Sequence[Request]) -> list[Generation]:
    return [
        replace(
            generation,
            token_ids=(5,) * (request.max_tokens + 1),
            logprobs=(0.0,) * (request.max_tokens + 1),
            entropies=(0.0,) * (request.max_tokens + 1),
        )
        for request, generation in zip(requests, ScriptedEngine.generate(self, requests), strict=True)
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"generate": _shuffled}, "not in the order of the requests"),
        ({"generate": _too_long}, "but 1 to 6 were requested"),
        ({"load": lambda self, version: None}, "does not set the given weight version"),
        ({"generate": lambda self, requests: []}, "not in the order"),
    ],
)
def test_faults_of_an_engine(changed: dict[str, Any], message: str) -> None:
    check_engine(Script())
    with pytest.raises(AssertionError, match=message):
        check_engine(type("Broken", (Script,), changed)())


class Halved(Grpo):
    """Changes values without the flag."""

    def assign_step_advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        found = super().assign_step_advantages(traces)
        for credit in found:
            credit.advantages.values[:] = np.where(credit.advantages.assigned, 0.5, 0.0)
        return found


def test_a_flag_that_contradicts_the_advantages() -> None:
    settings = GrpoSettings(group_size=2)
    with pytest.raises(AssertionError, match=r"has_signal is False .*with_values"):
        check_algorithm(Halved(settings))


class ShiftSettings(ObjectiveSettings):
    """``shift`` is taken from every return."""

    shift: float = 0.5
    eps_of_mine: float = 1e-9


class Shift(Algorithm):
    """A constant shift of the returns changes no advantage of a group."""

    Settings = ShiftSettings
    uses_shift = False

    def __init__(self, settings: ShiftSettings) -> None:
        self.settings = settings
        self.objective = settings
        self.modes = ("on_policy",) * settings.group_size

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
        shifted = [None if one is None else one - self.settings.shift for one in returns]
        advantages = group_advantages(shifted, "group_centered")
        if self.uses_shift:
            advantages = with_values(advantages, advantages.values + self.settings.shift)
        write_advantages(trace, advantages)
        return GroupAdvantages(advantages=advantages, measurements={})


def test_a_setting_without_effect() -> None:
    with pytest.raises(AssertionError, match="no value of the setting shift changes an advantage"):
        check_algorithm(Shift(ShiftSettings(group_size=4)))
    with pytest.raises(AssertionError, match="no value of the setting eps_of_mine changes an advantage"):
        check_algorithm(Shift(ShiftSettings(group_size=4)), without_effect=["shift"])
    check_algorithm(Shift(ShiftSettings(group_size=4)), without_effect=["shift", "eps_of_mine"])
    used = type("Used", (Shift,), {"uses_shift": True})
    check_algorithm(used(ShiftSettings(group_size=4)), without_effect=["eps_of_mine"])
