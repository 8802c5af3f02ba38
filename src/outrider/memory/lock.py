"""One writer per file; readers may ask whether it lives."""

import time
from pathlib import Path

from outrider.errors import ConfigError
from outrider.file_lock import FileLock, is_locked

_NUM_TRIES = 20
_PAUSE_S = 0.05


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def writer_lock(path: Path) -> FileLock:
    """Held while a process may write ``path``. Raises :class:`~outrider.errors.ConfigError` if another one
    holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # a reader that asks whether the writer lives holds the lock for an instant
    for _ in range(_NUM_TRIES):
        try:
            return FileLock(_lock_path(path))
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    raise ConfigError(f"{path}: another process or buffer object is writing to it")


def writer_is_alive(path: Path) -> bool:
    """Whether any process holds the writer lock of ``path`` now."""
    return is_locked(_lock_path(path))
