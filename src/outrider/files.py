"""The one way in which this library writes files: as a whole, forced to disk, and never through a link that
others put there.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

# The one way in which this library locks files: advisory locks of open files, which the kernel frees when
# their process dies, however it dies.


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


TEMPORARY = "*.tmp"
"""Pattern of the files that a kill can leave behind."""

_PARTIAL: Final = ".partial"
_REMOVED: Final = ".removed"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


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
            # Before the rename: else a power failure may leave the new name with nothing in it.
            os.fsync(stream.fileno())
            os.replace(temporary, path)  # before the lock goes
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


@contextlib.contextmanager
def replacing_by_name(path: Path) -> Iterator[Path]:
    """As :func:`replacing`, for writers that take a path and no stream: a name beside ``path`` that nobody
    can know before.
    """
    temporary = _temporary_name(path)
    try:
        yield temporary
        follow_umask(temporary)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder that is renamed to ``folder`` at the end of the block, where none or an empty one may be;
    after an exception nothing is left.

    One writer at a time: what a kill has left of an earlier one is removed.
    """
    partial = folder.with_name(f".{folder.name}{_PARTIAL}")
    remove(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        follow_umask(partial)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)


@contextlib.contextmanager
def first_folder(folder: Path) -> Iterator[Path]:
    """As :func:`replacing_folder` for what is the same whoever makes it: any number of processes may, and the
    first one's stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
        follow_umask(scratch)
        with contextlib.suppress(OSError):  # another process finished first
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def follow_umask(path: Path) -> None:
    """A file, or a folder with all that is in it, gets the permissions of newly made ones: writers such as
    safetensors and ``mkdtemp`` leave out everybody else, whatever the umask is.
    """
    mask = os.umask(0o077)  # the only way to read it
    os.umask(mask)
    for root, folders, files in os.walk(path):
        for name in folders:
            os.chmod(os.path.join(root, name), 0o777 & ~mask)
        for name in files:
            os.chmod(os.path.join(root, name), 0o666 & ~mask)
    os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~mask)


def remove(path: Path) -> None:
    """Remove the file, link or folder at ``path``, if there is one. Raises OSError.

    A folder is renamed first, so that a kill leaves no half of it under its name;
    :func:`remove_leftovers` removes what is left under the other one.
    """
    if path.is_dir() and not path.is_symlink():
        if not path.name.endswith(_REMOVED):
            path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}{_REMOVED}"))
            sync(path.parent)  # after a power failure too
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def _new_temporary(path: Path) -> tuple[Path, int]:
    """A new file beside ``path``, locked for as long as it is written; the kernel frees the lock of a process
    that dies.
    """
    while True:
        temporary = _temporary_name(path)
        descriptor = os.open(temporary, _NEW | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            wait_for_lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # taken for a leftover before it was locked


def remove_leftovers(directory: Path, *, is_only_writer: bool = False) -> None:
    """Remove what kills have left in a folder; what is being written stays. Folders that were being written
    go only if this process is the only writer: nobody can tell whether others are still at work.
    """
    for left in directory.glob(TEMPORARY):
        if left.is_symlink():  # no writer of ours makes one
            left.unlink(missing_ok=True)
            continue
        with (
            contextlib.suppress(OSError),  # somebody writes it, or it is gone
            FileLock(left, flags=os.O_RDONLY | os.O_NONBLOCK),
        ):
            left.unlink(missing_ok=True)
    removed = f".*.{'[0-9a-f]' * 16}{_REMOVED}"
    for pattern in (removed, f".*{_PARTIAL}") if is_only_writer else (removed,):
        for half in directory.glob(pattern):
            with contextlib.suppress(OSError):
                remove(half)


def append(path: Path, content: bytes) -> None:
    """Add to the end of the file, which is made if it is missing, and force it to disk. Raises OSError, also
    for a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        append_bytes(descriptor, content)
    finally:
        os.close(descriptor)


def append_bytes(descriptor: int, content: bytes) -> None:
    """Add to the end of an open file, and force it to disk: all of it, or an OSError and nothing."""
    size = os.fstat(descriptor).st_size
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)  # a full disk must not leave half a line for the next one to join
        raise


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Files of one JSON object per line that grow while a run lives: a kill may have torn the last line, and
# damage may be anywhere.


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The whole lines, and what a kill has left of one more (mostly nothing). Raises OSError."""
    *lines, torn = path.read_bytes().split(b"\n")
    return lines, torn


def whole_lines(path: Path) -> list[bytes]:
    """The whole lines; none of a file that is not there. Raises OSError."""
    return read_lines(path)[0] if path.is_file() else []


def replace_lines(path: Path, lines: list[bytes]) -> None:
    """Replace the file by these lines, as a whole. Raises OSError."""
    replace_file(path, b"".join(line + b"\n" for line in lines))


def parsed(line: bytes | str) -> dict[str, Any]:
    """The object of a line. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def readable(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """For those who show what there is: the number of every line that is not blank, and its object, None
    where it is damaged.

    A last line without an end counts where it can be read. Raises OSError.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line)
        except ValueError:
            yield number, None
