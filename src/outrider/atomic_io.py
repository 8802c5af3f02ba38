"""The one way in which this library writes files: as a whole, forced to disk, and never through a link that
others put there.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = "*.tmp"
"""Pattern of the files that a kill can leave behind."""


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file so that a kill leaves either the old content or the new. Raises OSError."""
    with replacing(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of the file at the end of the block, on disk; after an exception
    nothing has changed.

    A link at ``path`` is replaced and not followed.
    """
    try:
        temporary, descriptor = _new_temporary(path)
    except OSError as error:
        error.filename = str(path)  # the name that a person knows
        raise
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, path)  # before the lock goes
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody can know before: for writers that take a path and no stream."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def _new_temporary(path: Path) -> tuple[Path, int]:
    """A new file beside ``path``, locked for as long as it is written; the kernel frees the lock of a process
    that dies.
    """
    while True:
        temporary = temporary_name(path)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # taken for a leftover before it was locked


def remove_leftovers(directory: Path) -> None:
    """Remove what kills have left in a folder; what is being written stays."""
    for left in directory.glob(TEMPORARY):
        if left.is_symlink():  # no writer of ours makes one
            left.unlink(missing_ok=True)
            continue
        try:
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink(missing_ok=True)
        except OSError:
            pass  # somebody writes it
        finally:
            os.close(descriptor)


def append(path: Path, content: bytes) -> None:
    """Add to the end of the file, which is made if it is missing, and force it to disk. Raises OSError, also
    for a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
