"""The promise of ARPO on the smallest task that shows it: what is uncertain after a tool result is sampled
where it is cheap.

A corridor of nine rooms that the policy knows, then a vault with twenty actions that it does not. A rollout
from the prompt writes ten tokens, a fork in front of the vault one. Entropy rises only there; forks at random
places write half a corridor.
"""

import pytest

from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys import TABLE_HEAD, table_row
from tests.toys_branching import branching, plain, play

pytestmark = pytest.mark.slow  # test_three_learn.py has a long test of all methods together

SEEDS = range(10)
FEW_SEEDS = range(1)  # the others take minutes: `make test-slow`
MAX_POLICY_TOKENS = 1500


@pytest.fixture(scope="module", params=[FEW_SEEDS, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    """Three algorithms at the same number of generated tokens, learning rate, clip, aggregation and
    leaves.
    """
    set_threads(1)
    settings = {
        "ARPO": branching(at_random=False),
        "ARPO, random forks": branching(at_random=True),
        "GRPO": plain(),
    }
    played = {
        name: [play(chosen, seed=seed, max_policy_tokens=MAX_POLICY_TOKENS) for seed in request.param]
        for name, chosen in settings.items()
    }
    print("\n".join(["", TABLE_HEAD, *(table_row(name, rows) for name, rows in played.items())]))
    return played


def mean(rows: list[Result]) -> float:
    return sum(row.expected_return for row in rows) / len(rows)


def test_an_untrained_policy_walks_the_corridor_and_guesses_in_the_vault() -> None:
    before = play(plain(), seed=0, max_policy_tokens=0)
    assert before.expected_return == pytest.approx(0.05 * 0.983**9, rel=0.01)


def test_arpo_beats_grpo_at_equal_generated_tokens(results: dict[str, list[Result]]) -> None:
    assert mean(results["ARPO"]) > 0.7
    assert mean(results["ARPO"]) > mean(results["GRPO"]) + 0.2
    ahead = [
        a.expected_return > g.expected_return for a, g in zip(results["ARPO"], results["GRPO"], strict=True)
    ]
    assert sum(ahead) >= 0.9 * len(ahead)


def test_forks_at_random_places_lose_the_gain(results: dict[str, list[Result]]) -> None:
    gain = mean(results["ARPO"]) - mean(results["GRPO"])
    assert mean(results["ARPO, random forks"]) - mean(results["GRPO"]) < 0.5 * gain


def test_all_wrote_the_same_number_of_tokens(results: dict[str, list[Result]]) -> None:
    for rows in results.values():
        assert all(MAX_POLICY_TOKENS <= row.num_policy_tokens < MAX_POLICY_TOKENS + 12 * 10 for row in rows)
