"""Checkpoints: a folder that is either absent or whole, safetensors and JSON only, enough to continue bit for
bit.

Random streams are keyed by run seed and step (:mod:`outrider.seeding`), so their state is the step number.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

from outrider.atomic_io import remove, remove_leftovers, replacing_folder, sync
from outrider.errors import CheckpointError
from outrider.train.state.checkpoint_state import (
    STATE,
    damaged,
    file_checksum,
    read_checksummed,
    write_checksummed,
)
from outrider.train.state.records import RECORDS
from outrider.train.update.weight_files import tensor_files

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
    the run has on file beside its checkpoints (:mod:`outrider.train.state.records`); ``write_queue``
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
    """Remove all but the last ``max_checkpoints`` checkpoints up to step ``newest``, which has just been written, and
    the one of step 0.

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
