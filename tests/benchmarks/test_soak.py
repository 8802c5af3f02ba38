"""The soak in its short form; the long one is a command (benchmarks/soak.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.kills import read
from benchmarks.soak_faults import Faults
from benchmarks.soak_measure import descendants, growth, held

from benchmarks import soak, soak_faults
from outrider.errors import EnvironmentFault, ToolFault
from outrider.training import setup as start
from outrider.training.trainer import Trainer


@pytest.mark.long
def test_a_run_with_all_faults_releases_its_resources_and_the_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--out", str(tmp_path), "--cases", "arpo", "--each", "32", "--every", "32"]
    # of tests that ran in this process: warm workers, some of which may end meanwhile
    before = len(descendants(os.getpid()))
    soak.main([*given, "--rollouts", "32"])
    first = read(tmp_path / "soak.jsonl")
    assert [one["where"] for one in first] == [
        "running",
        "closed",
    ] and "| 32 | arpo |" in capsys.readouterr().out
    # the Python tool's servers, which are gone when the run is closed
    assert first[0]["processes"] > first[1]["processes"] and sum(first[1]["outcomes"].values()) == 32
    assert first[1]["processes"] <= before and first[1]["temporary"] == 0 and first[1]["faults"]
    soak.main([*given, "--rollouts", "32"])  # nothing is left to do
    assert read(tmp_path / "soak.jsonl") == first


def test_a_stopped_run_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM ends a run with status 0: it was counted as played."""
    train = Trainer.train

    def stopped(trainer: Trainer) -> None:
        trainer.stop.set()
        train(trainer)

    monkeypatch.setattr(start.Trainer, "train", stopped)
    with pytest.raises(SystemExit, match="was stopped or failed, with status 0; the same command continues"):
        soak.main(["--out", str(tmp_path), "--cases", "grpo", "--each", "32", "--rollouts", "32"])
    assert read(tmp_path / "soak.jsonl") == []


@pytest.mark.slow
def test_two_thousand_rollouts(tmp_path: Path) -> None:
    assert soak.main(["--out", str(tmp_path), "--rollouts", "2000", "--each", "200"]) == 0


def line(run: int, case: str, memory: float, files: int = 5, process: int = 0) -> dict[str, object]:
    held_ = {"memory_mib": memory, "processes": 0, "threads": 7, "ports": 0, "files": files, "temporary": 0}
    return {
        "process": process,
        "run": run,
        "case": case,
        "where": "closed",
        "rollouts": 500,
        **held_,
        "faults": {},
        "outcomes": {},
    }


def test_growth_is_measured_after_the_warm_up_and_detects_a_leak() -> None:
    early = [line(0, "arpo", 100), line(1, "empo2", 200, files=4), line(2, "arpo", 400, files=5)]
    calm = [*early, line(3, "empo2", 500), line(4, "arpo", 505), line(5, "empo2", 500)]
    assert soak.growths(calm) == {
        "memory_mib": pytest.approx(0.01), "processes": 0, "threads": 0, "ports": 0, "files": 0,
        "temporary": 0,
    }  # fmt: skip
    again = [
        line(6 + number, case, 400, process=1)
        for number, case in enumerate(("arpo", "empo2", "arpo", "empo2"))
    ]
    grown = soak.growths([*calm, *again, line(10, "arpo", 480, files=9, process=1)])
    assert grown["memory_mib"] == pytest.approx(0.2) and grown["files"] == 4
    assert not any(soak.growths([*early, *again[:3]]).values())  # nothing but warm-ups
    assert (
        soak.table(calm).splitlines()[-1]
        == "| 3000 | empo2 | 500 / 500 | 0 / 0 | 7 / 7 | 0 / 0 | 5 / 5 | 0 |"
    )
    assert (
        "| 1.00 % | 0 | 0 | 0 | 0 | 0 |" in soak.growth_table(soak.growths(calm))
        and growth([]) == growth([1.0]) == 0.0
    )


def test_held_resources_are_measured(tmp_path: Path) -> None:
    before = held(temporary=tmp_path)
    (tmp_path / "left").touch()
    read_end, write_end = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        after = held(temporary=tmp_path)
        assert child.pid in descendants(os.getpid())
        assert (after.processes - before.processes, after.temporary - before.temporary) == (1, 1)
        assert after.files - before.files >= 3 and after.memory_mib > 1
    finally:
        child.communicate(b"\n")
        os.close(read_end)
        os.close(write_end)
    assert child.pid not in descendants(os.getpid())


def test_faults_are_drawn_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_faults.time, "sleep", lambda seconds: None)
    faults = Faults("a seed")
    raised = []
    for _ in range(2000):
        try:
            faults.around("step")
        except (ToolFault, EnvironmentFault, RuntimeError, SystemExit) as fault:
            raised.append(type(fault))
    assert set(raised) == {ToolFault, EnvironmentFault, RuntimeError, SystemExit}
    slow = sum(num for name, num in faults.counts.items() if name in ("slow step", "step hangs"))
    assert faults.counts.total() == len(raised) + slow
