"""Output and working folders of simulator processes."""

import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import IO, Final

from outrider.files import FileLock

_PREFIX: Final = "scienceworld-"
_LOCK: Final = ".owner"


def drain_output(stream: IO[bytes] | None, lines: deque[bytes]) -> threading.Thread:
    """Read a pipe to its end in the background, so that the process never blocks on a full pipe. The last
    lines, up to the maximum length of ``lines``, are stored there.
    """

    def read() -> None:
        if stream is not None:
            with stream:
                lines.extend(stream)

    thread = threading.Thread(target=read, name="simulator-output", daemon=True)
    thread.start()
    return thread


class SimulatorFolder:
    """A new temporary folder; those of dead owners are removed first.

    SIGKILL runs no clean-up. The owner keeps a file in the folder locked, and the kernel releases the lock
    however the owner dies, so that a later process can tell whether a folder is still in use.
    """

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.name = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock: FileLock | None = FileLock(Path(self.name, _LOCK), mode=0o600, waits=True)

    def cleanup(self) -> None:
        """Remove the folder; may be called twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            shutil.rmtree(self.name, ignore_errors=True)
            lock.release()


def remove_abandoned(parent: Path) -> int:
    """Remove this user's folders whose owners are dead, and return their number. A folder without a lock file
    is skipped, because its owner may be about to create it.
    """
    num = 0
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # of another user, in use, or removed at this moment
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with FileLock(folder / _LOCK, flags=os.O_RDWR):
                shutil.rmtree(folder)
                num += 1
    return num
