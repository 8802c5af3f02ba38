"""Two methods in one run reach what neither finds alone: locks that experts open, and behind them hidden
places where experts and policy give up.

Retrieval opens the locks, and its rollouts give up before the hidden places. Tips find hidden places, and no
rollout comes as far as to need one. The reward lies behind both.
"""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.learning_methods import Method
from benchmarks.learning_toys import ARENAS, play

from outrider.algorithms.grpo import GrpoSettings
from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys import TABLE_HEAD, table_row
from tests.toys_expedition import KINDS, KNOWN_LOGIT, ExpeditionRun, expedition, half_way

pytestmark = pytest.mark.slow  # test_three_learn.py has a long test of all methods together

(ARENA,) = [arena for arena in ARENAS if arena.name == "expedition"]
METHODS: dict[str, Method] = {method.key: method for method in ARENA.methods()}
ALONE = ("grpo", "rapo", "empo2")
TOGETHER = "rapo-empo2"


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Objective, group and learning rate are the same for all."""
    set_threads(1)
    played = {
        key: [
            play(ARENA, METHODS[key], seed=seed, max_policy_tokens=ARENA.max_policy_tokens)
            for seed in range(10)
        ]
        for key in (*ALONE, TOGETHER)
    }
    print("\n".join(["", TABLE_HEAD, *(table_row(METHODS[key].name, rows) for key, rows in played.items())]))
    return played


def test_together_they_reach_the_end_without_experts_and_tips(results: dict[str, list[Result]]) -> None:
    """On seven of the ten seeds. A lock whose own draws settle on a wrong action stops the others."""
    returns = [result.expected_return for result in results[TOGETHER]]
    arrived = [value for value in returns if value >= 0.8]
    assert len(arrived) >= 0.6 * len(returns) and sum(arrived) / len(arrived) >= 0.95, returns


@pytest.mark.parametrize("key", ALONE)
def test_alone_they_hardly_ever_do(results: dict[str, list[Result]], key: str) -> None:
    """On one (RAPO) and two (EMPO²) of the ten seeds, by a lucky reward; GRPO on none."""
    returns = [result.expected_return for result in results[key]]
    assert sum(value >= 0.05 for value in returns) <= 0.2 * len(returns), returns


def test_the_chance_of_an_untrained_policy_is_the_product_over_its_rooms(tmp_path: Path) -> None:
    run = ExpeditionRun(expedition(0), GrpoSettings(), folder=tmp_path)
    known = np.exp(KNOWN_LOGIT) / (np.exp(KNOWN_LOGIT) + 19)
    hidden = 1 / (np.exp(4.85) + 3)  # one of three places, or to give up
    chance = {"k": known, "l": 1 / 20, "h": hidden}
    assert run.expected_return() == pytest.approx(np.prod([chance[kind] for kind in KINDS]), rel=1e-3)
    run.buffer.close()


def test_experts_open_the_locks_and_were_never_rewarded() -> None:
    (task,) = expedition(0).tasks()
    expert = half_way(task)
    assert expert.reward == 0.0 and len(expert.steps) == KINDS.index("h") + 1
    assert "".join(step.text for step in expert.steps[:-1]) == str(task.metadata["combination"])[:5]
    assert expert.steps[-1].is_terminal and not any(step.is_terminal for step in expert.steps[:-1])
