"""A run that is given more: which settings ``outrider train --resume RUN key=value`` may change, and why just
those.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigError
from outrider.train.settings import RunSettings
from outrider.train.state.recorded import recorded_settings
from outrider.train.state.same_settings import FREE, ROUNDING, flatten

MAY_CHANGE: Final[Mapping[str, str]] = {
    "train.num_steps": "may grow: no step looks at how many follow",
    "train.max_policy_tokens": "may grow, or go (none): it is asked between steps and only ends the run",
    "evaluation.every": "an evaluation draws from random streams of its own and changes no weight",
    "train.checkpoint_every": "a checkpoint only writes down what is",
    "train.keep_checkpoints": "older checkpoints are never read while the newest one is whole",
    "train.watchdog_s": "the watchdog only reads",
}
"""The table of docs/resuming.md says the same (checked by a test)."""


def extend_settings(config: Path, overrides: Sequence[str]) -> RunSettings:
    """The settings of a run with what the overrides change.

    Raises ConfigError, one line with the reason, for a change that :data:`MAY_CHANGE` does not name, for one
    that shrinks the run, for a schedule that follows from the number of steps, and for a run that never
    trained.
    """
    original, extended = recorded_settings(config), recorded_settings(config, overrides)
    before, after = (dict(flatten(settings.model_dump())) for settings in (original, extended))
    changed = [key for key in sorted(before.keys() | after) if before.get(key) != after.get(key)]
    if refused := [key for key in changed if key not in MAY_CHANGE]:
        raise ConfigError(
            f"{refused[0]} cannot change in a run that goes on: {_refusal_reason(refused[0])}. "
            f"These may: {', '.join(MAY_CHANGE)}"
        )
    for key in {"train.num_steps", "train.max_policy_tokens"} & set(changed):
        _require_growth(key, before[key], after[key])
    if "train.num_steps" in changed:
        _require_no_schedule(original)
    return extended


def _refusal_reason(key: str) -> str:
    if key in FREE:
        return "no number depends on it, so no command needs to; it may be changed in config.toml"
    if key in ROUNDING:
        return (
            "it changes how numbers are rounded, so the run would not have the bits of one that began with it"
        )
    return (
        "it decides the results. Begin a new run with it, and with model.initial_checkpoint for the weights"
    )


def _require_growth(key: str, before: Any, after: Any) -> None:
    """None is a budget without an end."""
    if before is None or (after is not None and after < before):
        was = "without an end" if before is None else before
        raise ConfigError(f"{key} may only grow: it is {was}, {after} would end the run earlier")


def _require_no_schedule(original: RunSettings) -> None:
    if not original.train.num_steps:
        raise ConfigError(
            "train.num_steps cannot grow from 0: this run has made nothing to train with. "
            "Begin a new run, with model.initial_checkpoint for the weights"
        )
    if depends_on_num_steps(original):
        raise ConfigError(
            "train.num_steps cannot grow here: the probability of a retrieval runs to "
            "algorithm.retrieval.final_probability at the last step, "
            "so a longer run has other steps from the first on. Begin a new run"
        )


def depends_on_num_steps(settings: RunSettings) -> bool:
    """Whether a step is another one in a longer run. The learning rate is not among it: it has a warm-up and
    no decay.
    """
    return settings.algorithm.depends_on_num_steps
