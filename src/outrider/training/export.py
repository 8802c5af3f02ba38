"""``outrider export``: the weights of a run's checkpoint as a Hugging Face folder, on the CPU."""

import json
from pathlib import Path
from typing import Final

from outrider.errors import CheckpointError, ConfigError
from outrider.files import replacing_folder
from outrider.training.checkpoint import checkpoint_step, checkpoints_newest_first
from outrider.training.run_dir import RECORD, recorded_settings
from outrider.training.settings import RunSettings
from outrider.training.setup import make_policy

RENDERING: Final = "outrider.json"
"""File in an exported folder that records how the conversations of the training were rendered."""


def write_rendering(folder: Path, settings: RunSettings) -> None:
    """Write the rendering of conversations, so that a server of the weights can use the same."""
    rendering = {
        "template_kwargs": settings.model.template_kwargs,
        "history_thinking": settings.model.history_thinking,
        "call_format": settings.environment.call_format,
    }
    (folder / RENDERING).write_text(json.dumps(rendering, indent=2, default=str) + "\n", encoding="utf-8")


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the newest checkpoint of a run, or that of a step. Raises CheckpointError if there is none."""
    if not (run / RECORD).is_file():
        raise CheckpointError(f"{run} is no run directory: it has no {RECORD}")
    checkpoints = {checkpoint_step(path): path for path in checkpoints_newest_first(run / "checkpoints")}
    if not checkpoints:
        raise CheckpointError(f"{run} has no checkpoint")
    if step is None:
        return next(iter(checkpoints.values()))
    if step not in checkpoints:
        known = ", ".join(map(str, sorted(checkpoints)))
        raise CheckpointError(f"{run} has no checkpoint of step {step} (of steps: {known})")
    return checkpoints[step]


def export_run(run: Path, out: Path, *, checkpoint: Path | None = None) -> Path:
    """Write model, tokenizer and configuration into the new folder ``out``, with adapters merged. Returns the
    checkpoint, by default the newest one.

    Raises CheckpointError if there is none, and ConfigError if the folder is not empty.
    """
    checkpoint = checkpoint or find_checkpoint(run, None)
    settings = recorded_settings(run / RECORD)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name a new folder")
    overrides = {"initial_checkpoint": str(checkpoint), "device": "cpu"}
    model = settings.model.model_copy(update=overrides)
    policy = make_policy(settings.model_copy(update={"model": model}))
    with replacing_folder(out) as temporary:
        policy.export(temporary)
        write_rendering(temporary, settings)
    return checkpoint
