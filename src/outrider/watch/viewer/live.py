"""Where a run is now, what changed on disk since a page last asked, and how it is stopped."""

import errno
import json
import os
import platform
import signal
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.file_lock import is_locked
from outrider.watch.recorded_progress import LIVE, NOTES
from outrider.watch.step_files import StepFiles


def live_state(run: Path) -> dict[str, Any] | None:
    """Stage, units done, fields (tokens/s among them) and time; None where the run tells none."""
    try:
        state = json.loads((run / LIVE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def fingerprint(run: Path) -> dict[str, Any]:
    """Changes whenever a page of the run would: files by their size, steps, and where it is."""
    sizes = [_size(run / name) for name in ("metrics.jsonl", "evaluations.jsonl", NOTES)]
    steps = StepFiles(run / "traces").steps()
    return {
        "sizes": sizes,
        "newest": steps[-1] if steps else 0,
        "num": len(steps),
        "running": is_locked(run / "lock"),
        "live": live_state(run),
    }


def stop(run: Path) -> None:
    """Ask the run to end with a checkpoint: SIGTERM. Raises DataError where it does not run here, and where
    the process that it was has gone: another one may have its number by now.
    """
    state = live_state(run)
    if state is None or not is_locked(run / "lock"):
        raise DataError(f"{run.name} is not running")
    if state.get("host") != platform.node():
        raise DataError(f"{run.name} runs on another machine, {state.get('host')}: stop it there")
    pid = state.get("pid")
    if not isinstance(pid, int) or pid < 2:
        raise DataError(f"{run.name} does not say which process it is: stop it with Ctrl-C")
    try:
        _end(pid, run / "lock")
    except OSError as error:
        raise DataError(f"{run.name} cannot be stopped: {error.strerror}") from error


def _end(pid: int, lock: Path) -> None:
    """SIGTERM to a process that holds the lock's file open. Where the system does not tell what a process
    holds (not Linux) its number has to do. Raises OSError.
    """
    if not Path("/proc/self/fd").is_dir():
        os.kill(pid, signal.SIGTERM)
        return
    process = os.pidfd_open(pid)  # from here on this process and no later one of its number
    try:
        if not _has_open(pid, lock):
            raise ProcessLookupError(errno.ESRCH, "the process that it names is another one")
        signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)


def _has_open(pid: int, path: Path) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if descriptor.samefile(path):
                return True
        except OSError:
            continue  # closed since it was listed
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
