"""What a run's method is called in a table with a column a method, and whether two runs are seeds of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outrider.evals.compare.groups import STARTS, algorithm_name, comparable, is_trained
from outrider.evals.compare.runs import Run
from outrider.watch.run_directory import read_run

UNTRAINED: Final = "no training"
_WITHOUT_TIPS: Final = ("algorithm.memory_probability", "algorithm.intrinsic_coefficient")


def method_name(run: Run, path: Path) -> str:
    """The algorithm of a training; of an evaluation that of the training whose weights it has, and the
    memory that it adapts with, or the engine where that is a method of its own.
    """
    config = run.config
    if is_trained(config):
        return _training_method(config)
    parts = [_weights_method(run.settings.get("model.initial_checkpoint", "none"), path)]
    if config.get("engine.type") == "retrospex":
        parts.append("retrospex")
    if config.get("evaluation.num_trials", "0") != "0":
        parts.append(config.get("evaluation.memory", "tips"))
    names = [part for part in parts if part != UNTRAINED]
    return ", ".join(names) or UNTRAINED


def same_method(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Keys of the settings, with whole paths, in which two runs differ that decide what was trained; those of
    seeds and of the starting weights' folder are none.
    """
    ours, theirs = (
        {key: value for key, value in comparable(config).items() if key not in STARTS}
        for config in (first, second)
    )
    return sorted(key for key in ours.keys() | theirs if ours.get(key) != theirs.get(key))


def _training_method(config: Mapping[str, str]) -> str:
    if config.get("train.num_steps") == "0":
        return "imitation"
    if all(config.get(key) in ("0", "0.0") for key in _WITHOUT_TIPS):
        return "grpo"  # the same, bit for bit
    return algorithm_name(config)


def _weights_method(checkpoint: str, run: Path) -> str:
    """The method of the run that a checkpoint lies in, or that run's name where it is not here any more."""
    if checkpoint == "none":
        return UNTRAINED
    folder = Path(checkpoint).parent.parent
    config = read_run(folder).config
    return _training_method(config) if "algorithm.type" in config else folder.name
