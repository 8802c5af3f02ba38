"""EMPO² with ``novelty = "rnd"``: the bonus in the return, its checkpoint, and what it leaves alone."""

import numpy as np
import pytest

from outrider.algorithms.exploration import Empo2Settings
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.memory.novelty import NoveltyStore, RandomDistillation
from outrider.metrics.registry import declared_metric
from outrider.trace import Trace
from tests.algorithms.tip_groups import algorithm, played

KNOWN = [["start", "kitchen"]] * 4


def intrinsic(trace: Trace) -> list[float]:
    return [leaf.intrinsic for leaf, _ in trace.rollouts()]


def test_the_default_counts() -> None:
    assert validate(Empo2Settings, {}).novelty == "count"
    assert isinstance(algorithm().novelty, NoveltyStore)


def test_the_intrinsic_return_is_the_coefficient_times_the_scaled_errors() -> None:
    method, twin = (algorithm(novelty="rnd", intrinsic_coefficient=0.5) for _ in range(2))
    told = [["start", "kitchen"], ["start", "kitchen"], ["start", "kitchen"], ["start", "garden"]]
    trace = played([0.0] * 4, told)
    credit = method.assign_advantages(trace)
    assert isinstance(twin.novelty, RandomDistillation)
    texts = [text for states in told for text in states]
    errors = np.array(twin.novelty.errors(list(HashEmbedder().embed(texts))))
    worth = (errors / np.sqrt((errors**2).mean())).reshape(4, 2).sum(axis=1)
    assert intrinsic(trace) == pytest.approx(list(0.5 * worth))
    assert credit.measurements["tips/novelty_error"] == pytest.approx(list(errors))
    assert declared_metric("tips/novelty_error") and "tips/state_visits" not in credit.measurements
    assert credit.advantages.has_signal and len(set(intrinsic(trace))) == 2


def test_a_new_room_is_worth_more_than_those_where_all_have_been() -> None:
    method = algorithm(novelty="rnd")
    first = played([0.0] * 4, KNOWN)
    method.assign_advantages(first)
    for _ in range(30):
        method.assign_advantages(played([0.0] * 4, KNOWN))
    trace = played([0.0] * 4, [["start", "kitchen"]] * 3 + [["start", "garden"]])
    advantages = method.assign_advantages(trace).advantages.values
    assert intrinsic(trace)[0] < 0.05 * intrinsic(first)[0] and intrinsic(trace)[3] > 20 * intrinsic(trace)[0]
    assert advantages[3] > 0 > advantages[0]


def test_equal_rollouts_are_a_tie_and_without_pay_for_ties_the_predictor_learns_all_the_same() -> None:
    assert (
        algorithm(novelty="rnd").assign_advantages(played([0.0] * 4, KNOWN)).advantages.reason == "no_spread"
    )
    told = [["start", "kitchen"]] * 3 + [["start", "garden"]]
    paid, unpaid = algorithm(novelty="rnd"), algorithm(novelty="rnd", intrinsic_where_tied=False)
    for _ in range(3):
        seen, unseen = (one.assign_advantages(played([0.0] * 4, told)) for one in (paid, unpaid))
        assert seen.measurements["tips/novelty_error"] == unseen.measurements["tips/novelty_error"]
        assert seen.advantages.has_signal and not unseen.advantages.has_signal


def test_a_restored_algorithm_goes_on_bit_for_bit() -> None:
    whole, first, second = (algorithm(novelty="rnd") for _ in range(3))
    for one in (whole, first):
        one.assign_advantages(played([0.0] * 4, KNOWN))
    second.restore(*first.state())
    told = [["start", "attic"], ["start"], ["start", "attic"], ["start", "kitchen"]]
    traces = [played([0.0, 1.0, 0.0, 0.0], told) for _ in range(2)]
    for one, trace in zip((whole, second), traces, strict=True):
        one.assign_advantages(trace)
    assert intrinsic(traces[0]) == intrinsic(traces[1])
