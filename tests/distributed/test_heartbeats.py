"""A worker that does not answer: one that works is not silent, and where it was is known."""

import os
import re
import time
from typing import Any

import pytest

from outrider.distributed import rollouts
from outrider.distributed.ray_session import SharedRolloutStatus, cpu_seconds, read_location
from outrider.distributed.rollouts import HeartbeatMonitor
from outrider.rollout.hooks import RolloutStatus
from tests.distributed.forked_ranks import CONTEXT


class Unanswered:
    """A Ray, and a worker of it, that never answers a heartbeat."""

    def __init__(self) -> None:
        self.beat = self

    def remote(self) -> str:
        return "beat"

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], references


def beats_of(
    monkeypatch: pytest.MonkeyPatch, *, cpu_share: float, notes: list[str]
) -> tuple[HeartbeatMonitor, list[float]]:
    now = [0.0]
    monkeypatch.setattr(rollouts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rollouts, "cpu_seconds", lambda pid: cpu_share * now[0])
    monkeypatch.setattr(rollouts, "read_location", lambda pid: "task/3: an environment's step")
    ray = Unanswered()
    beats = HeartbeatMonitor(
        ray, {"rollout worker 0": ray}, limit_s=4.0, rollout_status=RolloutStatus(),
        on_finished=lambda num: None,
        busy_s=60.0, find_pid=lambda name: 1, note=notes.append,
    )  # fmt: skip
    return beats, now


def silent_after(beats: HeartbeatMonitor, now: list[float]) -> float:
    while not (gone := beats()):
        now[0] += 0.5
        assert now[0] < 1000
    assert "last seen at task/3: an environment's step; " in str(gone["rollout worker 0"])
    return now[0]


def test_a_busy_worker_counts_as_silent_only_after_the_step_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    assert 64 < silent_after(*beats_of(monkeypatch, cpu_share=0.2, notes=notes)) <= 70
    [line] = notes
    assert "works but has not answered for 4 s" in line and "task/3: an environment's step" in line


def test_an_idle_worker_counts_as_silent_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assert silent_after(*beats_of(monkeypatch, cpu_share=0.01, notes=notes)) <= 5
    assert notes == []


def _hold_the_lock(pipe: Any) -> None:
    places = SharedRolloutStatus()
    places.set("task/3", "the wait for a batch")
    places.set("task/3", "an environment's step")
    pipe.send("ready")
    re.match(r"(a+)+$", "a" * 60 + "b")


def test_location_and_processor_time_of_a_blocked_process_are_readable() -> None:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_hold_the_lock, args=(there,), daemon=True)
    process.start()
    pid = process.pid
    assert pid is not None
    try:
        assert here.poll(60) and here.recv() == "ready"
        before, until = cpu_seconds(pid), time.monotonic() + 60
        assert before is not None
        while (cpu_seconds(pid) or 0.0) < before + 0.2:
            assert time.monotonic() < until
        assert read_location(pid) == "task/3: an environment's step"
    finally:
        process.kill()
        process.join(60)
    assert cpu_seconds(pid) is None and read_location(pid) is None


def test_a_long_location_is_cut() -> None:
    places = SharedRolloutStatus()
    assert read_location(os.getpid()) is None
    places.set("\ud800" + "x" * 2000, "an environment's step")
    assert read_location(os.getpid()) == "?" + "x" * 511
