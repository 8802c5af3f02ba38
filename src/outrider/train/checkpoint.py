"""Checkpoints: a folder that is either absent or whole, safetensors and JSON only, enough to continue bit for bit.

Random streams are keyed by run seed and step (:mod:`outrider.seeding`), so their state is the step number.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.durable import sync, temporary_name
from outrider.errors import CheckpointError
from outrider.train.policy import Policy, Scorer

_STATE = "state.json"
_MEMORY = "memory.safetensors"
_NAME = re.compile(r"step-(\d+)")
_TENSORS = ("masters.safetensors", "optimizer.safetensors")


def save_checkpoint(
    folder: Path, policy: Policy, state: dict[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """Write under a temporary name, force to disk, rename. A kill leaves the earlier checkpoints as they were.

    ``arrays`` are the vectors of an algorithm's memory, whose plain data is in ``state``.

    Raises CheckpointError when it cannot be written (a full disk), which leaves them as they were too.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write(temporary, policy, state, arrays or {})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"cannot write checkpoint {folder.name}: {reason}; earlier checkpoints are whole") from error
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    sync(folder.parent)


def _write(temporary: Path, policy: Policy, state: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    temporary.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in policy.masters.items()}, temporary / "masters.safetensors")
    save_file(_optimizer_tensors(policy), temporary / "optimizer.safetensors")
    if arrays:
        save_arrays(dict(arrays), temporary / _MEMORY)
    checksums = {path.name: _checksum(path) for path in sorted(temporary.iterdir())}
    content = {**state, "num_optimizer_steps": policy.num_steps, "checksums": checksums}
    (temporary / _STATE).write_text(json.dumps(content, indent=1, sort_keys=True))
    for path in [*temporary.iterdir(), temporary]:
        sync(path)


def _checksum(path: Path) -> int:
    """CRC-32 of a file: finds damage, not malice."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            value = zlib.crc32(piece, value)
    return value


def _optimizer_tensors(policy: Policy) -> dict[str, Tensor]:
    tensors = {}
    for name, master in policy.masters.items():
        for key, value in policy.optimizer.state.get(master, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).contiguous()
    return tensors


def load_checkpoint(folder: Path, policy: Policy) -> dict[str, Any]:
    """Put masters, working copy and optimiser back; the saved state.

    Raises CheckpointError when files are missing, damaged, or belong to another model.
    """
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        for name in {*_TENSORS, *state["checksums"]}:
            if _checksum(folder / name) != state["checksums"][name]:
                raise ValueError(f"the contents of {name} are not what was written")
        masters, optimizer = (load_file(folder / name) for name in _TENSORS)
        num_optimizer_steps = int(state["num_optimizer_steps"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {str(error).splitlines()[0]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in masters.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in policy.masters.items()}:
        raise CheckpointError(f"checkpoint {folder} belongs to another model or adapter")
    policy.optimizer.state.clear()
    for name, master in policy.masters.items():
        master.copy_(masters[name])
        moments = {
            key.split("/", 1)[0]: value.to(master.device) for key, value in optimizer.items() if key.split("/", 1)[1] == name
        }
        if moments:
            policy.optimizer.state[master] = moments
    policy.num_steps = num_optimizer_steps
    policy.round_masters()
    return state


def require_intact(folder: Path, name: str) -> None:
    """Raises CheckpointError where a file of a checkpoint is not what was written; a file that came alone cannot be checked."""
    if not (folder / _STATE).exists():
        return
    try:
        written = json.loads((folder / _STATE).read_text())["checksums"][name]
        found = _checksum(folder / name)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {str(error).splitlines()[0]}") from error
    if found != written:
        raise CheckpointError(f"checkpoint {folder} is damaged: the contents of {name} are not what was written")


def load_memory(folder: Path) -> dict[str, NDArray[Any]]:
    """The vectors of the algorithm's memory in a checkpoint that :func:`load_checkpoint` has read; empty without any."""
    return load_arrays(folder / _MEMORY) if (folder / _MEMORY).exists() else {}


def save_reference(path: Path, reference: Scorer) -> int:
    """The frozen weights of the KL term; written once, because they differ from the model's after a cold start. Their checksum."""
    temporary = temporary_name(path)
    save_file({name: p.detach().contiguous() for name, p in reference.model.named_parameters()}, temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
    return _checksum(path)


@torch.no_grad()
def load_reference(path: Path, reference: Scorer, *, checksum: int | None) -> None:
    """Put the frozen weights back. ``checksum`` is what :func:`save_reference` gave, None where nobody wrote it down.

    Raises CheckpointError when they are missing, damaged or of another model.
    """
    try:
        if checksum is not None and _checksum(path) != checksum:
            raise ValueError("the contents are not what was written")
        weights = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"reference weights {path} are damaged: {str(error).splitlines()[0]}") from error
    parameters = dict(reference.model.named_parameters())
    if {name: p.shape for name, p in parameters.items()} != {name: w.shape for name, w in weights.items()}:
        raise CheckpointError(f"reference weights {path} belong to another model or adapter")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def checkpoints_newest_first(folder: Path) -> list[Path]:
    """All checkpoints below ``folder``; one that was damaged after it was written is among them."""
    return [path for _, path in reversed(_numbered(folder))]


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint below ``folder``, which may be damaged; None without any."""
    found = _numbered(folder)
    return found[-1][0] if found else None


def prune_checkpoints(folder: Path, *, keep: int, newest: int) -> None:
    """Remove all but the last ``keep`` checkpoints up to step ``newest``, which has just been written, and the one of step 0.

    From that one other algorithms can start. Those of later steps were damaged, or the run would not have gone back behind them; what
    a kill left half written goes too.
    """
    numbered = [(step, path) for step, path in _numbered(folder) if step > 0]
    kept = [path for step, path in numbered if step <= newest][-keep:]
    for path in [*(path for _, path in numbered if path not in kept), *folder.glob(".step-*.partial")]:
        shutil.rmtree(path)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders, ascending; a folder with another name, such as a copy that a user made, is none."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match)
