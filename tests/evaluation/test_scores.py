"""Scores of a panel: against enumeration and float64 references, and faults apart from zeros."""

import itertools
import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.evaluation.results import (
    SampleResult,
    majority_at_k,
    pass_at_k,
    summarise,
    tool_productivity,
)
from outrider.types import Outcome

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "arpo_answers.json").read_text()
)


def result(key: str, sample: int, score: float, **options: Any) -> SampleResult:
    chosen = {"outcome": Outcome.FINISHED, "score": score, "success": score == 1.0, **options}
    return SampleResult(task_key=key, sample=sample, **chosen)


def fault(key: str, sample: int, outcome: Outcome = Outcome.ENGINE_FAULT) -> SampleResult:
    return SampleResult(task_key=key, sample=sample, outcome=outcome, detail="gone")


@pytest.mark.parametrize("num", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num: int) -> None:
    for correct, k in itertools.product(range(num + 1), range(1, num + 1)):
        draws = [any(index < correct for index in drawn) for drawn in itertools.combinations(range(num), k)]
        assert pass_at_k(num_samples=num, num_correct=correct, k=k) == pytest.approx(
            sum(draws) / len(draws), abs=1e-15
        )


@given(st.integers(1, 300), st.data())
def test_pass_at_k_against_the_product_of_the_paper(num: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    failures = np.arange(num - correct + 1, num + 1, dtype=np.float64)
    expected = 1.0 if num - correct < k else 1.0 - float(np.prod(1.0 - k / failures))
    assert pass_at_k(num_samples=num, num_correct=correct, k=k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over binomial draws of n samples is 1 - (1 - p)^k; the plain "any of n" is far from that."""
    n, k, p = 8, 3, 0.2
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(weight * pass_at_k(num_samples=n, num_correct=c, k=k) for c, weight in enumerate(weights))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("num", "correct", "k"), [(0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_that_is_not_defined(num: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(num_samples=num, num_correct=correct, k=k)


@pytest.mark.parametrize(
    ("labels", "successes", "expected"),
    [
        (["5"], [True], 1.0),
        (["5", "5", "6"], [True, True, False], 1.0),
        (["5", "6", "6"], [True, False, False], 0.0),
        (["5", "6"], [True, False], 0.5),
        (["", "", "5"], [False, False, True], 1.0),
        (["", ""], [False, False], 0.0),
        (["x", "x", "y"], [True, False, False], 0.5),
    ],
)
def test_majority(labels: list[str], successes: list[bool], expected: float) -> None:
    assert majority_at_k(labels, successes) == expected
    assert majority_at_k(labels[::-1], successes[::-1]) == expected


@pytest.mark.parametrize(("labels", "successes"), [([], []), (["a"], [True, False])])
def test_majority_of_nothing_is_refused(labels: list[str], successes: list[bool]) -> None:
    with pytest.raises(ValueError, match="majority"):
        majority_at_k(labels, successes)


@pytest.mark.parametrize("case", VECTORS["tool_productivity"])
def test_recorded_tool_productivity(case: dict[str, Any]) -> None:
    results = [
        result(f"t{index}", 0, f1, num_tool_calls=calls)
        for index, (f1, calls) in enumerate(zip(case["f1"], case["tool_counts"], strict=True))
    ]
    found = summarise(results)
    assert found.tool_productivity == pytest.approx(case["tool_productivity"], abs=1e-10)
    assert found.tool_usage_rate == pytest.approx(case["tool_usage_rate"], abs=1e-12)
    assert found.num_tool_calls == pytest.approx(case["tool_call"], abs=1e-12)


def test_no_tool_calls_no_productivity() -> None:
    assert tool_productivity(accuracy=1.0, mean_tool_calls=0.0) == 0.0


def test_a_summary_by_hand() -> None:
    results = [
        result("a", 0, 1.0, prediction="5", num_tokens=10, metrics={"em": 1.0}),
        result("a", 1, 0.0, prediction="6", num_tokens=20, metrics={"em": 0.0}),
        result("a", 2, 0.0, prediction="6.0", num_tokens=30, metrics={"em": 0.0}),
        result(
            "b", 0, 1.0, prediction="x", num_tokens=40, metrics={"em": 1.0, "level": 2.0}, num_tool_calls=4
        ),
        fault("b", 1),
        fault("b", 2, Outcome.TOOL_FAULT),
        fault("c", 0),
    ]
    found = summarise(results, ks=(1, 3, 4))
    assert found.num_scored == 4
    assert found.metrics == pytest.approx({"em": (1 / 3 + 1) / 2, "level": 2.0})
    assert (found.num_tokens, found.num_tool_calls, found.tool_usage_rate) == (25.0, 1.0, 0.25)
    assert found.faults == {"engine_fault": 2, "tool_fault": 1}
    assert found.task_scores == pytest.approx({"a": 1 / 3, "b": 1.0})
    assert found.task_passes == {1: pytest.approx({"a": 1 / 3, "b": 1.0}), 3: {"a": 1.0}, 4: {}}
    assert found.task_metrics == {"em": pytest.approx({"a": 1 / 3, "b": 1.0}), "level": {"b": 2.0}}
    assert found.task_majorities == {"a": 0.0, "b": 1.0}  # 6 and 6.0 are one answer
    assert found.outcomes == {"finished": 4}
    # three texts, three labels
    assert summarise(results, normalize=str).task_majorities == {"a": pytest.approx(1 / 3), "b": 1.0}


def test_faults_are_never_zeros() -> None:
    good = [result("a", 0, 1.0), result("b", 0, 1.0)]
    bad = [fault("a", 1), fault("c", 0), fault("d", 0)]
    assert summarise(good).task_scores == summarise([*good, *bad]).task_scores == {"a": 1.0, "b": 1.0}
    nothing = summarise(bad, ks=(1,))
    assert nothing.task_scores == nothing.task_passes[1] == {} and nothing.num_scored == 0
    assert math.isnan(nothing.num_tool_calls) and math.isnan(nothing.tool_usage_rate)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), unique_by=lambda one: one[:2]
    )
)
def test_the_order_of_results_changes_nothing(drawn: list[tuple[str, int, bool]]) -> None:
    results = [result(key, sample, float(ok), prediction=f"{key}{ok}") for key, sample, ok in drawn]
    mixed = results.copy()
    random.Random(0).shuffle(mixed)
    assert repr(summarise(mixed, ks=(1, 2))) == repr(summarise(results, ks=(1, 2)))


def test_two_results_of_one_sample_are_refused() -> None:
    with pytest.raises(ValueError, match="two results of a, sample 0"):
        summarise([result("a", 0, 1.0), fault("a", 0)])


@pytest.mark.parametrize(
    "options",
    [
        {"outcome": Outcome.ENGINE_FAULT, "score": 0.0, "success": False},
        {"outcome": Outcome.FINISHED},
        {"outcome": Outcome.FINISHED, "score": 1.0},
        {"outcome": Outcome.ENGINE_FAULT, "success": False},
        {"outcome": Outcome.ENGINE_FAULT, "answered": Outcome.TOOL_FAULT},
        {"outcome": Outcome.FINISHED, "answered": Outcome.FINISHED, "score": 1.0, "success": True},
        {"outcome": Outcome.FINISHED, "score": math.nan, "success": False},
        {"outcome": Outcome.FINISHED, "score": 0.0, "success": False, "metrics": {"f1": math.inf}},
    ],
)
def test_results_that_contradict_themselves_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"contradict|not finite"):
        SampleResult(task_key="a", sample=0, **options)


def test_results_are_picklable_and_truncated_answers_are_scored() -> None:
    kept = result("a", 0, 0.0, outcome=Outcome.TRUNCATED_TOKENS)
    assert pickle.loads(pickle.dumps(kept)) == kept and summarise([kept]).task_scores == {"a": 0.0}
