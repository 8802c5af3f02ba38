"""A run seen from another terminal, by its files alone: where it is, its last steps, and what it told."""

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from outrider.file_lock import is_locked
from outrider.json_lines import readable
from outrider.watch.recorded_progress import NOTES
from outrider.watch.run_directory import RunData, finite, read_run
from outrider.watch.span import duration
from outrider.watch.stage_clock import compact
from outrider.watch.viewer.live import live_state

Status: TypeAlias = Literal["running", "finished", "stopped", "gone"]
STEP_FIELDS: Final[Mapping[str, str]] = {
    "reward": "reward/mean",
    "no signal": "group/fraction_without_signal",
    "s/step": "time/step",
    "tokens/s": "speed/rollout_tokens",
}
"""What is shown of a step, and the metric that it is."""

_NUM_STEPS: Final = 5
_NUM_NOTES: Final = 3
_SILENT_S: Final = 60.0  # without a word, at which a line says so


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run at one moment. ``lines`` may hold any text; ``state_key`` changes when a step, a stage or a note
    comes."""

    status: Status
    lines: tuple[str, ...]
    state_key: tuple[object, ...]


def read_snapshot(run: Path, *, now: float | None = None) -> RunSnapshot:
    """Read the run's files; what is missing or damaged is left out. ``now``: seconds since 1970."""
    data, live, notes = read_run(run), live_state(run), _notes(run)
    status = _status(run, data, live)
    lines = [
        f"{run}: {_describe_status(run, status, live)}",
        *_describe_stage(status, live, time.time() if now is None else now),
        *_last_steps(data),
        *(f"> {text}" for text in notes[-_NUM_NOTES:]),
    ]
    stage = None if live is None else live.get("stage")
    return RunSnapshot(
        status=status, lines=tuple(lines), state_key=(status, stage, data.num_steps, len(notes))
    )


def _status(run: Path, data: RunData, live: Mapping[str, Any] | None) -> Status:
    if is_locked(run / "lock"):
        return "running"
    has_ended = live is None or live.get("has_ended") is not False
    if not has_ended:
        return "gone"
    return "finished" if data.is_done else "stopped"


def _describe_status(run: Path, status: Status, live: Mapping[str, Any] | None) -> str:
    resume_hint = f"continue with: outrider train --resume {run}"
    if status == "gone":
        host = live.get("host") if live is not None else None
        host_hint = f"; it ran on {host}, look there" if host != platform.node() else ""
        return f"its process is gone (killed?){host_hint}; {resume_hint}"
    return f"stopped; {resume_hint}" if status == "stopped" else status


def _describe_stage(status: Status, live: Mapping[str, Any] | None, now: float) -> Iterator[str]:
    if live is None:
        yield "it tells no stage"
        return
    if status == "running" or status == "gone":
        yield str(live.get("line") or f"{live.get('stage')} {live.get('done')}/{live.get('total')}")
        silent = now - (finite(live.get("time")) or now)
        if status == "gone" or silent >= _SILENT_S:
            yield f"last heard of {duration(max(0.0, silent))} ago"


def _last_steps(data: RunData) -> Iterator[str]:
    total = data.config.get("train.num_steps", "?")
    for record in [item for item in data.records if item["kind"] == "train"][-_NUM_STEPS:]:
        values = ((name, finite(record.get(key))) for name, key in STEP_FIELDS.items())
        fields = "".join(f"  {name} {compact(item):>5}" for name, item in values if item is not None)
        yield f"step {record['step']!s:>{len(total)}}/{total}{fields}"


def _notes(run: Path) -> list[str]:
    try:
        return [str(line["text"]) for _, line in readable(run / NOTES) if line and "text" in line]
    except OSError:
        return []
