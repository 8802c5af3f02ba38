"""How the model of an evaluation was trained, if it is a run: an evaluation with tools plays as the run
did.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from outrider.config import NONE
from outrider.plugins.imports import add_search_folder

_CONFIG: Final = "config.toml"
_DATA: Final = ("train", "valid", "test")
_PROMPT_KEYS: Final = ("require_think", "require_boxed")  # of a reward's settings: what the prompt asks for


def config_of_run(name: str) -> dict[str, Any] | None:
    """The recorded settings of a run directory, or of the run that a checkpoint belongs to; None for any
    other model. Unreadable files are reported when the model is loaded.
    """
    folder = Path(name).absolute()
    for run in (folder, folder.parent.parent):
        if (run / _CONFIG).is_file() and (run == folder or folder.parent.name == "checkpoints"):
            add_search_folder(run)  # its tools may be functions of the user
            try:
                return tomllib.loads((run / _CONFIG).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
    return None


def with_run_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of an evaluation with tools, with the environment and the limits of the run for what the tree
    does not set. The data sets of the run, and what its reward needs, are left out: the tasks are others.
    """
    model = values.get("model")
    config = config_of_run(str(model.get("name"))) if isinstance(model, Mapping) else None
    environment = (config or {}).get("environment", {})
    if config is None or environment.get("type") != "tools":
        return dict(values)
    run_environment = {key: value for key, value in environment.items() if key not in (*_DATA, "reward")}
    reward = {key: value for key, value in environment.get("reward", {}).items() if key in _PROMPT_KEYS}
    overrides, limits = values.get("environment") or {}, values.get("rollout") or {}
    return {
        **values,
        "environment": {**run_environment, "reward": reward, **overrides},
        "rollout": {**config.get("rollout", {}), **limits},
    }


def differences(name: str, environment: Mapping[str, Any] | None, rollout: Mapping[str, Any]) -> list[str]:
    """One line about what the evaluation sets differently from the run that trained the model, else none."""
    config = config_of_run(name)
    if config is None:
        return []
    trained = config.get("environment", {})
    if environment is None:
        if trained.get("type") != "tools":
            return []
        return [
            "OTHER PROMPT THAN IN TRAINING: the questions are asked without tools, and the run trained with "
            f"environment.type = tools, protocol = {trained.get('protocol')}; --tools on plays as it trained"
        ]
    if environment.get("type") != trained.get("type"):
        return [
            f"OTHER ENVIRONMENT THAN IN TRAINING: {environment.get('type')}, the run trained on "
            f"{trained.get('type')}"
        ]
    sections = [("environment", environment, trained), ("rollout", rollout, config.get("rollout", {}))]
    changes = [
        f"{key} = {value} (run: {before})"
        for section, current, recorded in sections
        for key, value, before in _iter_changes(current, recorded, f"{section}.")
    ]
    return [f"OTHER SETTINGS THAN IN TRAINING: {', '.join(changes)}"] if changes else []


def _iter_changes(
    current: Mapping[str, Any], recorded: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in current.items():
        if key in _DATA or key not in recorded:
            continue
        before = None if recorded[key] == NONE else recorded[key]
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            keys = _PROMPT_KEYS if key == "reward" else tuple(value)
            yield from _iter_changes(
                {name: value[name] for name in keys if name in value}, before, f"{prefix}{key}."
            )
        elif value != before:
            yield f"{prefix}{key}", value, before
