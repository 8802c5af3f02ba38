"""A list of turn limits: the limit of each training step, what evaluations use, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import to_toml, validate
from outrider.errors import ConfigError
from outrider.rollout.settings import Limits, RolloutSettings
from outrider.types import Outcome
from tests.rollout.fakes import Factory, Fake, say, scheduler, scripted, tasks

DONE_STEPS = [0, 1, 99, 100, 101, 199, 200, 1000]


@pytest.mark.parametrize(
    ("limits", "steps", "expected"),
    [
        ([8, 12, 15], 100, [8, 8, 8, 12, 12, 12, 15, 15]),  # recorded from AgentGym-RL's scheduler
        ([2, 4, 6], 1, [2, 4, 6, 6, 6, 6, 6, 6]),
    ],
)
def test_the_limit_of_each_step(limits: list[int], steps: int, expected: list[int]) -> None:
    settings = validate(RolloutSettings, {"max_turns": limits, "steps_per_limit": steps})
    assert [settings.at_step(step).max_turns for step in DONE_STEPS] == expected
    assert settings.max_turns == limits[-1]
    assert validate(RolloutSettings, settings.model_dump()) == settings
    assert f"max_turns = {limits[-1]}" in to_toml(settings.model_dump())


@given(st.integers(0, 2000))
def test_one_number_is_the_limit_of_every_step(step: int) -> None:
    settings = RolloutSettings(max_turns=10)
    assert settings.at_step(step) == settings
    assert Limits(max_turns=3).at_step(step) == Limits(max_turns=3)


@pytest.mark.parametrize(("is_training", "expected"), [(True, [2, 2, 4, 7]), (False, [7, 7, 7, 7])])
def test_rollouts_of_training_stop_at_the_limit_of_their_step(is_training: bool, expected: list[int]) -> None:
    limits = validate(RolloutSettings, {"max_turns": [2, 4, 7], "steps_per_limit": 2})
    runner = scheduler(
        scripted(lambda request, context: "a."),
        Factory(lambda t, n: Fake(on_step=lambda number, text: say(" o"))),
        limits=limits,
    )
    runner.is_training = is_training
    for step, number in zip((0, 1, 2, 4), expected, strict=True):
        (trace,) = runner.run(tasks(1), modes=("m",), training_step=step).traces
        ((leaf, path),) = trace.rollouts()
        assert leaf.outcome is Outcome.TRUNCATED_TURNS
        assert sum(node.trainable for node in path) == number


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": [8, 8], "steps_per_limit": 5}, "the limits have to grow"),
        ({"max_turns": [8, 4], "steps_per_limit": 5}, "the limits have to grow"),
        ({"max_turns": [8, 12]}, "steps_per_limit belongs to a list"),
        ({"max_turns": 8, "steps_per_limit": 5}, "steps_per_limit belongs to a list"),
        ({"max_turns": [2, 9], "steps_per_limit": 5, "max_response_tokens": 8}, "9 turns need more than"),
        ({"max_turns": [8], "steps_per_limit": 5}, "a list of at least two"),
        ({"max_turns": [], "steps_per_limit": 5}, "a list of at least two"),
        ({"max_turns": [0, 4], "steps_per_limit": 5}, "earlier_max_turns"),
        ({"max_turns": [True, 4], "steps_per_limit": 5}, "a list of at least two"),
        ({"max_turns": ["a", 4], "steps_per_limit": 5}, "a list of at least two"),
    ],
)
def test_lists_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RolloutSettings, settings)
