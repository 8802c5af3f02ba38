"""Restarts of a run after a fault of its processes, and their limit."""

from collections.abc import Callable
from contextlib import ExitStack
from threading import Event

import pytest

from outrider.errors import ClusterFault, EngineFault, NoRepair
from outrider.training.restarts import Allowance, run_with_restarts


@pytest.fixture(autouse=True)
def _collect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt has a model, and all tests of this process together have much garbage."""
    monkeypatch.setattr("outrider.training.restarts.gc.collect", lambda: 0)


def played(
    ends: list[Exception | None], *, limit: int = 2, times: list[float] | None = None, stop: bool = False
) -> tuple[list[int], list[str], list[str]]:
    """Attempts that end like this, one after the other; their numbers, the calls in order, and the notes."""
    begun: list[int] = []
    happened: list[str] = []
    notes: list[str] = []
    asked, moments = Event(), iter(times or [0.0] * len(ends))

    def begin(number: int, closing: ExitStack) -> Callable[[], None]:
        begun.append(number)
        closing.callback(happened.append, f"closed {number}")

        def train() -> None:
            happened.append(f"trained {number}")
            if stop:
                asked.set()
            end = ends[number]
            if end is not None:
                raise end

        return train

    try:
        allowance = Allowance(limit, clock=lambda: next(moments))
        run_with_restarts(begin, allowance=allowance, stop=asked, note=notes.append)
    except (ClusterFault, EngineFault) as fault:
        happened.append(f"raised {fault}")
    return begun, happened, notes


FAULT = ClusterFault("trainer rank 1 died in update; continue from the newest checkpoint with --resume")


AFTER = " (after 2 repairs within an hour, cluster.max_restarts)"


def test_parts_are_closed_before_others_are_made() -> None:
    begun, happened, notes = played([FAULT, None])
    assert begun == [0, 1]
    assert happened == ["trained 0", "closed 0", "trained 1", "closed 1"]
    assert notes == [
        "trainer rank 1 died in update; all processes restart from the newest checkpoint, "
        "repair 1 of 2 within an hour"
    ]


@pytest.mark.parametrize(
    ("limit", "times", "num"),
    [(0, None, 1), (2, None, 3), (2, [0.0, 1800.0, 3700.0, 3701.0, 3702.0], 4), (5, None, 5)],
)
def test_the_hour_has_a_limit(limit: int, times: list[float] | None, num: int) -> None:
    begun, happened, _ = played([FAULT] * 4 + [None], limit=limit, times=times)
    assert begun == list(range(num))
    assert happened[-1] == ("closed 4" if num == 5 else f"raised {FAULT}{AFTER if limit else ''}")


def test_other_errors_and_a_stop_end_the_run() -> None:
    assert played([EngineFault("gap"), None])[1] == ["trained 0", "closed 0", "raised gap"]
    assert played([FAULT, None], stop=True)[1][-1] == f"raised {FAULT}"


def test_a_set_up_that_fails_is_not_tried_again() -> None:
    numbers = []

    def begin(number: int, closing: ExitStack) -> Callable[[], None]:
        numbers.append(number)
        raise ClusterFault("no processors")

    with pytest.raises(ClusterFault, match="no processors"):
        run_with_restarts(begin, allowance=Allowance(3), stop=Event(), note=print)
    assert numbers == [0]


def test_what_is_replaced_and_what_begins_anew_have_one_count() -> None:
    """A process in the place of another one, then all anew, then one more: the third is one too many."""
    allowance = Allowance(2, clock=lambda: 0.0)
    notes: list[str] = []

    def begin(number: int, closing: ExitStack) -> Callable[[], None]:
        def train() -> None:
            allowance.spend(FAULT)
            raise FAULT

        return train

    with pytest.raises(NoRepair, match=r"after 2 repairs within an hour, cluster\.max_restarts\)$"):
        run_with_restarts(begin, allowance=allowance, stop=Event(), note=notes.append)
    assert [line.rpartition(", ")[2] for line in notes] == ["repair 2 of 2 within an hour"]
