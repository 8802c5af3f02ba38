"""Unattended trainings, with shell commands in their place: what is killed is continued, what fails stops
nothing, nothing runs twice.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from benchmarks.learning_jobs import MAX_ATTEMPTS, Job, Runner, is_running, last_line, log_file, read_journal
from benchmarks.learning_status import progress, status_table
from benchmarks.learning_toys import ARENAS, load_result
from rich.console import Console

from benchmarks import learning
from outrider.errors import ConfigError

ROOT = Path(__file__).parents[2]


def job(folder: Path, name: str, script: str = "", *, after: tuple[str, ...] = ()) -> Job:
    """Done when the file of its name is there; without a script it makes that file."""
    return Job(
        name=name, kind=name.rpartition("-")[0] or name, after=after,
        is_done=lambda: (folder / f"{name}.done").exists(),
        command=lambda: ["/bin/sh", "-c",
                         f"cd {folder}; echo {name} >> started; {script or f'touch {name}.done'}"],
    )  # fmt: skip


def run(folder: Path, *jobs: Job, num_processes: int = 2) -> dict[str, str]:
    return Runner(
        jobs=jobs, folder=folder, num_processes=num_processes, note=lambda text: None, poll_s=0.01
    ).run()


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text().split() if (folder / "started").exists() else []


def events(folder: Path) -> list[tuple[str, str]]:
    return [(event["job"], event["event"]) for event in read_journal(folder)]


def test_finished_jobs_are_skipped_and_dependent_ones_follow(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "b", "test -e a.done && touch b.done", after=("a",)),
        job(tmp_path, "a", "sleep 0.1; touch a.done"),
    ]
    assert run(tmp_path, *jobs) == {} and started(tmp_path) == ["a", "b"]
    assert run(tmp_path, *jobs) == {} and started(tmp_path) == ["a", "b"]
    (tmp_path / "b.done").unlink()
    assert run(tmp_path, *jobs) == {} and started(tmp_path) == ["a", "b", "b"]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_number_of_processes_is_limited(tmp_path: Path, num_processes: int) -> None:
    count = (
        "n=$(ls | grep -c running); echo $n >> seen; touch {0}.running; sleep 0.05; "
        "rm {0}.running; touch {0}.done"
    )
    assert (
        run(
            tmp_path,
            *(job(tmp_path, f"j{n}", count.format(f"j{n}")) for n in range(6)),
            num_processes=num_processes,
        )
        == {}
    )
    assert max(map(int, (tmp_path / "seen").read_text().split())) < num_processes


def test_a_failed_run_is_reported_and_stops_only_dependent_runs(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "bad", "echo because >&2; echo; exit 3"), job(tmp_path, "after-bad", after=("bad",)),
        job(tmp_path, "good"), job(tmp_path, "lazy", "exit 0"),
        Job(name="none", kind="none", command=lambda: ["/no/such/program"], is_done=lambda: False),
    ]  # fmt: skip
    failed = run(tmp_path, *jobs, num_processes=1)
    assert failed["bad"] == "exit status 3: because" and failed["after-bad"] == "not begun: bad has no result"
    assert (
        "/no/such/program" in failed["none"]
        and failed["lazy"] == "exit status 0: no output"
        and "good" not in failed
    )
    assert started(tmp_path) == ["bad", "good", *["lazy"] * MAX_ATTEMPTS]
    assert ("bad", "failed") in events(tmp_path) and ("good", "done") in events(tmp_path)
    assert last_line(log_file(tmp_path, "bad")) == "because"


def test_the_journal_has_the_processor_seconds_of_each_job(tmp_path: Path) -> None:
    loop = "n=0; while [ $n -lt 100000 ]; do n=$((n+1)); done"
    assert run(tmp_path, job(tmp_path, "busy", f"{loop}; touch busy.done"), job(tmp_path, "idle")) == {}
    spent = {
        event["job"]: event["cpu_seconds"] for event in read_journal(tmp_path) if event["event"] == "done"
    }
    assert spent["busy"] > 2 * spent["idle"] > 0


def test_a_killed_worker_is_continued(tmp_path: Path) -> None:
    script = "test -e half && touch a.done || { touch half; kill -9 $$; }"
    assert run(tmp_path, job(tmp_path, "a", script)) == {}
    assert events(tmp_path) == [("a", "begun"), ("a", "stopped"), ("a", "begun"), ("a", "done")]


def test_a_job_that_is_killed_repeatedly_is_abandoned(tmp_path: Path) -> None:
    assert run(tmp_path, job(tmp_path, "a", "kill -9 $$")) == {"a": "SIGKILL: no output"}
    assert started(tmp_path) == ["a"] * MAX_ATTEMPTS


def test_a_result_of_other_settings_stops_before_the_first_job(tmp_path: Path) -> None:
    def other() -> bool:
        raise ConfigError("another run's")

    with pytest.raises(ConfigError):
        run(tmp_path, job(tmp_path, "a"), Job(name="b", kind="b", command=list, is_done=other))
    assert started(tmp_path) == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_parent(folder: Path, script: str) -> "subprocess.Popen[bytes]":
    """A call of its own, with one job ``a``."""
    code = f"""
        from pathlib import Path
        from benchmarks.learning_jobs import Job, Runner
        done = Path({str(folder / "a.done")!r})
        job = Job(name="a", kind="a", command=lambda: ["/bin/sh", "-c", {script!r}], is_done=done.exists)
        Runner(jobs=[job], folder=done.parent, num_processes=1, note=print, poll_s=0.01).run()
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stderr=subprocess.PIPE)


def test_a_job_of_a_killed_parent_may_finish(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; echo a >> started; while [ ! -e go ]; do sleep 0.02; done; touch a.done"
    parent = start_parent(tmp_path, script)
    wait_for(lambda: started(tmp_path) == ["a"])
    parent.kill()
    parent.communicate()
    assert is_running(tmp_path, "a") and progress([job(tmp_path, "a")], tmp_path)[0].num_running == 1
    (tmp_path / "go").touch()
    assert run(tmp_path, job(tmp_path, "a")) == {}
    assert started(tmp_path) == ["a"]


def test_a_stopped_call_waits_for_the_checkpoints(tmp_path: Path) -> None:
    script = (
        f"cd {tmp_path}; trap 'touch checkpoint; exit 0' TERM; echo a >> "
        "started; while :; do sleep 0.02; done"
    )
    parent = start_parent(tmp_path, script)
    wait_for(lambda: started(tmp_path) == ["a"])
    os.kill(parent.pid, signal.SIGTERM)
    _, told = parent.communicate(timeout=60)
    assert parent.returncode != 0 and b"KeyboardInterrupt" in told
    assert (
        (tmp_path / "checkpoint").exists()
        and events(tmp_path)[-1] == ("a", "stopped")
        and not is_running(tmp_path, "a")
    )


def write_journal(folder: Path, *lines: tuple[str, str, float]) -> None:
    """(job, event, seconds)"""
    records = [
        {"job": name, "kind": name.rpartition("-")[0], "event": event, "time": 0.0, "seconds": s}
        for name, event, s in lines
    ]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')


def test_remaining_time_is_estimated_from_similar_jobs(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"toys_lock_grpo-{n}") for n in range(4)]
    write_journal(tmp_path, ("toys_lock_grpo-0", "done", 10.0), ("toys_lock_grpo-1", "stopped", 5.0),
                  ("toys_lock_grpo-1", "done", 15.0), ("toys_lock_grpo-2", "stopped", 4.0),
                  ("toys_lock_grpo-3", "failed", 1.0))  # fmt: skip
    for n in (0, 1):
        (tmp_path / f"toys_lock_grpo-{n}.done").touch()
    [row] = progress(jobs, tmp_path)
    assert (row.num_done, row.num_running, row.num_failed, row.num_waiting) == (2, 0, 1, 1)
    # a job's tries count together
    assert row.seconds_each == 15.0 and row.seconds_left == (15 - 4) + (15 - 1)


def test_a_method_without_a_run_is_estimated_from_others(tmp_path: Path) -> None:
    jobs = [
        Job(name=f"{kind}-0", kind=kind, command=list, is_done=lambda kind=kind: kind == "toys/lock/grpo")
        for kind in ("toys/lock/grpo", "toys/lock/rapo", "toys/corridor/grpo", "factbook/grpo")
    ]  # fmt: skip
    write_journal(tmp_path, ("toys/lock/grpo-0", "done", 60.0))
    rows = progress(jobs, tmp_path)
    assert [row.seconds_left for row in rows] == [0.0, 60.0, 60.0, None]
    console = Console(width=140, record=True, file=StringIO())
    console.print(status_table(rows, num_processes=2))
    told = console.export_text()
    assert "about 60 s left with 2 processes and 1 not known" in told and "toys/corridor/grpo" in told


def test_the_toys_run_as_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's own jobs, each played in this process: what they are asked is what a worker is told."""
    arguments = [
        "toys",
        "--out",
        str(tmp_path),
        "--seeds",
        "2",
        "--toys",
        "lock",
        "--methods",
        "grpo",
        "--policy-tokens",
        "40",
    ]

    def in_process(self: Runner) -> dict[str, str]:
        for one in self.jobs:
            command = list(one.command())
            assert not one.is_done() and command[:3] == [sys.executable, "-m", "benchmarks.learning"]
            assert learning.main(command[3:]) == 0 and one.is_done()
        return {}

    assert learning.main([*arguments, "--status"]) == 0
    assert "│ 0    │ 0       │ 0      │ 1 " in capsys.readouterr().out and not (tmp_path / "toys").exists()
    monkeypatch.setattr(Runner, "run", in_process)
    assert learning.main([*arguments, "--processes", "2"]) == 0
    assert "| GRPO | 2 |" in capsys.readouterr().out and "| GRPO | 2 |" in (tmp_path / "toys.md").read_text()
    grpo = next(method for method in ARENAS[0].methods() if method.key == "grpo")
    assert all(
        load_result(tmp_path, ARENAS[0], grpo, seed, max_policy_tokens=40) is not None for seed in (0, 1)
    )
    assert learning.main([*arguments, "--processes", "0"]) == 2
