"""One writer a file, through an advisory lock that the kernel releases when the process dies."""

import fcntl
import os
import time
from pathlib import Path

from outrider.errors import ConfigError

_NUM_TRIES = 20
_PAUSE_S = 0.05


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


class WriterLock:
    """Held while a process may write ``path``. Raises :class:`~outrider.errors.ConfigError` if another one
    holds it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            _lock_path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
        # a reader that asks whether the writer lives holds the lock for an instant
        for _ in range(_NUM_TRIES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        self.release()
        raise ConfigError(f"{path}: another process or buffer object is writing to it")

    def release(self) -> None:
        """Let the next writer in; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def writer_is_alive(path: Path) -> bool:
    """Whether any process holds the writer lock of ``path`` now."""
    try:
        descriptor = os.open(_lock_path(path), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
