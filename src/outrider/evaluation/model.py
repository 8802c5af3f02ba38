"""The model of an evaluation: a Hugging Face model, a checkpoint of a training run, or the newest one of a
run.
"""

import hashlib
import json
from pathlib import Path

import torch

from outrider.engines.local.model import LanguageModel
from outrider.errors import CheckpointError
from outrider.training.checkpoint import STATE, checkpoints_newest_first
from outrider.training.policy import MASTERS, SHARDS
from outrider.training.run_dir import recorded_settings
from outrider.training.settings import ModelSettings


def resolve(settings: ModelSettings) -> ModelSettings:
    """The settings to load. For a run directory or a checkpoint in one, these are the settings of the run,
    overridden by explicitly set values except the name.

    Raises CheckpointError for a run without a checkpoint and a checkpoint outside of its run.
    """
    folder = Path(settings.name)
    if any((folder / name).exists() for name in (MASTERS, SHARDS, STATE)):
        run, checkpoint = folder.resolve().parent.parent, folder
        if not (run / "config.toml").exists():
            raise CheckpointError(
                f"{folder} is not in a run directory: set the model's name, and this folder as --checkpoint"
            )
    elif (folder / "config.toml").exists():
        checkpoints = checkpoints_newest_first(folder / "checkpoints")
        if not checkpoints:
            raise CheckpointError(f"{folder} has no checkpoint")
        run, checkpoint = folder, checkpoints[0]
    else:
        return settings
    trained = recorded_settings(run / "config.toml").model
    overrides = {name: value for name, value in settings if name in settings.model_fields_set - {"name"}}
    return trained.model_copy(update={"initial_checkpoint": str(checkpoint), **overrides})


def weights_hash(loaded: LanguageModel) -> str:
    """BLAKE2b (hex) over names, types and bytes of all weights; equal if and only if the models are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def template_hash(loaded: LanguageModel) -> str:
    """BLAKE2b (hex) over the chat template, which affects prompts and is not part of the weights."""
    template = json.dumps(loaded.tokenizer.chat_template, sort_keys=True)
    return hashlib.blake2b(template.encode(), digest_size=16).hexdigest()
