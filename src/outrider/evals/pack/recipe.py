"""Recipes that travel: a run's settings without the folders of the machine, and back again where they are
given.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from outrider.errors import PackError
from outrider.evals.pack.format import PackedInput, file_sha256

START: Final = "model.initial_checkpoint"
PACK_PREFIX: Final = "pack:"  # begins a path that is one of the pack's own run folders
EXTERNAL_PREFIX: Final = ".../"  # begins a path whose folders stayed on the machine that packed
_NUM_DIGITS: Final = 12  # of a hash in a name: other content under one name must stay another setting
_DATA: Final = frozenset((".jsonl", ".json", ".parquet", ".sqlite", ".toml", ".safetensors"))


def portable(
    tree: Mapping[str, Any], runs: Mapping[Path, str]
) -> tuple[dict[str, Any], dict[str, PackedInput]]:
    """Settings without the machine's folders, and what they named. ``runs`` are packed run folders (resolved)
    by their names.

    A path keeps its last part and the start of its content's SHA-256; one below a packed run becomes
    ``pack:NAME/...``.
    """
    inputs: dict[str, PackedInput] = {}

    def replaced(key: str, text: str) -> str:
        if not _is_path(key, text):
            return text
        path = Path(text).expanduser()
        for folder, name in runs.items():
            if path.resolve().is_relative_to(folder):
                return f"{PACK_PREFIX}{name}/{path.resolve().relative_to(folder).as_posix()}"
        filename = PureWindowsPath(text).name if "\\" in text else path.name
        sha256 = content_sha256(path)
        inputs[key] = PackedInput(name=filename, sha256=sha256)
        return (
            f"{EXTERNAL_PREFIX}sha256-{sha256[:_NUM_DIGITS]}/{filename}"
            if sha256
            else f"{EXTERNAL_PREFIX}{filename}"
        )

    changed: dict[str, Any] = _mapped(dict(tree), "", replaced)
    return changed, inputs


def local(
    tree: Mapping[str, Any], local_paths: Mapping[str, Path], inputs: Mapping[str, PackedInput]
) -> dict[str, Any]:
    """The other way: what is ``local_paths`` by dotted key stands in for what stayed on the machine that packed.

    Raises PackError for a path that is not given, and for one whose content is not what the run was computed
    with.
    """

    def replaced(key: str, text: str) -> str:
        if not text.startswith(EXTERNAL_PREFIX):
            return text
        packed = inputs.get(key, PackedInput(name=text.rpartition("/")[2], sha256=None))
        if key not in local_paths:
            checksum = f", SHA-256 {packed.sha256[:_NUM_DIGITS]}" if packed.sha256 else ""
            raise PackError(f"it needs {packed.name}{checksum}, which is not in the pack: give {key}=PATH")
        if packed.sha256 is not None and content_sha256(local_paths[key]) != packed.sha256:
            raise PackError(
                f"{key}={local_paths[key]} is not the {packed.name} of the run: its SHA-256 differs"
            )
        return str(local_paths[key])

    changed: dict[str, Any] = _mapped(dict(tree), "", replaced)
    return changed


def content_sha256(path: Path) -> str | None:
    """SHA-256 (hex) of a file, or of the names and contents in a folder; None where there is neither."""
    if path.is_file():
        return file_sha256(path)
    if not path.is_dir():
        return None
    digest = hashlib.sha256()
    for name in sorted(_files(path)):
        digest.update(f"{name}\0{file_sha256(path / name)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (
            (Path(parent) / name).relative_to(folder).as_posix()
            for name in names
            if (Path(parent) / name).is_file()
        )


def _is_path(key: str, text: str) -> bool:
    """A starting checkpoint always is one; another text where it is absolute, or names what is there."""
    if key == START and text != "none":
        return not text.startswith((PACK_PREFIX, EXTERNAL_PREFIX))
    if PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute() or text.startswith("~/"):
        return True
    return (
        ("/" in text or Path(text).suffix in _DATA)
        and len(text) < 4096
        and "\n" not in text
        and Path(text).exists()
    )


def _mapped(value: Any, key: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(item, f"{key}.{name}" if key else name, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, f"{key}.{index}", change) for index, item in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value
