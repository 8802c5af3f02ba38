"""The settings that a run began with, as its checkpoints hold them, and what may differ when it goes on.

Paths are not among them: data may move. What lies there is digested instead
(:mod:`outrider.train.state.same_inputs`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from outrider.errors import CheckpointError
from outrider.train.settings import RunSettings
from outrider.train.state.recorded import migrate_flat_keys

_PATH_PLACEHOLDER: Final = "(a path)"
# Of those that are plain text.
_PATHS: Final = {
    "buffer.path",
    "model.initial_checkpoint",
    "algorithm.demonstrations",
    "cold_start.demonstrations",
}
# No number depends on them while nothing breaks: nobody writes them down.
FREE: Final = {
    "train.checkpoint_every", "train.keep_checkpoints", "train.watchdog_s", "train.expert_timeout_s",
    "train.max_retries", "rollout.step_timeout_s", "train.group_timeout_s", "environment.heap",
    "environment.start_limit_s", "environment.load_limit_s", "environment.step_limit_s",
    "environment.borrow_limit_s", "environment.server_url",
    "environment.make_ahead", "environment.num_makers", "environment.make_limit_s",
    "environment.python.num_servers", "engine.memory", "trackers",
    "cluster.ray_address", "cluster.placement_timeout_s", "cluster.update_timeout_s",
    "cluster.turn_timeout_s", "cluster.heartbeat_s", "cluster.weights", "cluster.max_restarts",
    "cluster.placement",
}  # fmt: skip
# The same numbers in exact arithmetic: what is added in which order, and on what.
ROUNDING: Final = {
    "num_threads", "model.device", "engine.max_rows", "engine.eager", "train.max_concurrent",
    "environment.num_workers", "environment.num_sessions",
    "update.max_tokens", "update.checkpoint_activations", "update.attention",
    "cluster.num_trainers", "cluster.num_engines", "cluster.tensor_parallel",
}  # fmt: skip
UNSEEN: Final = {
    **dict.fromkeys(FREE, "moves no number"),
    **dict.fromkeys(ROUNDING, "moves speed and rounding alone"),
    "model.forward": "a run's start says which path it means",
}
"""Why somebody who reads resolved settings need not see the default of a key."""
# How far a run goes, and how often it is measured.
_LENGTH: Final = {"train.num_steps", "train.max_policy_tokens", "evaluation.every"}


def flat_settings(settings: RunSettings) -> dict[str, Any]:
    """Plain values by dotted key, with ``auto`` resolved, without paths and what no number depends on."""
    from outrider.engines.local.model import resolve_precision  # torch: the tables above are read without it

    resolved = resolve_precision(settings.model.precision, settings.model.device)
    flat = dict(flatten(settings.model_dump(), ""))
    if Path(settings.model.name).is_dir():
        flat["model.name"] = _PATH_PLACEHOLDER
    plain = {
        key: _PATH_PLACEHOLDER if value is not None and key in _PATHS else _plain(value)
        for key, value in flat.items()
        if key not in FREE
    }
    return {**plain, "model.precision": resolved}


def check_settings(recorded: Mapping[str, Any], settings: RunSettings) -> list[str]:
    """A line for each kind of change that a run may go on with; keys that one of both does not know are not
    compared.

    Raises CheckpointError, naming them, for settings that decide the results.
    """
    now = flat_settings(settings)
    recorded = migrate_flat_keys(recorded)
    changed = {
        key: (recorded.get(key), now.get(key))
        for key in sorted(recorded.keys() | now)
        if _differs(key, recorded, now)
    }
    allowed = ROUNDING | _LENGTH
    if settings.algorithm.depends_on_num_steps:
        allowed = allowed - {"train.num_steps"}
    if refused := {key: values for key, values in changed.items() if key not in allowed}:
        raise CheckpointError(
            f"config.toml is not what this run began with: {_describe_changes(refused)}; "
            "put it back, or begin a new run with model.initial_checkpoint"
        )
    lines = []
    for kind, meaning in (
        (_LENGTH, "to the same bits as far as it went"),
        (ROUNDING, "but not to the same bits for sure"),
    ):
        if reported := {key: values for key, values in changed.items() if key in kind}:
            lines.append(f"OTHER SETTINGS: {_describe_changes(reported)}; the run goes on, {meaning}")
    return lines


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a list is a value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Path):
        return _PATH_PLACEHOLDER
    if isinstance(value, list | tuple):
        return [
            {key: _plain(inner) for key, inner in flatten(item)} if isinstance(item, dict) else _plain(item)
            for item in value
        ]
    return value


def _differs(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """A key of a section that is ``none`` on one side differs; one of another version does not."""
    if key in before and key in after:
        return bool(before[key] != after[key])
    lacking = after if key in before else before
    return any(key[:end] in lacking for end, letter in enumerate(key) if letter == ".")


def _describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """A type that was changed brings other keys with it: then it alone is named."""
    types = [key for key in changed if key.endswith(".type") or key == "type"]
    keys = types or list(changed)
    more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    return ", ".join(f"{key} is {changed[key][1]!r}, was {changed[key][0]!r}" for key in keys[:4]) + more
