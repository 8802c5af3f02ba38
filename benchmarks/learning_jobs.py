"""Trainings as processes of one thread each, unattended for hours. You can stop and continue them at any
time, and a failure does not stop the others.

A job has the lock of its name as long as its process lives, also after its parent was killed, so that a
second call does not start it again. ``jobs.jsonl`` records starts and ends, from which the remaining time is
estimated.
"""

import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from outrider.errors import OutriderError

JOURNAL: Final = "jobs.jsonl"
MAX_ATTEMPTS: Final = 3  # of a process that was killed
_GRACE_S: Final = 300.0  # for checkpoints after a stop request
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training. ``kind`` is ``task/arena/method``; jobs of one kind have a similar duration.

    ``command`` is called at the start of the job, because it may depend on the jobs in ``after``; it resumes
    a killed training. ``is_done`` returns whether the result is recorded. Both raise OutriderError if the
    folder contains something else.
    """

    name: str
    kind: str
    command: Callable[[], Sequence[str]]
    is_done: Callable[[], bool]
    after: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Running:
    job: Job
    process: "subprocess.Popen[bytes]"
    began: float


@dataclass(slots=True, kw_only=True)
class Runner:
    """``num_processes`` at a time. Call :meth:`run` once."""

    jobs: Sequence[Job]
    folder: Path
    num_processes: int
    note: Callable[[str], None]
    poll_s: float = _POLL_S
    _waiting: list[Job] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)
    _done: set[str] = field(default_factory=set)
    _failed: dict[str, str] = field(default_factory=dict)
    _num_attempts: dict[str, int] = field(default_factory=dict)

    def run(self) -> dict[str, str]:
        """Run the unfinished jobs. Returns failed jobs and their reasons.

        Raises OutriderError before the first job if a result is that of another run, and KeyboardInterrupt,
        also after SIGTERM, when every process has stopped.
        """
        self._done = {job.name for job in self.jobs if job.is_done()}
        self._waiting = [job for job in self.jobs if job.name not in self._done]
        with _signals_asked_for() as leave_if_asked:
            try:
                while self._waiting or self._running:
                    leave_if_asked()
                    self._collect()
                    self._drop_orphans()
                    self._start()
                    if self._waiting or self._running:
                        time.sleep(self.poll_s)
            finally:
                self._stop()
        return dict(self._failed)

    def _start(self) -> None:
        for job in list(self._waiting):
            if len(self._running) >= self.num_processes:
                return
            if not set(job.after) <= self._done:
                continue
            lock = _locked(self.folder, job.name)
            if lock is None:  # it runs already, of another call
                continue
            try:
                self._waiting.remove(job)
                if job.is_done():  # another call has ended it since
                    self._done.add(job.name)
                    continue
                self._launch(job, lock)
            except (OutriderError, OSError) as error:
                self._fail(job, str(error))
            finally:
                os.close(lock)  # the process has inherited it

    def _launch(self, job: Job, lock: int) -> None:
        log = log_file(self.folder, job.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            process = subprocess.Popen(
                list(job.command()), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, pass_fds=(lock,),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._num_attempts[job.name] = self._num_attempts.get(job.name, 0) + 1
        self._running.append(_Running(job=job, process=process, began=time.time()))
        _record(self.folder, {"job": job.name, "kind": job.kind, "event": "begun", "time": time.time()})

    def _collect(self) -> None:
        for one in list(self._running):
            before = _reaped_cpu_seconds()
            status = one.process.poll()
            if status is None:
                continue
            self._running.remove(one)
            job, cpu_seconds = one.job, _reaped_cpu_seconds() - before
            try:
                is_done = job.is_done()
            except OutriderError as error:
                is_done, status = False, status or 1
                self.note(f"{job.name}: {error}")
            # After SIGTERM, a training exits with status 0 and is not finished.
            was_stopped = not is_done and (
                status <= 0 or status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            )
            how = "done" if is_done else "stopped" if was_stopped else "failed"
            seconds = time.time() - one.began
            self._record_end(job, how, seconds, cpu_seconds)
            if is_done:
                self._done.add(job.name)
                self.note(f"{job.name}: done, {seconds:.0f} s")
            elif was_stopped and self._num_attempts[job.name] < MAX_ATTEMPTS:
                self._waiting.insert(0, job)
                self.note(f"{job.name}: stopped ({_told(status)}); it is continued")
            else:
                self._fail(job, f"{_told(status)}: {last_line(log_file(self.folder, job.name))}")

    def _drop_orphans(self) -> None:
        """Drop jobs that depend on a failed or unknown job."""
        names = {job.name for job in self.jobs}
        for job in list(self._waiting):
            if lost := [name for name in job.after if name in self._failed or name not in names]:
                self._waiting.remove(job)
                self._fail(job, f"not begun: {lost[0]} has no result")

    def _fail(self, job: Job, reason: str) -> None:
        self._failed[job.name] = reason
        self.note(f"{job.name}: FAILED, {reason}")

    def _stop(self) -> None:
        """Ask every process to stop, and wait for its checkpoint."""
        for one in self._running:
            one.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for one in self._running:
            before = _reaped_cpu_seconds()
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            cpu_seconds = _reaped_cpu_seconds() - before
            self._record_end(one.job, "stopped", time.time() - one.began, cpu_seconds)

    def _record_end(self, job: Job, event: str, seconds: float, cpu_seconds: float) -> None:
        how = {"job": job.name, "kind": job.kind, "event": event, "time": time.time()}
        _record(self.folder, how | {"seconds": seconds, "cpu_seconds": cpu_seconds})


def _reaped_cpu_seconds() -> float:
    """Processor time of all child processes that have been waited for; it grows by that of one process when
    it is reaped.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def log_file(folder: Path, name: str) -> Path:
    """What a job's processes printed."""
    return folder / "logs" / f"{name}.log"


def last_line(log: Path) -> str:
    """Return the last line that is not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """Return the events in order, without a torn last line."""
    file = folder / JOURNAL
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def is_running(folder: Path, name: str) -> bool:
    """Whether any call's process is at work on the job."""
    if not _lock_file(folder, name).exists():
        return False
    lock = _locked(folder, name)
    if lock is not None:
        os.close(lock)
    return lock is None


def _lock_file(folder: Path, name: str) -> Path:
    return folder / "locks" / f"{name}.lock"


def _locked(folder: Path, name: str) -> int | None:
    """Return a descriptor with the lock of the job; None if another process has it."""
    path = _lock_file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _record(folder: Path, event: dict[str, Any]) -> None:
    with (folder / JOURNAL).open(
        "ab", buffering=0
    ) as stream:  # a single write, because two calls may share the folder
        stream.write(json.dumps(event).encode() + b"\n")


def _told(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


@contextmanager
def _signals_asked_for() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt after SIGINT or SIGTERM, so that no process is started
    and not registered.

    A second signal interrupts at once.
    """
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
