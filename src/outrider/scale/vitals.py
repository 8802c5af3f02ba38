"""Signs of life of a process of this machine that does not answer: a call may hold its interpreter's lock."""

import contextlib
import os
import weakref
from pathlib import Path
from typing import Final

from outrider.rollout.whereabouts import RolloutStatus

_NAME: Final = "outrider-place"
_SIZE: Final = 512


class SharedRolloutStatus(RolloutStatus):
    """Also writes the newest place into memory that other processes can read (:func:`read_location`)."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)

    def set(self, rollout: str, location: str) -> None:
        """Record the new location of a rollout and write it to the shared memory file."""
        super().set(rollout, location)
        line = f"{rollout}: {location}".encode("utf-8", "replace")[:_SIZE]
        os.pwrite(self._file, line.ljust(_SIZE, b"\0"), 0)


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used; None if it is not there."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_location(pid: int) -> str | None:
    """The place that a worker's rollouts have moved to last; None if that cannot be read."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAME in os.readlink(descriptor):
                    text = descriptor.read_bytes()[:_SIZE].rstrip(b"\0").decode("utf-8", "replace")
                    if text:
                        return text
    return None
