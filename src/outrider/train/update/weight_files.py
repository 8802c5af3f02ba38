"""Weights and optimiser on disk: safetensors by names that do not say how many processes wrote them.

One process writes ``masters.safetensors`` and ``optimizer.safetensors``, many the shards in ``weights/``.
Masters have the parameters' names, moments ``exp_avg/NAME`` and so on. Any number of processes reads both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import CheckpointError

SHARDS: Final = "weights"
MASTERS: Final = "masters.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"


def tensor_files(folder: Path) -> list[str]:
    """Files of weights that a checkpoint has to have, relative to it."""
    if (folder / SHARDS).is_dir():
        return sorted(f"{SHARDS}/{path.name}" for path in (folder / SHARDS).glob("*.safetensors"))
    return [MASTERS, OPTIMIZER]


def tensor_folder(folder: Path) -> Path:
    """Where a reader of many files finds them."""
    return folder / SHARDS if (folder / SHARDS).is_dir() else folder


def read_tensors(folder: Path, *, with_optimizer: bool) -> dict[str, Tensor]:
    """All of them in memory, by name. Raises OSError, SafetensorError and ValueError for what is damaged."""
    if not (folder / SHARDS).is_dir():
        names = (MASTERS, OPTIMIZER) if with_optimizer else (MASTERS,)
        return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    return _read_shards(folder / SHARDS, with_optimizer=with_optimizer)


def _read_shards(folder: Path, *, with_optimizer: bool) -> dict[str, Tensor]:
    """The whole tensors from the shards of all ranks."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in known.items()
        if isinstance(metadata, TensorStorageMetadata) and (with_optimizer or "/" not in name)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def require_shapes(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError where the masters on disk (``stored``) are not those of the model."""
    if dict(stored) != dict(shapes):
        raise CheckpointError(
            f"checkpoint {folder} belongs to another model or adapter: set model.name, model.lora and "
            "model.trained_layers as they were"
        )
