"""The frozen weights of the KL term, in a file of their own beside the checkpoints."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.atomic_io import replacing_by_name
from outrider.errors import CheckpointError
from outrider.train.state.checkpoint_state import file_checksum
from outrider.train.update.policy import Scorer


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
