"""Published data sets: their addresses and digests, and how they are downloaded, checked and unpacked.

``downloads.toml`` lists the files. None of them is part of Outrider.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import ssl
import time
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

import httpx2
from pydantic import TypeAdapter

from outrider import __version__
from outrider.config import Settings
from outrider.environments.alfworld.made_games import put_command
from outrider.errors import DataError
from outrider.files import file_checksum, file_sha256, sync

GAME: Final = "game.tw-pddl"
"""Name of every ALFWorld game file; the only files in which the releases differ."""

_HUB: Final = "https://huggingface.co"
_CHUNK: Final = 1 << 20
_MAX_FAILURES: Final = 4  # in a row, without a byte more than before
_TIMEOUT_S: Final = 60.0  # for one read, not for the whole file
_MAX_WAIT_S: Final = 60.0  # before the next request, whatever Retry-After names
_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")  # Content-Range, RFC 9110 section 14.4


class DataFile(Settings):
    """A file, and the addresses at which it is tried in this order. Without ``sha256`` it cannot be verified.

    ``outrider data get`` skips a file that is not ``is_default``; ``check`` recognizes it.
    """

    name: str
    urls: tuple[str, ...]
    num_bytes: int
    sha256: str | None = None
    is_default: bool = True


class DataSet(Settings):
    """A data set. ``after`` are the commands that follow the download; ``{dir}`` is its folder.

    If ``unpacked_folder`` is set, the files are zip archives of that folder.
    """

    title: str
    purpose: str
    licence: str
    files: tuple[DataFile, ...] = ()
    unpacked_folder: str | None = None
    unpacked_bytes: int = 0
    after: tuple[str, ...] = ()

    @property
    def default_files(self) -> tuple[DataFile, ...]:
        """The files that are downloaded."""
        return tuple(file for file in self.files if file.is_default)

    @property
    def num_bytes(self) -> int:
        """Size of the download."""
        return sum(file.num_bytes for file in self.default_files)


@cache
def data_sets() -> Mapping[str, DataSet]:
    """Return the known data sets by name."""
    text = Path(__file__).with_name("downloads.toml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, DataSet]).validate_python(tomllib.loads(text))


# --- Files that exist ---


class FileState(StrEnum):
    """Result of a check. ``UNKNOWN`` has the right size, but its digest is not known."""

    OK = "ok"
    DIFFERS = "differs"
    INCOMPLETE = "incomplete"
    MISSING = "missing"
    UNKNOWN = "unknown"


Check: TypeAlias = tuple[FileState, str]
"""A state, and the details for the user."""


def part_path(file: DataFile, folder: Path) -> Path:
    """Return the path of an unfinished download."""
    return folder / f"{file.name}.part"


def check_file(file: DataFile, folder: Path) -> Check:
    """Compare a file with its size and digest."""
    path = folder / file.name
    if not path.is_file():
        part = part_path(file, folder)
        if part.is_file():
            return FileState.INCOMPLETE, f"{part.stat().st_size:,} of {file.num_bytes:,} bytes"
        return FileState.MISSING, f"{file.num_bytes:,} bytes"
    if (size := path.stat().st_size) != file.num_bytes:
        return FileState.DIFFERS, f"{size:,} bytes, expected {file.num_bytes:,}"
    digest = file_sha256(path)
    if file.sha256 is None:
        return FileState.UNKNOWN, f"no digest is known to compare with; its SHA-256 is {digest}"
    if digest != file.sha256:
        return FileState.DIFFERS, f"SHA-256 {digest}, expected {file.sha256}"
    return FileState.OK, f"{size:,} bytes, SHA-256 {digest}"


# --- Downloads ---


class _Interrupted(Exception):
    """A failure of the server or the connection that is retried, after at least ``wait_s`` seconds."""

    def __init__(self, problem: str, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class _Part:
    """An unfinished download: appends, hashes and counts bytes. Only one process at a time can open it."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("ab+")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._stream.close()
            raise DataError(f"{path}: another process is downloading this file") from error
        except OSError:
            pass  # a file system without locks
        self._stream.seek(0)
        self._digest = hashlib.sha256()
        self.size = 0
        while chunk := self._stream.read(_CHUNK):
            self._digest.update(chunk)
            self.size += len(chunk)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def append(self, chunk: bytes) -> None:
        self._stream.write(chunk)
        self._digest.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self._stream.truncate(0)
        self._digest, self.size = hashlib.sha256(), 0

    def close(self) -> None:
        """Write everything to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def download(file: DataFile, folder: Path, report: Callable[[int], None] = lambda _: None) -> str:
    """Download a file, or the rest of it, and return its SHA-256.

    The bytes go to ``NAME.part``, which is renamed when size and digest are right, and removed when they are
    not. After an interruption it remains, and the next call continues it.

    Args:
        report: is called with the number of bytes so far.

    Raises:
        DataError: no address has the file, or a server sent something else.
        OSError: for example if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = part_path(file, folder)
    part = _Part(path)
    errors = []
    try:
        for url in file.urls:
            try:
                _complete(part, file, url, report)
                break
            except DataError as error:
                errors.append(str(error))
        else:
            raise DataError(f"{file.name}: {'; '.join(errors)}")
    finally:
        part.close()
        if not part.size:
            path.unlink(missing_ok=True)
    os.replace(path, folder / file.name)
    sync(folder)
    return part.digest


def _complete(part: _Part, file: DataFile, url: str, report: Callable[[int], None]) -> None:
    """Append the missing bytes, over several connections if they break, and compare the digest."""
    address, headers = _request(url)
    if part.size > file.num_bytes:
        part.clear()
    with httpx2.Client(
        verify=ssl.create_default_context(), timeout=_TIMEOUT_S, follow_redirects=True, headers=headers
    ) as client:
        failures, largest = 0, part.size
        while part.size < file.num_bytes:
            try:
                _receive(client, address, part, file, report)
            except (httpx2.TransportError, _Interrupted) as error:
                failures = 0 if part.size > largest else failures + 1
                largest = max(largest, part.size)
                if failures > _MAX_FAILURES:
                    problem = str(error) or type(error).__name__
                    raise DataError(f"{address}: {problem}; run the command again to continue") from error
                time.sleep(max(failures, getattr(error, "wait_s", 0.0)))
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:  # too many redirects, a wrong HF_ENDPOINT
                raise DataError(f"{address}: {error}") from error
    if file.sha256 is not None and part.digest != file.sha256:
        found = part.digest
        part.clear()
        raise DataError(f"{address}: SHA-256 {found}, expected {file.sha256}; the download was removed")


def _request(url: str) -> tuple[str, dict[str, str]]:
    """Return the address and the headers: files of the Hugging Face hub come from ``HF_ENDPOINT``, with the
    token of ``HF_TOKEN`` or of the login. A redirect to another host does not get the token.
    """
    # compressed bytes would have another size and digest
    headers = {"Accept-Encoding": "identity", "User-Agent": f"outrider/{__version__}"}
    if not url.startswith(f"{_HUB}/"):
        return url, headers
    from huggingface_hub import get_token

    if token := get_token():
        headers["Authorization"] = f"Bearer {token}"
    return os.environ.get("HF_ENDPOINT", _HUB).rstrip("/") + url.removeprefix(_HUB), headers


def _receive(
    client: httpx2.Client, address: str, part: _Part, file: DataFile, report: Callable[[int], None]
) -> None:
    """Append what one response contains: the rest of the file, or the part of it that the server sends at a
    time. Starts from the beginning if the server ignores the range.
    """
    headers = {"Range": f"bytes={part.size}-"} if part.size else {}
    with client.stream("GET", address, headers=headers) as response:
        status = response.status_code
        if status == 429 or status >= 500:
            raise _Interrupted(f"the server responded with status {status}", _retry_after(response))
        is_range = status == 206
        if is_range or status == 416:
            content_range = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            start, total = (content_range[1], content_range[3]) if content_range else (None, "*")
            if total != "*" and int(total) != file.num_bytes:  # another file than the one that was begun
                part.clear()
                raise DataError(
                    f"{address}: {int(total):,} bytes, expected {file.num_bytes:,}; "
                    f"{file.name}.part was removed"
                )
            if status == 416 or start is None or int(start) != part.size:
                raise _Interrupted(f"the server did not continue the file at byte {part.size:,}")
        if not response.is_success:
            hint = ": log in with 'hf auth login', or set HF_TOKEN" if status in (401, 403) else ""
            raise DataError(f"{address}: status {status} {response.reason_phrase}{hint}")
        if response.headers.get("Content-Type", "").startswith("text/html"):
            raise DataError(
                f"{address}: the server sent a web page in place of the file (a login, a download limit, or "
                f"a file that was removed); you can download it in a browser and store it as {file.name}"
            )
        length = int(response.headers.get("Content-Length", -1))
        if not is_range:
            if length >= 0 and length != file.num_bytes:
                raise DataError(f"{address}: {length:,} bytes, expected {file.num_bytes:,}")
            part.clear()
        for chunk in response.iter_raw():  # with a chunk size, a broken connection would lose a part of one
            if part.size + len(chunk) > file.num_bytes:
                part.clear()
                raise DataError(
                    f"{address}: more than the expected {file.num_bytes:,} bytes; the download was removed"
                )
            part.append(chunk)
            report(part.size)
    if part.size < file.num_bytes:
        raise _Interrupted(f"the response ended after {part.size:,} of {file.num_bytes:,} bytes")


def _retry_after(response: httpx2.Response) -> float:
    """Seconds to wait according to the header ``Retry-After``, at most ``_MAX_WAIT_S``."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return min(float(value), _MAX_WAIT_S)
    try:
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _MAX_WAIT_S)


# --- ALFWorld's archives: they share one folder, and every release unpacks to the same name ---


def unpack(archives: Sequence[Path], folder: Path, root: str) -> int:
    """Unpack zip archives into ``folder / root`` and return the number of files that were written.

    Files that are already equal are skipped; a file in several archives comes from the last one.

    Raises:
        DataError: an archive is damaged, contains a path outside of ``root``, or the folder has games of
            another release.
    """
    members: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
    for archive in archives:
        for info in _members(archive, root):
            members[info.filename] = (archive, info)
    changed = {name: source for name, source in members.items() if not _is_equal(folder / name, source[1])}
    for name, (archive, _) in changed.items():
        if PurePosixPath(name).name == GAME and (folder / name).exists():
            raise DataError(
                f"{folder / name} differs from the game in {archive.name}: another release was unpacked "
                f"here; remove {folder / root}, or use another --dir"
            )
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            for name in (name for name, source in changed.items() if source[0] == archive):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f"{target.name}.tmp")
                try:
                    with opened.open(name) as source, temporary.open("wb") as stream:
                        shutil.copyfileobj(source, stream, _CHUNK)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    temporary.unlink(missing_ok=True)
                    raise DataError(f"{archive}: {name}: {error}") from error
                os.replace(temporary, target)
    return len(changed)


def check_unpacked(archives: Sequence[Path], folder: Path, root: str) -> Check:
    """Report whose games the folder contains: those of one of the archives, or a mix."""
    names = [game.relative_to(folder).as_posix() for game in sorted((folder / root).rglob(GAME))]
    if not names:
        return FileState.MISSING, "no games; outrider data get unpacks the archives"
    counts = []
    for archive in archives:
        games = {info.filename: info for info in _members(archive, root) if info.filename.endswith(GAME)}
        num_equal = sum(name in games and _is_equal(folder / name, games[name]) for name in names)
        if num_equal == len(games) == len(names):
            return FileState.OK, f"{num_equal:,} games, those of {archive.name}"
        if games:
            counts.append(f"{num_equal:,} of the {len(games):,} games of {archive.name}")
    if counts:
        return FileState.DIFFERS, f"{len(names):,} games: {', '.join(counts)}"
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return (
        FileState.UNKNOWN,
        f"{len(names):,} games, but no archive to compare them with; SHA-256 of all is {digest.hexdigest()}",
    )


def check_commands(folder: Path, root: str) -> Check:
    """Report the command with which the games put things down. Games with different ones are of different
    releases, whatever the archives are.
    """
    counts: Counter[str] = Counter()
    for game in sorted((folder / root).rglob(GAME)):
        try:
            command = put_command(str(json.loads(game.read_bytes())["grammar"]))
        except (ValueError, KeyError, TypeError):
            command = None
        counts["unknown" if command is None else f'"{command}"'] += 1
    listed = ", ".join(f"{command} in {num:,} games" for command, num in counts.most_common())
    if not counts or "unknown" in counts:
        return FileState.UNKNOWN, f"command to put a thing down: {listed or 'no games'}"
    if len(counts) > 1:
        return FileState.DIFFERS, f"releases are mixed, command to put a thing down: {listed}"
    return FileState.OK, f"command to put a thing down: {listed}"


def _members(archive: Path, root: str) -> list[zipfile.ZipInfo]:
    """Return the files of a zip archive, which must all be below ``root``. Raises DataError."""
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = [info for info in opened.infolist() if not info.is_dir()]
    except zipfile.BadZipFile as error:
        raise DataError(f"{archive}: {error}") from error
    for info in infos:
        path = PurePosixPath(info.filename)
        if path.parts[:1] != (root,) or ".." in path.parts or "\\" in info.orig_filename:
            raise DataError(f"{archive}: {info.filename!r} is outside of {root}; nothing was unpacked")
    return infos


def _is_equal(path: Path, info: zipfile.ZipInfo) -> bool:
    """Whether a file has the size and checksum of an archive's member."""
    is_sized = path.is_file() and path.stat().st_size == info.file_size
    return is_sized and file_checksum(path) == info.CRC
