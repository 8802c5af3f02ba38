"""The output of a simulator's process: read to its end, so that the process never blocks on a full pipe."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Final

from outrider.files import FileLock


def drain_output(stream: IO[bytes] | None, lines: deque[bytes]) -> threading.Thread:
    """Read a pipe to its end in the background; the bound of ``lines`` is how many lines are held."""

    def read() -> None:
        if stream is not None:
            with stream:
                lines.extend(stream)

    thread = threading.Thread(target=read, name="simulator-output", daemon=True)
    thread.start()
    return thread


# Working folders of simulator processes: they go with their process, or with the next start where that was
# killed.
#
# SIGKILL runs no clean-up. Each folder holds a file that its owner keeps locked; the kernel frees the lock
# however the owner dies, so that a later one can tell a folder in use from one that nobody will come back to.


_PREFIX: Final = "scienceworld-"
_LOCK: Final = ".owner"


class SimulatorFolder:
    """A new folder below the temporary directory; those of dead owners are removed first."""

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.name = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock: FileLock | None = FileLock(Path(self.name, _LOCK), mode=0o600, waits=True)

    def cleanup(self) -> None:
        """Remove it; may be called twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            shutil.rmtree(self.name, ignore_errors=True)
            lock.release()


def remove_abandoned(parent: Path) -> int:
    """Remove this user's folders whose owners have died; how many. One without its lock file is left: it may
    just be made.
    """
    num = 0
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody else's, in use, or gone in this moment
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with FileLock(folder / _LOCK, flags=os.O_RDWR):
                shutil.rmtree(folder)
                num += 1
    return num
