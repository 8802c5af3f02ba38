"""Counting of decisions on paths that are written out."""

import pytest
from benchmarks.decision_chances import Counts, harmless_table, table
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


def test_in_a_game_a_decision_stays_open_until_it_is_made() -> None:
    counts = Counts()
    counts.add(
        path(TURN, seen("other"), TURN, seen("first"), (Origin.BUFFER, "go"), seen("second"), TURN,
             seen("no"), TURN, episode_return=1.0),
        EXPERT, is_strict=False,
    )  # fmt: skip
    counts.add(path(TURN, seen("first"), TURN, episode_return=1.0), EXPERT, is_strict=False)
    assert (counts.tried, counts.right) == ([3, 1, 2], [2, 0, 1])
    assert (counts.num, counts.on_path, counts.detours) == (2, 1, 1)


def test_the_prediction_of_a_game_is_that_of_a_lock_with_spare_turns() -> None:
    """Two decisions, three turns, p = q = 1/2; without retrieval two or three of three turns are right."""
    counts = Counts(tried=[4, 4], right=[2, 2], num=4, on_path=1, detours=1)
    text = harmless_table({2: counts}, {2: counts}, probability=0.5, num_turns=3)
    assert "| 2 | 4 and 4 | 0.50, 0.50 | 50.0 % | 50.0 % |" in text
    two_turns_for_the_last = 1 - 0.5**2
    # the first turn is the policy's; if it is wrong, a step may be retrieved before each of the others
    after_a_wrong_one = 0.5 * (0.5 * 0.5 + 0.5 * (0.5 * 0.5)) + 0.5 * two_turns_for_the_last
    share = 0.5 * two_turns_for_the_last + 0.5 * after_a_wrong_one
    assert f"| {100 * share:.1f} % | 50.0 % |" in text
