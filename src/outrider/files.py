"""Files: locks, writing as a whole (forced to disk, never through a link), and files of JSON lines."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from outrider.errors import DataError

TEMPORARY = "*.tmp"
"""Pattern of the files that a killed process can leave behind."""

_PARTIAL: Final = ".partial"
_REMOVED: Final = ".removed"
_CREATE: Final = os.O_RDWR | os.O_CREAT
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class FileLock:
    """An advisory lock of a file, acquired at construction; ``descriptor`` is the open file.

    The kernel frees it when the process dies. Without ``waits``, BlockingIOError is raised if another open
    file has the lock. A link is not followed (OSError).
    """

    def __init__(self, path: Path, *, flags: int = _CREATE, mode: int = 0o644, waits: bool = False) -> None:
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
        """Close the file and free the lock; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def wait_for_lock(descriptor: int) -> None:
    """Lock an open file. Raises OSError if the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether any process has the lock of this file; a missing file is not locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # shared, so that two concurrent checks do not see each other's lock
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically: a kill leaves the old or the new content. Raises OSError."""
    with replacing(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces the file at the end of the block; an exception changes nothing.

    A link at ``path`` is replaced, not followed.
    """
    try:
        temporary, descriptor = _new_temporary(path)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            # before the rename, or a power failure may leave an empty file under the new name
            os.fsync(stream.fileno())
            os.replace(temporary, path)  # while the lock is held
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(path.parent)


@contextlib.contextmanager
def replacing_by_name(path: Path) -> Iterator[Path]:
    """Like :func:`replacing`, for writers that need a path: yields an unpredictable name beside ``path``."""
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
    """Yield a new folder that is renamed to ``folder``, missing or empty, at the end of the block.

    An exception leaves nothing. Only one writer at a time: remains of a killed one are removed.
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
    """Like :func:`replacing_folder` for any number of processes with the same content; the first one wins."""
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
    """Give a file, or a folder with its content, the permissions of new ones under the umask; writers such as
    safetensors and ``mkdtemp`` exclude all other users.
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

    A folder is renamed first, so that a kill leaves no part under its name; :func:`remove_leftovers` removes
    the rest.
    """
    if path.is_dir() and not path.is_symlink():
        if not path.name.endswith(_REMOVED):
            path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}{_REMOVED}"))
            sync(path.parent)  # survives a power failure
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def _new_temporary(path: Path) -> tuple[Path, int]:
    """Create a file beside ``path`` that is locked while it is written."""
    while True:
        temporary = _temporary_name(path)
        descriptor = os.open(temporary, _NEW | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            wait_for_lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # removed as a leftover before it was locked


def remove_leftovers(directory: Path, *, is_only_writer: bool = False) -> None:
    """Remove the remains of killed writers in a folder, except files that are being written.

    Partial folders are only removed by the only writer, because their state is unknown otherwise.
    """
    for left in directory.glob(TEMPORARY):
        if left.is_symlink():  # never created by Outrider
            left.unlink(missing_ok=True)
            continue
        with (
            contextlib.suppress(OSError),  # it is being written, or was removed
            FileLock(left, flags=os.O_RDONLY | os.O_NONBLOCK),
        ):
            left.unlink(missing_ok=True)
    removed = f".*.{'[0-9a-f]' * 16}{_REMOVED}"
    for pattern in (removed, f".*{_PARTIAL}") if is_only_writer else (removed,):
        for half in directory.glob(pattern):
            with contextlib.suppress(OSError):
                remove(half)


def append(path: Path, content: bytes) -> None:
    """Append lines to a file, created if missing, and force it to disk. Raises OSError, also for a link."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # the last line, by a kill
        append_bytes(descriptor, b"\n" * is_torn + content)
    finally:
        os.close(descriptor)


def append_bytes(descriptor: int, content: bytes) -> None:
    """Append to an open file and force it to disk; after an OSError nothing was appended."""
    size = os.fstat(descriptor).st_size
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)  # a full disk must not leave half a line
        raise


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, also with a byte order mark. Raises OSError, and DataError for invalid TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # those of numbers and dates are raised unchanged
        raise DataError(f"{path} cannot be read: {error}") from error


# --- Files with one JSON object per line, which grow during a run; a kill may truncate the last line ---


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Return the complete lines, and the truncated last one (usually empty). Raises OSError."""
    *lines, torn = path.read_bytes().split(b"\n")
    return lines, torn


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines; none for a missing file. Raises OSError."""
    return read_lines(path)[0] if path.is_file() else []


def replace_lines(path: Path, lines: list[bytes]) -> None:
    """Replace the content of the file by these lines. Raises OSError."""
    replace_file(path, b"".join(line + b"\n" for line in lines))


def parsed(line: bytes | str) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def readable(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the object of every line that is not blank; None for a damaged line.

    A last line without a line end counts if it can be parsed. Raises OSError.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line)
        except ValueError:
            yield number, None


def file_checksum(path: Path | str) -> int:
    """CRC-32 of a file: finds damage, not malice. Raises OSError."""
    value = 0
    with open(path, "rb") as file:
        # In pieces: a file of masters need not fit into memory beside the model.
        while piece := file.read(2**22):
            value = zlib.crc32(piece, value)
    return value


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_value(value: Any) -> Any:
    """The value with null for every number that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
