"""Shared by benchmarks that compare training runs: start, continue or skip a run, and read its files."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from outrider.config import flatten, load_settings
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings
from outrider.viewer.run_reader import read_records

# settings that may change between two calls, because they do not affect results
_FREE: Final = frozenset((
    "num_threads", "train.checkpoint_every", "train.keep_checkpoints", "train.max_retries",
    "train.expert_timeout_s", "train.watchdog_s", "trackers", "evaluation.at_start",
))  # fmt: skip


def train(
    run: Path,
    arguments: Sequence[str],
    *,
    last_label: str = "",
    program: Sequence[str] = ("-m", "outrider", "train"),
) -> None:
    """Start a run with these arguments (a recipe, then overrides), continue a stopped one, or skip a finished
    one.

    A run is finished if the evaluation ``last_label`` (default: one after training) is recorded. ``program``
    are the arguments of Python.

    Raises:
        ConfigError: if the run was started with other settings.
        CalledProcessError: if the run fails.
    """
    if (run / "config.toml").exists():
        require_same(run, load_settings(RunSettings, file=Path(arguments[0]), overrides=list(arguments[1:])))
    done = [
        one
        for one in evaluations(run)
        if one["label"] == last_label or (not last_label and is_after_training(one))
    ]
    if done and (run / "report.html").exists():
        return
    target = ["--resume", str(run)] if (run / "config.toml").exists() else [*arguments, "--run", str(run)]
    subprocess.run([sys.executable, *program, *target], check=True)


def policy_tokens(run: Path) -> int:
    """What the policy wrote in training, tips included."""
    steps = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]
    return int(steps[-1]["tokens/policy_total"])


def is_after_training(evaluation: dict[str, Any]) -> bool:
    """Return whether this is the evaluation at the end."""
    return evaluation["step"] > 0 and str(evaluation["label"]).startswith("after")


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of ``evaluations.jsonl``, or none if it does not exist."""
    return read_records(run / "evaluations.jsonl")


def require_same(run: Path, wanted: RunSettings) -> None:
    """Raise ConfigError if a run was started with other settings, because its results would be mistaken for
    those of these settings.
    """
    stored = load_settings(RunSettings, file=run / "config.toml")
    if wanted.model.precision == "auto":  # the run has recorded the resolved value
        wanted = wanted.model_copy(
            update={"model": wanted.model.model_copy(update={"precision": stored.model.precision})}
        )
    ours, theirs = (dict(flatten(one.model_dump(mode="json"))) for one in (wanted, stored))
    differing = sorted(key for key in {*ours, *theirs} - _FREE if ours.get(key) != theirs.get(key))
    if differing:
        raise ConfigError(
            f"{run} was started with other settings ({', '.join(differing)}): give another --out"
        )
