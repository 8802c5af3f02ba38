"""Nobody who can put a link into a folder makes us write through it; a write is whole or has not
happened.
"""

import fcntl
import os
import secrets
import stat
from pathlib import Path

import pytest

from outrider.evaluation.compare_report import compare_runs
from outrider.files import TEMPORARY, append, remove_leftovers, replace_file, replacing
from outrider.memory.step_store import Database, copy_database
from outrider.metrics.writer import MetricsWriter
from outrider.viewer.records import SCHEMA, StepFiles, step_file
from outrider.viewer.report import write_report


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim.txt"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", ["report.html.tmp", "report.html", ".report.html.partial"])
def test_the_report_follows_no_link(tmp_path: Path, victim: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    (run / name).symlink_to(victim)
    assert write_report(run).read_bytes().startswith(b"<!doctype html>")
    assert victim.read_text() == "precious" and not (run / "report.html").is_symlink()


def test_temporary_names_are_unpredictable_and_never_reused(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a link is put at the very name: the file is made, or nothing is."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    (tmp_path / f"a.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "a", b"new")
    assert victim.read_text() == "precious" and not (tmp_path / "a").exists()
    monkeypatch.undo()
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(ValueError, match="half"), replacing(tmp_path / "a") as stream:
        stream.write(b"ne")
        raise ValueError("half")
    assert (tmp_path / "a").read_text() == "old" and not list(tmp_path.glob(TEMPORARY))


def test_a_new_file_has_the_default_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    replace_file(tmp_path / "a", b"")
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == stat.S_IMODE(os.stat(tmp_path / "plain").st_mode)


def test_appending_follows_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / "metrics.jsonl", b"x")
    # what it finds is no line, and goes: the link, not what it points to
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    assert victim.read_text() == "precious"


def test_traces_and_copies_of_buffers_follow_no_link(tmp_path: Path, victim: Path) -> None:
    for name in ("step-000001.parquet.tmp", ".copy.db.partial", "step-000001.parquet", "copy.db"):
        (tmp_path / name).symlink_to(victim)
    StepFiles(tmp_path).write_rows(step_file(1), [], SCHEMA)
    Database(tmp_path / "a.db", writable=True).close()
    copy_database(tmp_path / "a.db", tmp_path / "copy.db")
    assert victim.read_text() == "precious"


def test_comparing_follows_no_link(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from outrider.evaluation import compare_report as compare_render

    for name in ("compare_runs", "page"):
        (tmp_path / f"{name}.html.tmp").symlink_to(victim)
    monkeypatch.setattr(compare_render, "compare", lambda paths: None)
    report = compare_render.Report(title="", tables=[], notes=[], figures=[])
    monkeypatch.setattr(compare_render, "make_report", lambda comparison: report)
    monkeypatch.setattr(compare_render, "to_html", lambda report: "page \ud800")
    compare_runs([], markdown=None, html=tmp_path / "page.html", console=Console(quiet=True))
    assert (tmp_path / "page.html").read_text() == "page ?" and victim.read_text() == "precious"


def test_leftovers_are_removed_and_files_in_use_stay(tmp_path: Path) -> None:
    """Also a report's: three broken runs of the campaign of kills kept theirs for ever."""
    (tmp_path / f"report.html.{'0' * 16}.tmp").write_bytes(b"half")
    (tmp_path / f"a.{'1' * 16}.tmp").symlink_to(tmp_path / "victim")
    with replacing(tmp_path / "report.html") as stream:
        remove_leftovers(tmp_path)
        stream.write(b"whole")
        stream.flush()
        [own] = tmp_path.glob(TEMPORARY)
        assert own.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_file_removed_before_its_lock_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter([tmp_path / "first.tmp", tmp_path / "second.tmp"])
    monkeypatch.setattr("outrider.files._temporary_name", lambda path: next(names))
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and (tmp_path / "first.tmp").exists():
            remove_leftovers(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr("outrider.files.fcntl.flock", late)
    replace_file(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]
