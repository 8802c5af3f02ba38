"""The plain data of a checkpoint, ``state.json``: written with a checksum of its own, read back whole or not
at all.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError
from outrider.files import (
    remove,
    remove_leftovers,
    replace_file,
    replacing_by_name,
    replacing_folder,
    sync,
    whole_lines,
)
from outrider.training.policy import Scorer, tensor_files

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
    """Reads what :func:`write_checksummed` wrote; a file of an earlier Outrider, which has no checksum, is
    taken as it is (:func:`has_checksum` asks for it).

    Raises OSError, and ValueError for what is damaged.
    """
    content = _read(path)
    if content.pop(_OWN, None) not in (None, _checksum(content)):
        raise ValueError(f"the contents of {path.name} are not what was written")
    return content


def has_checksum(path: Path) -> bool:
    """Whether a file that :func:`read_checksummed` has read has a checksum of its own: without one nobody can
    tell that it is whole.
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


# A run's records beside its checkpoints, counted and with checksums in each of them: what vanishes later is
# noticed.
#
# It lies beside ``state.json`` and not in it, because metrics hold times: two runs of the same bits differ in
# them.


RECORDS: Final = "records.json"
_EVALUATION: Final = re.compile(r"evaluation-(\d+)\.parquet")
_METRICS, _EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
_MAX_NAMES: Final = 3
_FOLDERS: Final = ("traces", "rollouts", "memory")


class Records:
    """Metrics, evaluations and traces of one run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[str, tuple[int, int, int]] = {}  # these files never change: size, time, checksum

    def checksums(self) -> dict[str, Any]:
        """Counts and checksums of what is there now, as a checkpoint holds them. Raises OSError."""
        lines = {name: self._lines(name) for name in (_METRICS, _EVALUATIONS)}
        counted = {
            name: {"num_lines": len(content), "checksum": _lines_checksum(content)}
            for name, content in lines.items()
        }
        num = len(lines[_EVALUATIONS])
        return counted | {folder: self._files(folder, num) for folder in _FOLDERS}

    def _files(self, folder: str, num_evaluations: int) -> dict[str, int]:
        names = sorted(path.name for path in (self._run / folder).glob("*.parquet"))
        return {name: self._checksum(folder, name) for name in names if _belongs(name, num_evaluations)}

    def write_checksums(self, checkpoint: Path) -> None:
        """Write it anew into a checkpoint: what came after it (the last evaluation) belongs to it too."""
        write_checksummed(checkpoint / RECORDS, self.checksums())

    def problems(self, checkpoint: Path) -> list[str]:
        """Names what is gone or is not what was written, one phrase each; empty where the checkpoint does not
        know.
        """
        try:
            known = read_checksummed(checkpoint / RECORDS)
            if not has_checksum(checkpoint / RECORDS):
                raise ValueError("its checksum is gone")
            problems = [
                text for name in (_METRICS, _EVALUATIONS) for text in self._file_problems(name, known[name])
            ]
            # the last two are not of an earlier Outrider
            files = [(folder, known.get(folder, {})) for folder in _FOLDERS]
            return problems + [
                text for folder, names in files for text in self._folder_problems(folder, names)
            ]
        except FileNotFoundError:
            return []  # of an earlier Outrider
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [
                (
                    f"{RECORDS} of {checkpoint.name} cannot be read ({error}), "
                    "so nobody knows whether records are gone"
                )
            ]

    def require_lines(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where lines are gone that the checkpoint of this state counts: none can be
        made again.
        """
        for name, key in ((_METRICS, "num_metric_records"), (_EVALUATIONS, "num_evaluations")):
            num_lines, num = len(self._lines(name)), int(state[key])
            if num_lines < num:
                raise CheckpointError(
                    f"{name} has {num_lines} lines, its checkpoint was saved at {num}: put the file back, "
                    "or begin a new run with model.initial_checkpoint"
                )

    def _lines(self, name: str) -> list[bytes]:
        return whole_lines(self._run / name)

    def _file_problems(self, name: str, known: Mapping[str, int]) -> list[str]:
        lines, num = self._lines(name), known["num_lines"]
        if len(lines) < num:
            return [f"{name} has {len(lines)} of {num} lines"]
        return (
            []
            if _lines_checksum(lines[:num]) == known["checksum"]
            else [f"the first {num} lines of {name} are not what was written"]
        )

    def _folder_problems(self, folder: str, known: Mapping[str, int]) -> list[str]:
        missing = [name for name in known if not (self._run / folder / name).is_file()]
        changed = [
            name for name in known if name not in missing and self._checksum(folder, name) != known[name]
        ]
        problems = (("missing", missing), ("not what was written", changed))
        return [f"{_join_names(names)} of the {folder}: {problem}" for problem, names in problems if names]

    def _checksum(self, folder: str, name: str) -> int:
        path = self._run / folder / name
        facts, key = path.stat(), f"{folder}/{name}"
        size, time, checksum = self._known.get(key, (-1, -1, 0))
        if (size, time) != (facts.st_size, facts.st_mtime_ns):
            checksum = file_checksum(path)
            self._known[key] = facts.st_size, facts.st_mtime_ns, checksum
        return checksum


def _belongs(name: str, num_evaluations: int) -> bool:
    """A run that went back may have files of evaluations that it will make again."""
    match = _EVALUATION.fullmatch(name)
    return match is None or int(match[1]) < num_evaluations


def _lines_checksum(lines: Sequence[bytes]) -> int:
    return zlib.crc32(b"\n".join(lines))


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (
        f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    )


# The frozen weights of the KL term, in a file of their own beside the checkpoints.


def save_reference(path: Path, reference: Scorer) -> int:
    """The frozen weights of the KL term; written once, because they differ from the model's after a cold
    start. Their checksum.
    """
    with replacing_by_name(path) as temporary:
        save_file(
            {name: p.detach().contiguous() for name, p in reference.model.named_parameters()}, temporary
        )
    return file_checksum(path)


@torch.no_grad()
def load_reference(path: Path, reference: Scorer, *, checksum: int | None) -> None:
    """Put the frozen weights back. ``checksum`` is what :func:`save_reference` gave, None where nobody wrote
    it down.

    Raises CheckpointError when they are missing, damaged or of another model.
    """
    try:
        if checksum is not None and file_checksum(path) != checksum:
            raise ValueError("the contents are not what was written")
        weights = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: it holds the weights that the KL term refers to; put it back"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"reference weights {path} are damaged: {str(error).splitlines()[0]}"
        ) from error
    parameters = dict(reference.model.named_parameters())
    if {name: p.shape for name, p in parameters.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(f"reference weights {path} belong to another model or adapter")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# Checkpoints: a folder that is either absent or whole, safetensors and JSON only, enough to continue bit for
# bit.
#
# Random streams are keyed by run seed and step (:mod:`outrider.seeding`), so their state is the step number.


_MEMORY = "memory.safetensors"
_NAME = re.compile(r"step-(\d+)")


class Weights(Protocol):
    """What a checkpoint holds the weights and the optimiser of."""

    @property
    def num_steps(self) -> int:
        """Optimiser steps."""
        ...

    def save(self, folder: Path) -> None:
        """Write them as safetensors into a folder. Raises OSError."""
        ...

    def load(self, folder: Path, *, num_steps: int) -> None:
        """Put them back. Raises CheckpointError, and OSError, ValueError or SafetensorError for damage."""
        ...


def save_checkpoint(
    folder: Path,
    weights: Weights,
    state: dict[str, Any],
    arrays: Mapping[str, NDArray[Any]] | None = None,
    *,
    records: Mapping[str, Any] | None = None,
    write_queue: Callable[[Path], None] | None = None,
) -> None:
    """Write under a temporary name, force to disk, rename. A kill leaves the earlier checkpoints as they
    were.

    ``arrays`` are the vectors of an algorithm's memory, whose plain data is in ``state``; ``records`` is what
    the run has on file beside its checkpoints (:mod:`outrider.training.checkpoint`); ``write_queue``
    writes the rollouts that are not trained on yet.

    Raises CheckpointError when it cannot be written (a full disk), which leaves them as they were too.
    """
    try:
        with replacing_folder(folder) as temporary:
            if write_queue is not None:
                write_queue(temporary)
            _write(temporary, weights, state, arrays or {})
            if records is not None:
                write_checksummed(temporary / RECORDS, records)
            # Only now, when the new one is whole: until here the earlier checkpoint of this step stands.
            _make_room(folder)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"cannot write checkpoint {folder.name}: {reason}; earlier checkpoints are whole"
        ) from error


def _make_room(folder: Path) -> None:
    """An earlier checkpoint goes; a file that only has its name is somebody's, and is kept under another
    one.
    """
    if folder.is_file() and not folder.is_symlink():
        os.replace(folder, folder.with_name(f"{folder.name}.not-a-checkpoint"))
    remove(folder)


def _write(
    temporary: Path, weights: Weights, state: dict[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    weights.save(temporary)
    if arrays:
        save_arrays(dict(arrays), temporary / _MEMORY)
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    # On disk before the state is, which vouches for them.
    for path in [*written, *{path.parent for path in written} - {temporary}]:
        sync(path)
    checksums = {path.relative_to(temporary).as_posix(): file_checksum(path) for path in written}
    write_checksummed(
        temporary / STATE, {**state, "num_optimizer_steps": weights.num_steps, "checksums": checksums}
    )
    sync(temporary)


def load_checkpoint(folder: Path, weights: Weights) -> dict[str, Any]:
    """Put masters, working copy and optimiser back; the saved state.

    Raises CheckpointError when files are missing, damaged, or belong to another model.
    """
    try:
        state = read_checksummed(folder / STATE)
        # All tensor files, also where the state forgot to name them: nothing is loaded unchecked.
        for name in sorted({*tensor_files(folder), *state["checksums"]}):
            if file_checksum(folder / name) != state["checksums"][name]:
                raise ValueError(f"the contents of {name} are not what was written")
        num_optimizer_steps = int(state["num_optimizer_steps"])
        weights.load(folder, num_steps=num_optimizer_steps)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(folder, error) from error
    return state


def require_intact(folder: Path, name: str) -> None:
    """Raises CheckpointError where a file of a checkpoint is not what was written; a file that came alone
    cannot be checked.
    """
    if not (folder / STATE).exists():
        return
    try:
        written = read_checksummed(folder / STATE)["checksums"][name]
        checksum = file_checksum(folder / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, error) from error
    if checksum != written:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: the contents of {name} are not what was written"
        )


def load_memory(folder: Path) -> dict[str, NDArray[Any]]:
    """The vectors of the algorithm's memory in a checkpoint that :func:`load_checkpoint` has read; empty
    without any.
    """
    return load_arrays(folder / _MEMORY) if (folder / _MEMORY).exists() else {}


def checkpoints_newest_first(folder: Path) -> list[Path]:
    """All checkpoints below ``folder``; one that was damaged after it was written is among them."""
    return [path for _, path in reversed(_numbered(folder))]


def checkpoint_step(checkpoint: Path) -> int:
    """The training step of a checkpoint that :func:`checkpoints_newest_first` found."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def checkpoint_step_or_none(checkpoint: Path) -> int | None:
    """The training step in the name of a checkpoint's folder; None for a folder of another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint below ``folder``, which may be damaged; None without any."""
    numbered = _numbered(folder)
    return numbered[-1][0] if numbered else None


def prune_checkpoints(folder: Path, *, max_checkpoints: int, newest: int) -> None:
    """Remove all but the last ``max_checkpoints`` checkpoints up to step ``newest``, which has just been
    written, and the one of step 0.

    From that one other algorithms can start. Those of later steps were damaged, or the run would not have
    gone back behind them; what a kill left half written goes too.
    """
    numbered = [(step, path) for step, path in _numbered(folder) if step > 0]
    retained = [path for step, path in numbered if step <= newest][-max_checkpoints:]
    for path in (path for _, path in numbered if path not in retained):
        remove(path)
    remove_leftovers(folder, is_only_writer=True)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders, ascending; a file, or a folder with another name, such as a copy that a user made,
    is none.
    """
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)
