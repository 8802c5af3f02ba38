"""GEM's games: the contract, games that draw from the global generators, and who won."""

from itertools import product
from typing import Any

import pytest

pytest.importorskip("gem", reason="needs the package gem-llm")

from outrider.environments.base import CopyableEnvironment, TaskSet  # noqa: E402
from outrider.environments.gym.environment import GymEnvironment
from outrider.environments.gym.making import GymConfig  # noqa: E402
from outrider.types import Message  # noqa: E402


def family(game: str, **settings: Any) -> TaskSet:
    return GymEnvironment.build(
        GymConfig(source="gem", id=game, num_train=4, num_test=2, num_valid=0, **settings)
    )


def say(environment: Any, text: str) -> Any:
    return environment.step(Message(role="assistant", content=text))


def test_a_number_is_found_by_halving() -> None:
    """The hints are the game's, the whole text of a turn reaches it, and its win is a success."""
    found = family("game:GuessTheNumber-v0-easy")
    environment = found.make()(found.tasks("train")[0])
    assert isinstance(environment, CopyableEnvironment)
    prompt = environment.reset(0)[0].content
    assert prompt.startswith("You are playing Guess The Number.") and prompt.endswith(
        "Enter your next guess."
    )
    low, high, told = 1, 10, None
    for _ in range(4):
        guess = (low + high) // 2
        told = say(environment, f"I think it is \\boxed{{{guess}}}.")
        if told.done:
            break
        low, high = (guess + 1, high) if "higher" in told.text else (low, guess - 1)
    assert told is not None and told.done and "Congratulations" in told.text
    assert environment.result().success and environment.result().episode_return == pytest.approx(told.reward)


def played(steps: Any) -> list[str]:
    """What the environments of one task were told, in the order of ``steps``: (environment, turn)."""
    told = []
    for environment, turn in steps:
        answer = say(environment, turn)
        told.append(answer.text)
        if answer.done:
            environment.reset(0)
    return told


def test_two_games_at_a_time_are_the_games_alone() -> None:
    """Turn by turn in turn: the board of one is not drawn from the other one's numbers."""
    found = family("game:Minesweeper-v0-random")
    factory, tasks = found.make(), found.tasks("train")[:2]
    turns = [f"\\boxed{{reveal {row} {column}}}" for row, column in ((1, 1), (0, 2), (3, 3), (2, 0))]

    def begun() -> list[Any]:
        environments = [factory(task) for task in tasks]
        prompts = {environment.reset(0)[0].content for environment in environments}
        assert len(prompts) == 2
        return environments

    alone = [played((environment, turn) for turn in turns) for environment in begun()]
    mixed = played((environment, turn) for turn, environment in product(turns, begun()))
    assert [mixed[0::2], mixed[1::2]] == alone and alone[0] != alone[1]


@pytest.mark.parametrize("settings", [{}, {"action_format": "tag"}, {"action_format": "raw"}])
def test_a_game_that_lists_its_moves_as_words_is_played(settings: Any) -> None:
    found = family("game:Sokoban-v0-easy", **settings)
    environment = found.make()(found.tasks("train")[0])
    prompt = environment.reset(0)[0].content
    assert "Sokoban" in prompt
    is_tag = settings.get("action_format") == "tag"
    assert ("The actions are: up, down, left, right." in prompt) == is_tag
    for word in ("up", "left"):
        turn = f"<action>\\boxed{{{word}}}</action>" if is_tag else f"I go \\boxed{{{word}}}."
        result = say(environment, turn)
        assert not result.done and word in result.text
