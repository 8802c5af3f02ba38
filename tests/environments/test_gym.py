"""Gymnasium's environments and those of their form: read and written as text, forked where a copy holds, and
with draws of their own.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra gym")

from outrider.environments.base import (  # noqa: E402
    CopyableEnvironment,
    EnvironmentEpisode,  # noqa: E402
    EpisodeResult,
    StepResult,
)
from outrider.environments.gym.environment import GymEnvironment  # noqa: E402
from outrider.environments.gym.making import (  # noqa: E402  # noqa: E402
    GymConfig,
    IsolatedRandom,
    Recipe,
    observation_text,
    plain,
    text_action,
)
from outrider.errors import ConfigError, EnvironmentFault, InvalidResult, ToolUnavailable  # noqa: E402
from outrider.plugins.listing import plugin_digests  # noqa: E402
from outrider.testing import check_environment  # noqa: E402
from outrider.types import Message, Task  # noqa: E402

TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"  # of Gymnasium 1.0
WORLDS = "tests.environments.gym_worlds"
LAKE = GymConfig(id="FrozenLake-v1", actions=("left", "down", "right", "up"), kwargs={"is_slippery": False})


def of(world: str, **settings: Any) -> GymConfig:
    return GymConfig(
        source="factory", id=f"{WORLDS}:{world}", num_train=3, num_valid=0, num_test=2, **settings
    )


def started(config: GymConfig, number: int = 0) -> Any:
    family = GymEnvironment.build(config)
    environment = family.make()(family.tasks("train")[number])
    environment.reset(0)
    return environment


def say(environment: Any, text: str) -> Any:
    return environment.step(Message(role="assistant", content=text))


@pytest.mark.parametrize(
    "config",
    [
        LAKE,
        GymConfig(id=TAXI),
        GymConfig(id="Blackjack-v1", actions=("stick", "hit")),
        GymConfig(id="CartPole-v1"),
        of("Echo"),
        of("Locked"),
        of("Dice"),
    ],
    ids=lambda config: config.id.split(":")[-1],
)
def test_the_contract(config: GymConfig) -> None:
    texts = [f"<action>{one}</action>" for one in ("0", "1", "down", "right", "hit", "sun")]
    check_environment(GymEnvironment.build(config), texts=texts)


def test_a_lake_is_crossed_by_the_names_of_its_actions() -> None:
    """The picture, the words for what was wrong, and the environment's own reward are told; a copy goes its
    own way.
    """
    environment = started(LAKE)
    assert isinstance(environment, CopyableEnvironment)
    prompt = environment.reset(0)[0].content
    assert prompt.startswith(
        "Write one action a turn, for example <action>left</action>. The actions are: left,"
    )
    assert prompt.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    unknown = say(environment, "<action>jump</action>")
    assert (
        unknown.invalid
        and unknown.text == "There is no action 'jump'. The actions are: left, down, right, up."
    )
    assert say(environment, "nothing").invalid
    way = ["down", "down", "right", "right", "down", "right"]
    seen = [say(environment, f"<action>{one.upper()}</action>") for one in way[:3]]
    twin = environment.copy()
    assert "[H]" in say(twin, "<action>up</action>").text  # into a hole: the copy alone has ended
    seen += [say(environment, f"<action>{one}</action>") for one in way[3:]]
    assert [one.reward for one in seen] == [0, 0, 0, 0, 0, 1] and seen[-1].done and not seen[-1].truncated
    record = environment.result()
    assert (record.episode_return, record.success) == (1, True)
    assert record.metrics == {"num_moves": 6, "num_turns": 8, "num_invalid": 2}
    assert not twin.result().success


def test_an_episode_that_was_not_started_has_a_result() -> None:
    task_set = GymEnvironment.build(LAKE)
    record = task_set.make()(task_set.tasks("train")[0]).result()
    assert (record.episode_return, record.success) == (0, False)


def test_a_task_is_a_seed_of_one_split() -> None:
    """A group plays one game whatever its reset seed; more tasks leave the first ones as they are."""
    family = GymEnvironment.build(of("Echo", first_seed=7))
    seeds = {
        split: [task.metadata["seed"] for task in family.tasks(split)] for split in ("train", "valid", "test")
    }
    assert seeds == {"train": [7, 8, 9], "valid": [], "test": [2_000_007, 2_000_008]}
    factory, task = family.make(), family.tasks("train")[1]
    assert len({factory(task).reset(seed)[0].content for seed in range(5)}) == 1
    assert (
        len({factory(one).reset(0)[0].content for one in GymEnvironment.build(of("Echo")).tasks("train")}) > 1
    )
    with pytest.raises(ConfigError, match="is no task of"):
        GymEnvironment.build(LAKE).make()(task).reset(0)
    with pytest.raises(ConfigError, match="unknown split"):
        family.tasks("dev")


def test_termination_and_truncation_differ() -> None:
    """The environment's own limit, and ``max_moves``, cut; text without an action costs no move."""
    ends = started(of("Echo", kwargs={"limit": 1}))
    assert (say(ends, "<action>x</action>").done, ends.result().success) == (True, False)
    cut = started(of("Echo", kwargs={"limit": 1, "cuts": True}))
    last = say(cut, "<action>x</action>")
    assert last.done and last.truncated
    short = started(of("Echo", max_moves=1))
    assert not say(short, "no tag").done and say(short, "<action>x</action>").truncated


def test_success_is_decided_by_the_return_or_by_info() -> None:
    by_return = started(of("Echo", success_at=2.0))
    word = by_return.reset(0)[0].content.split()[-1].strip(".")
    for _ in range(2):
        say(by_return, f"<action>{word}</action>")
    assert by_return.result().success
    by_info = started(of("Echo", success_key="is_success"))
    for _ in range(2):
        say(by_info, f"<action>{word}</action>")
    assert not by_info.result().success
    say(by_info, f"<action>{word}</action>")
    assert by_info.result().success


@pytest.mark.parametrize(
    ("world", "holds"),
    [("Echo", True), ("Dice", True), ("Locked", False), ("Shared", False), ("Door", False)],
)
def test_only_exact_copies_are_used(world: str, holds: bool) -> None:
    """One that cannot be copied, and one whose copies disturb it, are forked by their actions instead."""
    config = of(world, draws_globally=True)
    assert isinstance(started(config), CopyableEnvironment) is holds


def test_an_exception_of_the_simulator_is_a_fault() -> None:
    environment = started(of("Broken"))
    with pytest.raises(EnvironmentFault, match="step raised RuntimeError: the simulator is gone"):
        say(environment, "<action>raise</action>")
    with pytest.raises(EnvironmentFault, match="returned the reward nan"):
        say(environment, "<action>x</action>")
    assert environment.result().episode_return == 0
    environment.close()
    with pytest.raises(EnvironmentFault, match="never reset, or is closed"):
        say(environment, "<action>x</action>")


def test_episodes_in_threads_have_their_own_random_state() -> None:
    """Eight episodes of three seeds, drawn at random in threads: each plays as it does alone, and who draws
    outside notices nothing.
    """
    family = GymEnvironment.build(of("Dice"))
    factory, tasks = family.make(), family.tasks("train")

    def play(number: int) -> list[str]:
        environment = factory(tasks[number % 3])
        return [
            environment.reset(0)[0].content,
            *(say(environment, f"<action>{i}</action>").text for i in range(20)),
        ]

    alone = [play(number) for number in range(3)]
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.rand())
    random.seed(5)
    np.random.seed(5)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(24))) == [alone[number % 3] for number in range(24)]
    assert (random.random(), np.random.rand()) == expected
    assert len({tuple(one) for one in alone}) == 3


def test_the_wait_for_another_episode_is_limited() -> None:
    with (
        IsolatedRandom(0, timeout_s=1.0).inside(),
        pytest.raises(EnvironmentFault, match=r"has not returned for 0\.01 s"),
        IsolatedRandom(0, timeout_s=0.01).inside(),
    ):
        pass


def test_renderings_lose_their_escapes_and_bracket_coloured_text() -> None:
    assert plain("\x1b[41mS\x1b[0mFF\x1b[2J\n\x1b[1;32mG\x1b[m") == "[S]FF\n[G]"
    assert observation_text((np.int64(3), np.array([1.5])), {}, "json", None) == "[3, [1.5]]"
    assert (
        observation_text("middle", {"prefix": "first", "suffix": "last"}, "text", None)
        == "first\nmiddle\nlast"
    )


def test_a_user_s_expert_is_played_and_its_code_recorded() -> None:
    """Its turns with what the environment said; None where they are no success; the digest of both functions
    is part of a run.
    """
    config = of("Echo", expert=f"{WORLDS}:says_the_word", success_key="is_success")
    family = GymEnvironment.build(config)
    for task in family.tasks("train"):
        steps = family.expert(task, 0)
        assert steps is not None and [one.is_terminal for one in steps] == [False, False, True]
        assert steps[0].observation == f"You said {steps[0].text[8:-9]}."
    wrong = GymEnvironment.build(of("Echo", expert=f"{WORLDS}:says_nothing", success_key="is_success"))
    assert (
        wrong.expert(wrong.tasks("train")[0], 0) is None
        and GymEnvironment.build(of("Echo")).expert(task, 0) is None
    )
    digests = plugin_digests(config)
    assert sorted(digests) == ["plug-in expert", "plug-in id"] and len(set(digests.values())) == 1
    assert plugin_digests(GymConfig(id="CartPole-v1")) == {}
    with pytest.raises(EnvironmentFault, match="expert raised AttributeError"):
        broken = GymEnvironment.build(of("Echo", expert=f"{WORLDS}:breaks"))
        broken.expert(broken.tasks("train")[0], 0)


def test_an_expert_may_step_its_environment_and_be_endless() -> None:
    """Its steps are those of an episode from the beginning."""
    family = GymEnvironment.build(of("Echo", expert=f"{WORLDS}:tries", success_key="is_success"))
    steps = family.expert(family.tasks("train")[0], 0)
    assert steps is not None and [one.is_terminal for one in steps] == [False, False, True]


def test_a_step_may_wait_for_others_with_global_draws() -> None:
    assert of("Echo").waiting_s(64) == 60 and LAKE.waiting_s(64) == 0


def test_experts_need_a_function() -> None:
    assert not of("Echo").has_experts and of("Echo", expert=f"{WORLDS}:says_nothing").has_experts


def test_episodes_do_not_share_their_arguments() -> None:
    family = GymEnvironment.build(of("Deck", kwargs={"cards": ["ace", "king"]}))
    factory, task = family.make(), family.tasks("train")[0]
    for _ in range(3):
        environment = factory(task)
        environment.reset(0)
        assert [say(environment, "<action>x</action>").text for _ in range(2)] == [
            "You draw king.",
            "You draw ace.",
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "NoSuch-v0"}, "cannot be made"),
        ({"id": "Pendulum-v1"}, "actions of Box"),
        ({"id": "FrozenLake-v1", "actions": ("left", "right")}, "has 4 actions, and actions names 2"),
        ({"id": "CartPole-v1", "observation": "render"}, "no rendering in text"),
        ({"id": "CartPole-v1", "action_format": "raw"}, "takes actions of Discrete, not text"),
        ({"source": "factory", "id": f"{WORLDS}:Echo", "actions": ("a",)}, "no discrete actions"),
        ({"source": "factory", "id": f"{WORLDS}:WORLDS"}, "WORLDS"),
        ({"source": "factory", "id": f"{WORLDS}:paint", "observation": "render"}, "made with render_mode"),
        ({"source": "factory", "id": f"{WORLDS}:Seedless"}, r"reset\(seed=...\) has to"),
        ({"source": "factory", "id": f"{WORLDS}:FourValues"}, r"step\(action\) has to"),
    ],
)
def test_an_unusable_environment_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ToolUnavailable), match=message):
        GymEnvironment.build(GymConfig(**settings)).make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_train": 0, "num_valid": 0, "num_test": 0}, "nothing to play"),
        ({"source": "factory", "id": "no path"}, "an import path"),
        ({"actions": ("a", "a")}, "different names"),
        ({"actions": ("turn left", "Turn  Left")}, "different names"),
        ({"source": "gem", "id": "game:x", "actions": ("a",)}, "action_format = tag"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GymConfig(**settings)


@pytest.mark.parametrize(
    ("world", "shown"),
    [
        ("Painter", "3 pots of paint"),
        ("painted", "3 pots of paint"),
        ("paint", '{"é": 0.1, "7": [1, 2]}'),  # which takes no render_mode
    ],
)
def test_render_mode_is_passed_if_the_maker_accepts_it(world: str, shown: str) -> None:
    family = GymEnvironment.build(of(world))
    environment = family.make()(family.tasks("train")[0])
    [message] = environment.reset(0)
    assert shown in message.content
    if world == "paint":
        assert "[0.1, 0.2]" in say(environment, "<action>1</action>").text


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        (np.float32(0.1), "0.1"),
        (np.array([[0.1], [0.5]], np.float16), "[[0.1], [0.5]]"),
        (np.array(0.25, np.float32), "0.25"),
        (np.array([1, 2], np.uint8), "[1, 2]"),
        ({(1, 2): np.bool_(True), "ü": [np.int64(3)]}, '{"(1, 2)": true, "ü": [3]}'),
        ((np.float64(0.1), None), "[0.1, null]"),
    ],
)
def test_observations_as_json(observation: Any, shown: str) -> None:
    assert observation_text(observation, {}, "json", None) == shown


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolUnavailable, match="pip install gem-llm"):
        GymEnvironment.build(GymConfig(source="gem", id="game:x")).make()


class Paying:
    """An environment whose values have other types than Gymnasium's."""

    action_space = observation_space = None

    def __init__(self, **values: Any) -> None:
        self.values = {"reward": 1.0, "terminated": True, "truncated": False, "won": True, **values}

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "?", {}

    def step(self, action: str) -> tuple[str, Any, Any, Any, dict[str, Any]]:
        one = self.values
        return "!", one["reward"], one["terminated"], one["truncated"], {"won": one["won"]}


def paid(**values: Any) -> tuple[StepResult, EpisodeResult]:
    config = GymConfig(source="factory", id="a:b", success_key="won")
    recipe = Recipe(make=lambda: Paying(**values), action=text_action(), observation="text")
    task = Task(key="t", question="", metadata={"environment": config.id, "seed": 0})
    environment = EnvironmentEpisode(GymEnvironment(config, recipe), task)
    environment.reset(0)
    return say(environment, "<action>go</action>"), environment.result()


@pytest.mark.parametrize("made", [np.float32, np.int64, np.array, np.bool_, bool, Fraction, Decimal])
def test_rewards_and_flags_of_any_numeric_type(made: Any) -> None:
    step, record = paid(reward=made(1), terminated=made(1), truncated=made(0), won=made(1))
    assert (step.reward, step.done, step.truncated) == (1.0, True, False)
    assert (record.episode_return, record.success) == (1.0, True)
    assert paid(won=None)[1].success is False


@pytest.mark.parametrize("field", ["reward", "terminated", "truncated", "won"])
@pytest.mark.parametrize("value", ["1", [True], np.ones(2), 1j])
def test_rewards_and_flags_of_other_types_are_errors(field: str, value: Any) -> None:
    with pytest.raises(InvalidResult, match=f"a:b.*{field}"):
        paid(**{field: value})
