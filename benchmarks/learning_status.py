"""Progress of many trainings, and an estimate of the remaining time from similar ones."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.learning_jobs import Job, is_running, read_journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of the jobs of one kind. ``seconds_left`` is None if no similar job has ended."""

    kind: str
    num_done: int
    num_running: int
    num_failed: int
    num_waiting: int
    seconds_each: float | None
    seconds_left: float | None


def progress(jobs: Sequence[Job], folder: Path) -> list[Progress]:
    """Return a row per kind, in the order of the jobs. Raises OutriderError if a result is that of another
    run.
    """
    events = read_journal(folder)
    spent: dict[str, float] = {}
    last: dict[str, dict[str, object]] = {}
    for event in events:
        spent[event["job"]] = spent.get(event["job"], 0.0) + event.get("seconds", 0.0)
        last[event["job"]] = event
    ended = {event["job"]: event["kind"] for event in events if event["event"] == "done"}
    rows = []
    for kind in dict.fromkeys(job.kind for job in jobs):
        members = [job for job in jobs if job.kind == kind]
        done = {job.name for job in members if job.is_done()}
        running = {job.name for job in members if job.name not in done and is_running(folder, job.name)}
        failed = {
            job.name for job in members
            if job.name not in done | running and last.get(job.name, {}).get("event") == "failed"
        }  # fmt: skip
        each = _typical(kind, {name: spent[name] for name in ended}, ended)
        left = None
        if each is not None:
            owed = [job.name for job in members if job.name not in done]
            left = sum(max(0.0, each - spent.get(name, 0.0) - _elapsed(last, name, running)) for name in owed)
        rows.append(
            Progress(
                kind=kind, num_done=len(done), num_running=len(running), num_failed=len(failed),
                num_waiting=len(members) - len(done) - len(running) - len(failed), seconds_each=each,
                seconds_left=left,
            )
        )  # fmt: skip
    return rows


def status_table(rows: Sequence[Progress], *, num_processes: int) -> Table:
    """The rows and their sum."""
    table = Table("trainings", "done", "running", "failed", "waiting", "each", "left", title="what is done")
    totals = [0, 0, 0, 0]
    for row in rows:
        counts = (row.num_done, row.num_running, row.num_failed, row.num_waiting)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        left = "" if row.num_done and not row.seconds_left else duration(row.seconds_left)
        table.add_row(row.kind, *map(str, counts), duration(row.seconds_each), left)
    known = sum(row.seconds_left or 0.0 for row in rows)
    unknown = sum(
        row.num_running + row.num_failed + row.num_waiting for row in rows if row.seconds_left is None
    )
    more = f" and {unknown} not known" if unknown else ""
    table.caption = (
        f"about {duration(known / num_processes)} left with {num_processes} "
        f"process{'es' * (num_processes > 1)}{more}"
    )
    table.add_section()
    table.add_row("all", *map(str, totals), "", f"{duration(known)} in all")
    return table


def duration(seconds: float | None) -> str:
    """In words: ``45 s``, ``12 min``, ``3 h 05 min``; ``not known`` without a number."""
    if seconds is None:
        return "not known"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _typical(kind: str, seconds: dict[str, float], kinds: dict[str, str]) -> float | None:
    """Return the median duration of the kind, or else of the nearest kinds: other methods of the toy, then
    other toys.
    """
    above = kind
    while above:
        alike = [
            seconds[name] for name, other in kinds.items() if other == above or other.startswith(f"{above}/")
        ]
        if alike:
            return statistics.median(alike)
        above = above.rpartition("/")[0]
    return None


def _elapsed(last: dict[str, dict[str, object]], name: str, running: set[str]) -> float:
    event = last.get(name, {})
    begun = event.get("time")
    return (
        time.time() - begun
        if name in running and event.get("event") == "begun" and isinstance(begun, float)
        else 0.0
    )
