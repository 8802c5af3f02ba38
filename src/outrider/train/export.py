"""``outrider export``: the weights of a run's newest checkpoint as a Hugging Face folder, on the CPU."""

from pathlib import Path

from outrider.atomic_io import replacing_folder
from outrider.errors import CheckpointError, ConfigError
from outrider.train.models import make_policy
from outrider.train.state.checkpoint import checkpoints_newest_first
from outrider.train.state.recorded import RECORD, recorded_settings


def export_run(run: Path, out: Path) -> Path:
    """Write model, tokenizer and configuration into the new folder ``out``; the checkpoint that they are of.

    Adapters are merged. Any number of processes may have written it. Raises CheckpointError where there is
    none, and ConfigError for a folder that is not empty.
    """
    if not (run / RECORD).is_file():
        raise CheckpointError(f"{run} is no run directory: it has no {RECORD}")
    settings = recorded_settings(run / RECORD)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name a new folder")
    checkpoints = checkpoints_newest_first(run / "checkpoints")
    if not checkpoints:
        raise CheckpointError(f"{run} has no checkpoint")
    given = {"initial_checkpoint": str(checkpoints[0]), "device": "cpu"}
    model = settings.model.model_copy(update=given)
    policy = make_policy(settings.model_copy(update={"model": model}))
    with replacing_folder(out) as temporary:
        policy.export(temporary)
    return checkpoints[0]
