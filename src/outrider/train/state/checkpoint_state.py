"""The plain data of a checkpoint, ``state.json``: written with a checksum of its own, read back whole or not
at all.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.atomic_io import replace_file
from outrider.errors import CheckpointError

STATE: Final = "state.json"
_OWN: Final = "own_checksum"


def file_checksum(path: Path) -> int:
    """CRC-32 of a file: finds damage, not malice. Raises OSError."""
    value = 0
    with path.open("rb") as file:
        # In pieces: a file of masters need not fit into memory beside the model.
        while piece := file.read(2**22):
            value = zlib.crc32(piece, value)
    return value


def write_checksummed(path: Path, content: Mapping[str, Any]) -> None:
    """Put an object of plain data with the checksum of all of it in the place of the file. Raises OSError."""
    plain = json.loads(json.dumps(content))  # numbers as keys become text, as the reader will find them
    checksummed = {**plain, _OWN: _checksum(plain)}
    replace_file(path, json.dumps(checksummed, indent=1, sort_keys=True).encode())


def read_checksummed(path: Path) -> dict[str, Any]:
    """Reads what :func:`write_checksummed` wrote; a file of an earlier Outrider, which has no checksum, is taken
    as it is (:func:`has_checksum` asks for it).

    Raises OSError, and ValueError for what is damaged.
    """
    content = _read(path)
    if content.pop(_OWN, None) not in (None, _checksum(content)):
        raise ValueError(f"the contents of {path.name} are not what was written")
    return content


def has_checksum(path: Path) -> bool:
    """Whether a file that :func:`read_checksummed` has read has a checksum of its own: without one nobody can tell
    that it is whole.
    """
    return _read(path).get(_OWN) is not None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is no JSON that was written here") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    return content


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files have not been looked at. Raises CheckpointError."""
    try:
        return read_checksummed(checkpoint / STATE)
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> CheckpointError:
    """The one line for a checkpoint that cannot be read."""
    if isinstance(error, FileNotFoundError):
        reason = f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    elif isinstance(error, KeyError):
        reason = f"{STATE} lacks {error}"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"checkpoint {checkpoint} is damaged: {reason}")


def _checksum(content: Mapping[str, Any]) -> int:
    """Of the values, however the file is laid out."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
