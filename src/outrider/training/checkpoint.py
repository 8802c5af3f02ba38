"""Checkpoints: a folder that is either absent or complete, of safetensors and JSON files, from which a run
continues bit for bit.

``state.json`` has its own checksum and those of the other files. Random streams are keyed by run seed and
step (:mod:`outrider.seeding`), so their state is the step number.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from outrider.errors import CheckpointError
from outrider.files import (
    file_checksum,
    remove,
    remove_leftovers,
    replace_file,
    replacing_by_name,
    replacing_folder,
    sync,
)
from outrider.training.policy import OPTIMIZER, Policy, Scorer, tensor_files
from outrider.viewer.run_reader import CHECKPOINT, numbered_checkpoints

if TYPE_CHECKING:
    from outrider.training.learner import Learner

STATE: Final = "state.json"
_OWN: Final = "own_checksum"


def write_checksummed(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file by an object of plain data with a checksum. Raises OSError."""
    plain = json.loads(json.dumps(content))  # keys that are numbers become text, as the reader gets them
    checksummed = {**plain, _OWN: _checksum(plain)}
    replace_file(path, json.dumps(checksummed, indent=1, sort_keys=True).encode())


def read_checksummed(path: Path) -> dict[str, Any]:
    """Read what :func:`write_checksummed` wrote. Raises OSError, and ValueError for damage."""
    content = _read(path)
    if _OWN not in content:
        raise ValueError(
            f"{path.name} has no checksum; if Outrider 0.2 or older wrote it, continue the run with that "
            "version, or begin a new run with model.initial_checkpoint"
        )
    if content.pop(_OWN) != _checksum(content):
        raise ValueError(f"the contents of {path.name} are not what was written")
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is not valid JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} contains no object")
    return content


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a checkpoint without checking its other files. Raises CheckpointError."""
    try:
        return read_checksummed(checkpoint / STATE)
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error


def read_versions(checkpoint: Path) -> dict[str, str]:
    """Return the versions that wrote a checkpoint, or weights of an earlier Outrider, whose state has no
    checksum; empty if none are recorded. Raises CheckpointError for a file that is no JSON.
    """
    try:
        return dict(_read(checkpoint / STATE).get("versions", {}))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that cannot be read, in one line."""
    if isinstance(error, FileNotFoundError):
        reason = f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    elif isinstance(error, KeyError):
        reason = f"{STATE} lacks {error}"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"checkpoint {checkpoint} is damaged: {reason}")


def _checksum(content: Mapping[str, Any]) -> int:
    """Checksum of the values, which does not depend on the layout of the file."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def save_reference(path: Path, reference: Scorer) -> int:
    """Write the frozen weights of the KL term, which differ from the model's after a cold start, into a file
    beside the checkpoints. Returns their checksum.
    """
    with replacing_by_name(path) as temporary:
        save_file(
            {name: p.detach().contiguous() for name, p in reference.model.named_parameters()}, temporary
        )
    return file_checksum(path)


def require_reference(path: Path, *, checksum: int | None) -> None:
    """Raise CheckpointError if the file of the reference weights is missing or not what was written."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: it contains the reference weights of the KL term; put it back"
        )
    if checksum is not None and file_checksum(path) != checksum:
        raise CheckpointError(f"reference weights {path} are damaged: the contents are not what was written")


@torch.no_grad()
def load_reference(path: Path, reference: Scorer, *, checksum: int | None) -> None:
    """Load the frozen reference weights. ``checksum`` is the value that :func:`save_reference` returned, or
    None if the checkpoint has none.

    Raises CheckpointError if they are missing, damaged or of another model.
    """
    try:
        require_reference(path, checksum=checksum)
        weights = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"reference weights {path} are damaged: {str(error).splitlines()[0]}"
        ) from error
    parameters = dict(reference.model.named_parameters())
    if {name: p.shape for name, p in parameters.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(f"reference weights {path} belong to another model or adapter")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# An evaluation trains nothing, so its checkpoint names the weights instead of a copy of them.


_INITIAL: Final = "initial_weights"


def describe_weights(source: Path | None) -> dict[str, Any]:
    """Return the path and the checksums of the checkpoint ``source``; None: the weights of the model itself.

    Raises CheckpointError if they cannot be read.
    """
    if source is None:
        return {"path": None, "checksums": {}}
    if (initial := initial_weights(source)) is not None:
        return initial
    names = [name for name in tensor_files(source) if name != OPTIMIZER]
    try:
        return {"path": str(source), "checksums": {name: file_checksum(source / name) for name in names}}
    except OSError as error:
        raise damaged(source, error) from error


def initial_weights(checkpoint: Path) -> dict[str, Any] | None:
    """Return what :func:`describe_weights` returned when this checkpoint was written; None for a checkpoint
    with weights of its own.
    """
    try:
        initial = _read(checkpoint / STATE).get(_INITIAL)
    except (OSError, ValueError):
        return None
    return initial if isinstance(initial, dict) else None


def find_weights(checkpoint: Path) -> Path | None:
    """Return the checkpoint with the weights of ``checkpoint``: itself, the one that an evaluation read, or
    None if an evaluation read the weights of the model itself.

    Raises CheckpointError if the weights of an evaluation are missing or have changed.
    """
    if (initial := initial_weights(checkpoint)) is None:
        return checkpoint
    if initial["path"] is None:
        return None
    source = Path(initial["path"])
    try:
        is_intact = all(file_checksum(source / name) == value for name, value in initial["checksums"].items())
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} is an evaluation of the weights in {source}, which cannot be read: "
            f"{error.strerror}; put them back"
        ) from error
    if not is_intact:
        raise CheckpointError(
            f"{checkpoint} is an evaluation of weights in {source}, which have changed since"
        )
    return source


_MEMORY = "memory.safetensors"


def save_checkpoint(
    folder: Path,
    weights: "Learner | Policy",
    state: dict[str, Any],
    arrays: Mapping[str, NDArray[Any]] | None = None,
    *,
    write_queue: Callable[[Path], None] | None = None,
    initial: Mapping[str, Any] | None = None,
) -> None:
    """Write under a temporary name, force to disk, rename. A kill leaves the earlier checkpoints unchanged.

    ``arrays`` are the vectors of an algorithm's memory, whose plain data is in ``state``; ``write_queue``
    writes the rollouts that are not trained on yet; ``initial`` (:func:`describe_weights`) is stored instead
    of the weights.

    Raises CheckpointError if the disk is full or cannot be written; the earlier checkpoints are unchanged
    then too.
    """
    try:
        with replacing_folder(folder) as temporary:
            if write_queue is not None:
                write_queue(temporary)
            if initial is None:
                weights.save(temporary)
            else:
                state = {**state, _INITIAL: initial}
            if arrays:
                save_arrays(dict(arrays), temporary / _MEMORY)
            written = sorted(path for path in temporary.rglob("*") if path.is_file())
            # On disk before the state, which has their checksums.
            for path in [*written, *{path.parent for path in written} - {temporary}]:
                sync(path)
            checksums = {path.relative_to(temporary).as_posix(): file_checksum(path) for path in written}
            write_checksummed(
                temporary / STATE, {**state, "num_optimizer_steps": weights.num_steps, "checksums": checksums}
            )
            sync(temporary)
            # The earlier checkpoint of this step is removed only now, when the new one is complete. A file of
            # this name is not ours, so it is renamed.
            if folder.is_file() and not folder.is_symlink():
                os.replace(folder, folder.with_name(f"{folder.name}.not-a-checkpoint"))
            remove(folder)
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"cannot write checkpoint {folder.name}: {reason}; earlier checkpoints are whole"
        ) from error


def load_checkpoint(folder: Path, weights: "Learner | Policy") -> dict[str, Any]:
    """Load master weights, working copy and optimizer; return the saved state.

    Raises CheckpointError if files are missing, damaged, or belong to another model.
    """
    try:
        state = read_checksummed(folder / STATE)
        # All tensor files, also those that the state does not name: nothing is loaded unchecked.
        names = [] if _INITIAL in state else tensor_files(folder)
        for name in sorted({*names, *state["checksums"]}):
            if file_checksum(folder / name) != state["checksums"][name]:
                raise ValueError(f"the contents of {name} are not what was written")
        num_optimizer_steps = int(state["num_optimizer_steps"])
        if _INITIAL not in state:  # a finished evaluation needs no weights
            weights.load(folder, num_steps=num_optimizer_steps)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise damaged(folder, error) from error
    return state


def require_intact(folder: Path, name: str) -> None:
    """Raise CheckpointError if a file of a checkpoint differs from what was written; without the checkpoint's
    state it cannot be checked.
    """
    if not (folder / STATE).exists():
        return
    try:
        written = _read(folder / STATE)["checksums"][name]  # also one of an earlier version
        checksum = file_checksum(folder / name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, error) from error
    if checksum != written:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: the contents of {name} are not what was written"
        )


def load_memory(folder: Path) -> dict[str, NDArray[Any]]:
    """Return the vectors of the algorithm's memory in a checkpoint that :func:`load_checkpoint` has read, if
    any.
    """
    return load_arrays(folder / _MEMORY) if (folder / _MEMORY).exists() else {}


def checkpoints_newest_first(folder: Path) -> list[Path]:
    """Return all checkpoints in ``folder``, including damaged ones."""
    return [path for _, path in reversed(numbered_checkpoints(folder))]


def checkpoint_step_or_none(checkpoint: Path) -> int | None:
    """The training step in the name of a checkpoint's folder; None for a folder of another name."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def checkpoint_step(checkpoint: Path) -> int:
    """The training step of a checkpoint that :func:`checkpoints_newest_first` found."""
    step = checkpoint_step_or_none(checkpoint)
    assert step is not None
    return step


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint below ``folder``, which may be damaged; None without any."""
    numbered = numbered_checkpoints(folder)
    return numbered[-1][0] if numbered else None


def prune_checkpoints(folder: Path, *, max_checkpoints: int, newest: int) -> None:
    """Remove all checkpoints but the last ``max_checkpoints`` up to step ``newest``, which has just been
    written, and the one of step 0, from which other algorithms can start.

    Those of later steps were damaged, or the run would not have continued before them. Partial ones of a kill
    are removed too.
    """
    numbered = [(step, path) for step, path in numbered_checkpoints(folder) if step > 0]
    retained = [path for step, path in numbered if step <= newest][-max_checkpoints:]
    for path in (path for _, path in numbered if path not in retained):
        remove(path)
    remove_leftovers(folder, is_only_writer=True)
