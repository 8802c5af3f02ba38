"""The campaigns of kills and damage in their short forms; the long ones are commands (benchmarks/kills.py, damage.py)."""

import random
from pathlib import Path

import pytest

from benchmarks import damage, kills


def test_broken_runs_end_in_the_same_bits_and_the_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--out", str(tmp_path), "--cases", "empo2"]
    assert kills.main([*given, "--count", "1"]) == 0
    first = kills.read(tmp_path / "kills.jsonl")
    num = sum(len(one["signals"]) for one in first)
    assert num >= 1 and f"| all | {len(first)} |" in capsys.readouterr().out
    assert kills.main([*given, "--count", str(num)]) == 0  # nothing is left to do
    assert kills.read(tmp_path / "kills.jsonl") == first


def test_damages_are_noticed_or_do_no_harm_and_the_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_tables_count_what_must_not_be() -> None:
    runs = [
        {"case": "rapo", "signals": [{"signal": "SIGKILL"}, {"signal": "SIGINT"}], "wrong": []},
        {"case": "rapo", "signals": [{"signal": "SIGTERM"}], "wrong": ["lost: the last continuation ended with status 1"]},
        {"case": "empo2", "signals": [], "wrong": ["metrics.jsonl", "a traceback"]},
    ]
    lines = kills.table(runs).splitlines()
    assert lines[2:] == [
        "| rapo | 2 | 1 | 1 | 1 | 1 | 0 | 0 |",
        "| empo2 | 1 | 0 | 0 | 0 | 0 | 1 | 1 |",
        "| all | 3 | 1 | 1 | 1 | 1 | 1 | 1 |",
    ]
    done = [{"what": ["rapo", "ended", "lock", "flip", 0], "verdict": verdict} for verdict in damage.VERDICTS]
    assert damage.table(done).splitlines()[-1] == "| all | 5 | 1 | 1 | 1 | 1 | 1 |"


@pytest.mark.parametrize("name", damage.CHANGES)
def test_a_damage_changes_a_file(name: str) -> None:
    content = bytes(range(200))
    changed = damage.CHANGES[name](content, random.Random(0))
    assert changed != content and len(changed) <= len(content)
    assert damage.CHANGES[name](b"", random.Random(0)) == b""
