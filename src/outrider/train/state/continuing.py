"""Whether a run folder can be gone on with, asked before a model is loaded and before anything is written."""

from outrider.errors import CheckpointError
from outrider.json_lines import readable
from outrider.plugins.record import plugin_digests
from outrider.train.settings import RunSettings
from outrider.train.state.checkpoint import checkpoints_newest_first
from outrider.train.state.checkpoint_state import read_state
from outrider.train.state.run_directory import RunDirectory
from outrider.train.state.same_inputs import check_inputs
from outrider.train.state.same_settings import check_settings
from outrider.watch.traces import TraceReader


def require_continuable(run: RunDirectory, settings: RunSettings) -> list[str]:
    """Differences from the settings that the run began with, as far as they are allowed.

    Raises CheckpointError where other settings decide the results, and for a run that has trained and has no
    checkpoint left: it would begin again, over its own records.
    """
    checkpoints = checkpoints_newest_first(run.checkpoints)
    if not checkpoints and (done := _done_without_checkpoint(run, settings)):
        raise CheckpointError(
            f"{run.path} has {done} and no checkpoint: put its folder checkpoints back, "
            "or begin a new run elsewhere; nothing was changed"
        )
    for checkpoint in checkpoints:
        try:
            state = read_state(checkpoint)
        except CheckpointError:
            continue  # which is told where the checkpoint is loaded
        check_inputs(  # again where it is loaded, which takes longer
            state.get("inputs", {}),
            plugin_digests(settings),
            other_versions=False,
            allow_changed_plugins=run.allow_changed_plugins,
        )
        return check_settings(state.get("settings", {}), settings)
    return []


def _done_without_checkpoint(run: RunDirectory, settings: RunSettings) -> str:
    """Evidence that a run had written a checkpoint: the first one comes behind the cold start and the first
    evaluation.
    """
    if steps := TraceReader(run.path / "traces").steps():
        return f"traces of {len(steps)} training step(s)"
    metrics = run.path / "metrics.jsonl"
    # damaged lines count too
    if metrics.is_file() and (num := metrics.read_bytes().count(b'"kind": "train"')):
        return f"metrics of {num} training step(s)"
    num = sum(entry is not None for _, entry in readable(run.evaluations)) if run.evaluations.is_file() else 0
    return f"{num} evaluation(s)" if num > settings.evaluation.at_start else ""
