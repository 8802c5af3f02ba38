"""Three methods in one run reach what no two of them find at equal policy tokens.

Retrieval opens the lock, forks at the crossroads spend no march, and tips find the hidden place; the vault
behind them is tried often enough only where all three are there.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.learning_methods import Method
from benchmarks.learning_toys import ARENAS, play

from outrider.algorithms.grpo import GrpoSettings
from outrider.training.policy import set_threads
from outrider.types import Message
from tests.tiny import tiny_tokenizer
from tests.toy_result import Result
from tests.toys import ACTIONS, ROOMS, TABLE_HEAD, table_row
from tests.toys_memory import GIVE_UP, PLACES
from tests.toys_quest import KINDS, Quest, QuestModel, QuestRun, QuestToy, half_way

(ARENA,) = [arena for arena in ARENAS if arena.name == "quest"]
METHODS: dict[str, Method] = {method.key: method for method in ARENA.methods()}
ALL = "rapo-arpo-empo2"
FEWER = tuple(key for key in METHODS if key != ALL)
TEN = {key: (range(10), ARENA.max_policy_tokens) for key in METHODS}


def test_the_chance_of_an_untrained_policy_is_the_product_over_its_rooms(tmp_path: Path) -> None:
    toy = QuestToy(seed=0)
    run = QuestRun(toy, GrpoSettings(), folder=tmp_path)
    assert run.expected_return() == pytest.approx(toy.lock * toy.hidden * toy.vault, rel=1e-4)
    run.buffer.close()


def test_a_tip_sends_the_policy_to_the_places(tmp_path: Path) -> None:
    run = QuestRun(QuestToy(seed=0), GrpoSettings(), folder=tmp_path)
    told = f"room {ROOMS[3]}\n<tip>\n- avoid {GIVE_UP}\n</tip>"
    _, room, moved = run.model.read(told)[-1]
    chances = torch.softmax(run.model.table.weight[room].detach().double() + torch.from_numpy(moved), dim=0)
    found = [float(chances[ACTIONS.index(one)]) for one in (*PLACES, GIVE_UP)]
    assert found == pytest.approx([0.308, 0.308, 0.308, 0.076], abs=0.001)
    run.buffer.close()


def test_march_and_crossroads_do_not_learn() -> None:
    tokenizer = tiny_tokenizer()
    weight = QuestModel(tokenizer, len(tokenizer)).table.weight
    weight.sum().backward()
    assert weight.grad is not None
    learns = [bool(row.any()) for row in weight.grad]
    assert learns == [kind in "lhv" for kind in KINDS] + [False] * (len(ROOMS) - len(KINDS))


def test_experts_open_the_lock_and_were_never_rewarded() -> None:
    (task,) = QuestToy(seed=0).tasks()
    expert = half_way(task)
    assert expert.reward == 0.0
    assert [step.text for step in expert.steps[:2]] == task.metadata["right"][:2]
    assert [step.is_terminal for step in expert.steps] == [False, False, False, True]


def test_all_ways_lead_on_from_the_crossroads_and_nothing_else_is_forgiven() -> None:
    (task,) = QuestToy(seed=0).tasks()
    right = task.metadata["right"]
    for room, action in enumerate(right):
        environment = Quest(task)
        environment.reset(0)
        for before in right[:room]:
            environment.step(Message(role="assistant", content=before or "?"))
        answer = environment.step(Message(role="assistant", content="x"))
        assert answer.done is bool(action) and not environment.result().success


@pytest.mark.slow
def test_all_three_soon_find_a_vault_that_is_less_rare() -> None:
    """A test of the code; what ten seeds give on the arena's own toy is tested by `make test-slow`."""
    set_threads(1)
    easier = replace(ARENA, toy=lambda seed: QuestToy(seed=seed, vault=0.05))
    found = play(easier, METHODS[ALL], seed=1, max_policy_tokens=30_000)
    assert found.expected_return >= 0.8 and found.num_rollouts == 128 * found.num_steps, found


@pytest.mark.parametrize("key", ["rapo-arpo", "arpo-empo2"])
def test_a_pair_sees_no_reward_and_learns_nothing(key: str) -> None:
    """Groups whose returns all tie: no learning rate would move them."""
    set_threads(1)
    shorter = replace(ARENA, toy=lambda seed: QuestToy(seed=seed, march=100))
    found = play(shorter, METHODS[key], seed=1, max_policy_tokens=400)
    toy = shorter.toy(1)
    assert isinstance(toy, QuestToy)
    assert found.num_on_policy_rewards == found.num_hybrid_rewards == 0
    assert found.expected_return == pytest.approx(toy.lock * toy.hidden * toy.vault, rel=1e-4)


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Objective, group and learning rate are the same for all."""
    set_threads(1)
    played = {
        key: [play(ARENA, METHODS[key], seed=seed, max_policy_tokens=tokens) for seed in seeds]
        for key, (seeds, tokens) in TEN.items()
    }
    print("\n".join(["", TABLE_HEAD, *(table_row(METHODS[key].name, rows) for key, rows in played.items())]))
    return played


@pytest.mark.slow
def test_all_three_reach_the_end_without_experts_and_tips(results: dict[str, list[Result]]) -> None:
    returns = [result.expected_return for result in results[ALL]]
    assert sum(value >= 0.8 for value in returns) >= 0.8 * len(returns), returns


@pytest.mark.slow
@pytest.mark.parametrize("key", FEWER)
def test_fewer_do_not(results: dict[str, list[Result]], key: str) -> None:
    returns = [result.expected_return for result in results[key]]
    assert max(returns) < 0.05, returns
