"""The reproducibility pack on disk: its manifest, the names in it, and the check that every file is what was
packed.

    manifest.json       format, runs with versions and inputs, panels, commands, and every other file with
                        its SHA-256
    manifest.sha256     the manifest's own
    runs/NAME/          what a run folder has, without paths of the machine: config.toml, evaluations.jsonl,
                        metrics.jsonl
    panels/HASH.json    task keys of a panel
    exact.jsonl         exact returns of trainings that have no held-out panel, one line per seed
    tables.json         what follows from the results: scores, intervals, costs, comparisons

A pack may come from anybody: nothing is read outside its folder, no link is followed, and no command in it is
executed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import PackError

FORMAT: Final = "outrider pack 1"
MANIFEST: Final = "manifest.json"
CHECKSUM: Final = "manifest.sha256"
TABLES: Final = "tables.json"
EXACT: Final = "exact.jsonl"
MAX_FILES: Final = 10_000
MAX_TEXT: Final = 256 * 2**20  # bytes of a file that is parsed
_NAME: Final = r"^[A-Za-z0-9_=+-][A-Za-z0-9._=+-]{0,199}$"
Name = Annotated[str, Field(pattern=_NAME)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_RelativePath = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*(/[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*)*$")
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PackedFile(_Part):
    """Size in bytes and SHA-256 of a file."""

    num_bytes: int = Field(ge=0)
    sha256: Sha256


class PackedInput(_Part):
    """A file or folder that a recipe names and that is not in the pack; ``sha256`` is None where it was gone
    already.
    """

    name: str
    sha256: Sha256 | None


class PackedRun(_Part):
    """Where a run's results come from. ``versions`` are what its checkpoints recorded: packages, processor,
    threads.

    ``inputs`` are by the recipe's dotted key.
    """

    kind: Literal["training", "panel"]
    command: str
    versions: dict[str, str]
    inputs: dict[str, PackedInput]


class PackedEvalTasks(_Part):
    """``run`` has the recipe whose environment the tasks come from; ``num_tasks`` first tasks of
    ``split``.
    """

    run: Name
    split: str
    num_tasks: int = Field(ge=0)


class Manifest(_Part):
    """Contents of a pack. ``packed_on`` are facts of the machine that packed, which need not be the one that
    computed.
    """

    format: Literal["outrider pack 1"]
    outrider: str
    packed_on: dict[str, str]
    commands: tuple[str, ...]
    runs: dict[Name, PackedRun] = Field(max_length=1000)
    panels: dict[Sha256, PackedEvalTasks] = Field(max_length=1000)
    files: dict[_RelativePath, PackedFile] = Field(max_length=MAX_FILES)


def read_manifest(pack: Path) -> Manifest:
    """The manifest of an untouched pack, after every file has been checked.

    Raises PackError, naming the file, for one that was changed, added or taken away, for a link, and for a
    malformed manifest.
    """
    if not pack.is_dir():
        raise PackError(f"{pack} is no pack: there is no such folder")
    sizes = dict(_walk(pack, ""))
    for name in (MANIFEST, CHECKSUM):
        if name not in sizes:
            raise PackError(f"{pack} is no pack: it has no {name}")
    content = read_bytes(pack / MANIFEST)
    if read_bytes(pack / CHECKSUM) != checksum_line(content):
        raise PackError(f"{MANIFEST} is not what {CHECKSUM} says")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise PackError(
            f"{MANIFEST} is malformed: {f'{location}: ' if location else ''}{first['msg']}"[:300]
        ) from error
    names = sizes.keys() - {MANIFEST, CHECKSUM}
    if missing := sorted(manifest.files.keys() - names):
        raise PackError(f"{missing[0]} is missing{_more(missing)}")
    if added := sorted(names - manifest.files.keys()):
        raise PackError(f"{added[0]} was added{_more(added)}")
    for name, packed in sorted(manifest.files.items()):
        if sizes[name] != packed.num_bytes or file_sha256(pack / name) != packed.sha256:
            raise PackError(f"{name} was changed")
    return manifest


def checksum_line(manifest: bytes) -> bytes:
    """The content of ``manifest.sha256``, as ``sha256sum`` writes it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path) -> bytes:
    """A file that is parsed as a whole. Raises PackError where it is larger than any that was packed."""
    if path.stat().st_size > MAX_TEXT:
        raise PackError(f"{path.name} is larger than {MAX_TEXT >> 20} MiB")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Plain data of a JSON file. Raises PackError naming it."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path.name} is malformed: {error}") from error


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Relative names and sizes of all files. Raises PackError for what is neither a file nor a folder, and
    for too many.
    """
    num_files = 0
    pending = [(folder, prefix)]
    while pending:
        parent, before = pending.pop()
        for entry in os.scandir(parent):
            name, status = before + entry.name, entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append((parent / entry.name, f"{name}/"))
            elif stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            else:
                raise PackError(f"{name} is a link or no plain file: a pack holds neither")
            if (num_files := num_files + 1) > 2 * MAX_FILES:
                raise PackError(f"{folder} has more than {MAX_FILES} files")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
