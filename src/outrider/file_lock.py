"""The one way in which this library locks files: advisory locks of open files, which the kernel frees when
their process dies, however it dies.
"""

import fcntl
import os
from pathlib import Path
from typing import Final

_MADE: Final = os.O_RDWR | os.O_CREAT


class FileLock:
    """The lock of a file, held from here on; ``descriptor`` is the open file.

    Without ``waits`` BlockingIOError is raised where another open file holds the lock. A link is not
    followed: OSError.
    """

    def __init__(self, path: Path, *, flags: int = _MADE, mode: int = 0o644, waits: bool = False) -> None:
        self.descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            if waits:
                wait_for_lock(self.descriptor)
            else:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Close the file, which frees the lock; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def wait_for_lock(descriptor: int) -> None:
    """Lock a file that is open already. Raises OSError where the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether any process holds the lock of this file now; a file that is not there is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(
            descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # two who ask do not take each other for a holder
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
