"""How often RAPO is rewarded by the number of decisions: the recursion against every course of a rollout, and
against the real hook.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.decisions import Lock, rewarded
from benchmarks.toy_decisions import HEADER, SERIES, Series, row

from outrider.training.policy import set_threads
from outrider.types import Origin
from tests.toy_result import Result
from tests.toys import ACTIONS, ROOMS, Toy, ToyRun, grpo, play, rapo

NUM_ROLLOUTS = 1200
LOCKS = [
    pytest.param(
        Lock(chances=chances, num_turns=turns, is_strict=strict), id=f"{len(chances)} of {turns}, {strict=}"
    )
    for strict in (False, True)
    for chances, turns in (
        ((0.3,), 1),
        ((0.3, 0.6), 2),
        ((0.3, 0.5, 0.7), 3),
        ((0.2, 0.3, 0.5, 0.8), 4),
        ((0.4, 0.6, 0.3), 5),
    )
]


def every_course(lock: Lock) -> dict[frozenset[int], float]:
    """Probability of a rewarded rollout by the doors that the policy opened, from all outcomes of all its
    draws.
    """
    found: dict[frozenset[int], float] = {}
    for right in product((False, True), repeat=lock.num_turns):
        for retrieves in product((False, True), repeat=lock.num_turns - 1):
            own, chance = one_course(lock, right, (False, *retrieves))
            if own is not None:
                found[own] = found.get(own, 0.0) + chance
    return found


def one_course(
    lock: Lock, right: tuple[bool, ...], retrieves: tuple[bool, ...]
) -> tuple[frozenset[int] | None, float]:
    """The doors that the policy opened (None without a reward), and the probability of these draws; draws not
    needed halve it.
    """
    door, chance, own, is_over = 0, 1.0, set(), False
    last = len(lock.chances) - 1
    for turn, (is_right, is_retrieved) in enumerate(zip(right, retrieves, strict=True)):
        if is_over or door > last:
            chance *= 0.5 if turn == 0 else 0.25  # what is drawn after the end is summed over
            continue
        if turn:
            chance *= lock.probability if is_retrieved else 1 - lock.probability
        if is_retrieved and door < last:
            door += 1
        elif is_retrieved and lock.is_strict:
            is_over = True
            chance *= 0.5
            continue
        chance *= lock.chances[door] if is_right else 1 - lock.chances[door]
        own |= {door + 1} if is_right else set()
        is_over = lock.is_strict and not is_right
        door += is_right
    return (frozenset(own), chance) if door > last else (None, chance)


@pytest.mark.parametrize("lock", LOCKS)
def test_the_recursion_equals_the_sum_over_all_courses(lock: Lock) -> None:
    courses = every_course(lock)
    assert rewarded(lock) == pytest.approx(sum(courses.values()), rel=1e-12)
    for own in range(1, len(lock.chances) + 1):
        expected = sum(chance for doors, chance in courses.items() if own in doors)
        assert rewarded(lock, own=own) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_the_hook_is_rewarded_as_often_as_the_recursion(strict: bool, tmp_path: Path) -> None:
    """Untrained hybrid rollouts of the real loop, four standard errors."""
    set_threads(1)
    toy = Toy(seed=0, depth=4, num_turns=4, is_strict=strict, chance=0.6)
    run = ToyRun(toy, rapo(), folder=tmp_path)
    [trace] = (
        run.scheduler(training=True).run(run.tasks, modes=("hybrid",) * NUM_ROLLOUTS, training_step=0).traces
    )
    run.buffer.close()
    combination = str(run.tasks[0].metadata["combination"])
    counts = np.zeros(toy.depth + 1)
    for leaf, path in trace.rollouts():
        door, own = 0, np.zeros(toy.depth)
        for node in path:
            tried = (
                node.metadata["action"]
                if node.origin is Origin.BUFFER
                else node.message.content
                if node.message
                else ""
            )
            if node.origin in (Origin.POLICY, Origin.BUFFER) and tried == combination[door]:
                own[door] += node.origin is Origin.POLICY
                door += 1
        assert leaf.success == (door == toy.depth)
        counts += leaf.success * np.append(1.0, own)
    lock = Lock(chances=(0.6,) * 4, num_turns=4, is_strict=strict)
    expected = np.array([rewarded(lock), *(rewarded(lock, own=own) for own in range(1, 5))])
    errors = np.sqrt(expected * (1 - expected) / NUM_ROLLOUTS)
    np.testing.assert_array_less(np.abs(counts / NUM_ROLLOUTS - expected), 4 * errors)


def test_retrieval_helps_with_two_hard_decisions_and_not_with_one() -> None:
    """The page's statements: the policy knows all decisions but those with chance p."""
    p, q = 0.01, 0.5
    one = Lock(chances=(1.0, p, 1.0), num_turns=3, is_strict=True)
    on_policy = rewarded(replace(one, probability=0.0))
    # A retrieved step in front of the last decision is a wrong one: the third factor.
    assert on_policy == pytest.approx(p) and rewarded(one, own=2) == pytest.approx((1 - q) * p * (1 - q))
    assert rewarded(one) > 40 * on_policy  # yet nothing of it is the policy's own
    two = Lock(chances=(1.0, p, 1.0, p, 1.0), num_turns=5, is_strict=True)
    assert rewarded(two, own=2) > 10 * rewarded(replace(two, probability=0.0))
    assert rewarded(replace(one, probability=1.0), own=2) == 0.0


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_the_locks_have_the_chances_of_the_table(series: Series, tmp_path: Path) -> None:
    """Chance of a reward before training, by the exact return of the toy; the optimum is 1."""
    for depth in series.depths:
        run = ToyRun(series.arena(depth).toy(3), rapo(), folder=tmp_path / str(depth))
        run.buffer.close()
        before = run.expected_return()
        assert before == pytest.approx(series.chance(depth) ** depth, rel=1e-4)
        assert series.product is None or before == pytest.approx(series.product, rel=1e-4)
        assert before == pytest.approx(rewarded(replace(series.lock(depth), probability=0.0)), rel=1e-4)
        task = run.tasks[0]
        with torch.no_grad():
            for room, action in zip(
                str(task.metadata["rooms"]), str(task.metadata["combination"]), strict=True
            ):
                run.model.table.weight[ROOMS.index(room), ACTIONS.index(action)] = 30.0
        assert run.expected_return() == pytest.approx(1.0, abs=1e-9)


def test_a_row_of_the_table() -> None:
    few = Result(
        expected_return=0.25, sampled_return=0.2, num_policy_tokens=10, num_rollouts=50, num_steps=1,
        num_on_policy_rewards=1, num_hybrid_rewards=5,
    )  # fmt: skip
    series = SERIES[1]
    assert series.is_strict
    found = row(series, 2, {"grpo": [few], "rapo": [few, replace(few, expected_return=0.75)]})
    assert found[:5] == ("2", "0.0100", "1.0", "0.5", "0.5, 0.5")
    assert found[5:] == ("0.250 (0.250 to 0.250)", "0.500 (0.250 to 0.750)", "2.00 %", "2.00 % / 10.00 %")
    assert len(found) == len(HEADER)


@pytest.mark.parametrize(
    "chances", [(0.3, 0.6), (0.3, 0.5, 0.7), (0.2, 0.3, 0.5, 0.8), (0.9, 0.2, 0.5, 0.8, 0.4, 0.7)]
)
def test_the_formula_of_the_page(chances: tuple[float, ...]) -> None:
    """f_D = s p_D with s = 1 - q, as where the wrong step is done and ends the episode; H_d without the
    second term of f_d.
    """
    lock = Lock(chances=chances, num_turns=len(chances), is_strict=True, probability=0.4)
    q, last = lock.probability, len(chances)

    def hybrid(own: int | None) -> float:
        f = {last + 1: 1.0, last: (1 - q) * chances[-1]}
        for d in range(last - 1, 1, -1):
            f[d] = (1 - q) * chances[d - 1] * f[d + 1] + (q * chances[d] * f[d + 2] if d != own else 0.0)
        return chances[0] * f[2]

    assert rewarded(lock) == pytest.approx(hybrid(None), rel=1e-12)
    for own in range(1, last + 1):
        assert rewarded(lock, own=own) == pytest.approx(hybrid(own), rel=1e-12)
    assert hybrid(1) == hybrid(last) == hybrid(None)


@pytest.mark.parametrize("depth", range(2, 9))
def test_an_ignored_wrong_step_leaves_one_decision_to_chance(depth: int) -> None:
    """Strict: the power of p is that of the decisions that cannot be retrieved. Lenient: the last one
    alone.
    """

    def power(strict: bool) -> float:
        low, high = (
            rewarded(Lock(chances=(p,) * depth, num_turns=depth, is_strict=strict)) for p in (1e-6, 1e-5)
        )
        return float(np.log10(high / low))

    assert power(strict=True) == pytest.approx((depth + 2) // 2, abs=1e-3)
    assert power(strict=False) == pytest.approx(1, abs=1e-3)
    p = 1e-3
    assert rewarded(Lock(chances=(p,) * depth, num_turns=depth)) >= 0.5 ** (depth - 1) * p


def test_with_one_decision_rapo_is_grpo() -> None:
    """Nothing is retrieved before the only turn, so both play and learn the same."""
    set_threads(1)
    toy = Toy(seed=1, depth=1, num_turns=1, chance=0.3)
    with_retrieval, without = (
        play(settings, seed=1, toy=toy, max_policy_tokens=60) for settings in (rapo(), grpo())
    )
    assert with_retrieval == without and without.num_on_policy_rewards > 0


@pytest.mark.slow
def test_four_decisions_gain_more_than_two_of_the_same_rarity() -> None:
    """As recorded (docs/algorithms/details/rapo_measured.md): a wrong turn does nothing, one rollout in
    10,000 is rewarded at the start.
    """
    set_threads(1)
    [equal] = [series for series in SERIES if series.name == "decisions-equal"]

    def gain(depth: int) -> float:
        tokens = equal.max_policy_tokens(depth)
        toys = [equal.arena(depth).toy(seed) for seed in range(5)]
        returns = [
            [play(settings, seed=toy.seed, toy=toy, max_policy_tokens=tokens).expected_return for toy in toys]
            for settings in (rapo(), grpo())
        ]
        return float(np.mean(returns[0]) - np.mean(returns[1]))

    assert gain(4) > gain(2) > 0.0
