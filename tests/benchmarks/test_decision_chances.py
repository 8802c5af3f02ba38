"""Counting of decisions on paths that are written out."""

import pytest
from benchmarks.decision_chances import Counts, table
from benchmarks.decisions import Lock, rewarded

from outrider.types import Origin, Step
from outrider.viewer.records import TraceRow

EXPERT = [Step(text="", observation=one) for one in ("first", "second", "")]


def path(*nodes: tuple[Origin, str], episode_return: float = 0.0) -> list[TraceRow]:
    return [
        TraceRow(step=1, task_key="", trace_id="1/0", node_id=number, parent_id=number - 1, rollout=0,
                 origin=origin, text=text, episode_return=episode_return if number == len(nodes) else None)
        for number, (origin, text) in enumerate([(Origin.PROMPT, "?"), *nodes])
    ]  # fmt: skip


TURN = (Origin.POLICY, "")


def seen(text: str) -> tuple[Origin, str]:
    return (Origin.ENVIRONMENT, f"\n{text}\n")


def test_decisions_are_counted_until_the_first_wrong_one() -> None:
    counts = Counts()
    counts.add(path(TURN, seen("first"), TURN, seen("second"), TURN, episode_return=1.0), EXPERT)
    counts.add(path(TURN, seen("first"), TURN, seen("other"), TURN, episode_return=1.0), EXPERT)
    counts.add(path(TURN, seen("first"), TURN, seen("second"), TURN), EXPERT)
    counts.add(path(TURN, seen("other"), TURN, seen("first"), TURN), EXPERT)
    assert (counts.tried, counts.right) == ([4, 3, 2], [3, 2, 1])
    assert (counts.num, counts.on_path, counts.detours) == (4, 1, 1)
    assert counts.chances == pytest.approx((3 / 4, 2 / 3, 1 / 2))


def test_a_retrieved_step_is_no_decision_of_the_policy() -> None:
    counts = Counts()
    found = (Origin.BUFFER, "<search>x</search>\nsecond\n")
    counts.add(path(TURN, seen("first"), found, TURN, episode_return=1.0), EXPERT)
    counts.add(path(TURN, seen("first"), (Origin.BUFFER, "of another task"), TURN), EXPERT)
    assert (counts.tried, counts.right) == ([2, 0, 1], [2, 0, 1])
    assert (counts.on_path, counts.detours) == (1, 0)


def test_the_prediction_is_the_recursion_of_the_page() -> None:
    """H = p1 f2, f2 = (1 - q) p2 f3 + q p3, f3 = p3, because nothing is retrieved at the last decision."""
    first, second, third, q = 0.8, 0.6, 0.4, 0.7
    lock = Lock(chances=(first, second, third), num_turns=3, probability=q, is_strict=True, only_known=True)
    wanted = first * ((1 - q) * second * third + q * third)
    assert rewarded(lock) == pytest.approx(wanted, abs=1e-12)
    counts = Counts(tried=[10, 10, 10], right=[8, 6, 4], num=10, on_path=2, detours=1)
    assert f"{100 * wanted:.1f} %" in table(counts, counts, probability=q)
