"""The campaigns of kills and damage in their short forms; the long ones are commands (benchmarks/kills.py,
damage.py).
"""

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks import damage, kill_moments, kills
from tests.training.forked import ForkedOutrider


# killed runs are fast, in tests/training/test_resume.py; this is the command that draws the kills
@pytest.mark.slow
def test_killed_runs_end_in_the_same_bits_and_the_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--out", str(tmp_path), "--cases", "empo2"]
    assert kills.main([*given, "--count", "1"]) == 0
    first = kills.read(tmp_path / "kills.jsonl")
    num = sum(len(one["signals"]) for one in first)
    assert num >= 1 and f"| all | {len(first)} |" in capsys.readouterr().out
    assert kills.main([*given, "--count", str(num)]) == 0  # nothing is left to do
    assert kills.read(tmp_path / "kills.jsonl") == first


@pytest.mark.long
def test_damage_is_detected_or_harmless_and_the_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--out", str(tmp_path), "--cases", "empo2"]
    assert damage.main([*given, "--limit", "3"]) == 0, capsys.readouterr().out
    assert damage.main([*given, "--limit", "4"]) == 0, capsys.readouterr().out
    done = kills.read(tmp_path / "damage.jsonl")
    assert len(done) == 4 and "| all | 4 |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hundred_kills_over_all_cases(tmp_path: Path) -> None:
    assert kills.main(["--out", str(tmp_path), "--count", "100"]) == 0


@pytest.mark.slow
def test_every_file_of_a_run_is_damaged(tmp_path: Path) -> None:
    assert damage.main(["--out", str(tmp_path), "--cases", "evolve", "empo2"]) == 0


def met(signal: str, moment: str) -> dict[str, str]:
    return {"signal": signal, "moment": moment}


def test_a_signal_arrives_before_the_drawn_write(tmp_path: Path) -> None:
    whole = ForkedOutrider("init", tmp_path / "whole.toml", prepare=kill_moments.count)
    whole.communicate()
    num = kill_moments.num_writes(whole)
    assert whole.returncode == 0 and num >= 1
    for at in range(num + 1):
        file = tmp_path / f"{at}.toml"
        process = ForkedOutrider("init", file, prepare=partial(kill_moments.send, sent=signal.SIGKILL, at=at))
        process.communicate()
        assert (process.returncode, bool(kill_moments.sent_before(process))) == (
            (-9, True) if at < num else (0, False)
        )
        assert file.exists() == (at == num)


def test_a_signal_before_the_command_does_not_count(tmp_path: Path) -> None:
    """The child swallowed it, and the table had it."""
    process = ForkedOutrider("init", tmp_path / "a.toml", prepare=partial(_wait_for, tmp_path / "go"))
    assert not process.is_ready and process.returned is None
    (tmp_path / "go").touch()
    kill_moments.wait_until_ready(process)
    assert (
        process.is_ready
        and process.communicate()
        and process.returned is not None
        and process.returned[1] == 0
    )
    assert (
        kills._came_in_time(process, process.returned[0] + 1)
        == ""
        != kills._came_in_time(process, process.returned[0] - 1)
    )


def _wait_for(go: Path, folder: Path) -> None:
    while not go.exists():
        time.sleep(0.001)


def test_the_tables_count_errors() -> None:
    runs = [
        {"case": "rapo", "signals": [met("SIGKILL", "time"), met("SIGINT", "write")], "wrong": []},
        {
            "case": "rapo",
            "signals": [met("SIGTERM", "write")],
            "wrong": ["lost: the last continuation ended with status 1"],
        },
        {"case": "empo2", "signals": [], "wrong": ["metrics.jsonl", "a traceback"]},
    ]
    lines = kills.table(runs).splitlines()
    assert lines[2:] == [
        "| rapo | 2 | 1 | 1 | 1 | 2 | 1 | 0 | 0 |",
        "| empo2 | 1 | 0 | 0 | 0 | 0 | 0 | 1 | 1 |",
        "| all | 3 | 1 | 1 | 1 | 2 | 1 | 1 | 1 |",
    ]
    done = [{"what": ["rapo", "ended", "lock", "flip", 0], "verdict": verdict} for verdict in damage.VERDICTS]
    assert damage.table(done).splitlines()[-1] == "| all | 5 | 1 | 1 | 1 | 1 | 1 |"


@pytest.mark.parametrize("name", damage.CHANGES)
def test_a_damage_changes_a_file(name: str) -> None:
    content = bytes(range(200))
    changed = damage.CHANGES[name](content, random.Random(0))
    assert changed != content and len(changed) <= len(content)
    assert damage.CHANGES[name](b"", random.Random(0)) == b""
