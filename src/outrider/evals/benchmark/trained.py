"""How the model of an evaluation was trained, if it is a run: an evaluation with tools plays as the run
did.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from outrider.config import NONE
from outrider.plugins.imports import search_in

_CONFIG: Final = "config.toml"
_DATA: Final = ("train", "valid", "test")
_PROMPTED: Final = ("require_think", "require_boxed")  # of a reward's settings: what the prompt asks for


def config_of_run(name: str) -> dict[str, Any] | None:
    """The recorded settings of a run directory, or of the run that a checkpoint belongs to; None for any
    other model. Unreadable files are reported when the model is loaded.
    """
    folder = Path(name).absolute()
    for run in (folder, folder.parent.parent):
        if (run / _CONFIG).is_file() and (run == folder or folder.parent.name == "checkpoints"):
            search_in(run)  # its tools may be functions of the user
            try:
                return tomllib.loads((run / _CONFIG).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
    return None


def as_trained(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of an evaluation with tools, with the environment and the limits of the run for what the tree
    does not set. The data sets of the run, and what its reward needs, are left out: the tasks are others.
    """
    model = values.get("model")
    config = config_of_run(str(model.get("name"))) if isinstance(model, Mapping) else None
    environment = (config or {}).get("environment", {})
    if config is None or environment.get("type") != "tools":
        return dict(values)
    own = {key: one for key, one in environment.items() if key not in (*_DATA, "reward")}
    reward = {key: one for key, one in environment.get("reward", {}).items() if key in _PROMPTED}
    given, limits = values.get("environment") or {}, values.get("rollout") or {}
    return {
        **values,
        "environment": {**own, "reward": reward, **given},
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
    found = [
        f"{key} = {now} (run: {before})"
        for section, here, there in sections
        for key, now, before in _changed(here, there, f"{section}.")
    ]
    return [f"OTHER SETTINGS THAN IN TRAINING: {', '.join(found)}"] if found else []


def _changed(
    here: Mapping[str, Any], there: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key, value in here.items():
        if key in _DATA or key not in there:
            continue
        before = None if there[key] == NONE else there[key]
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            kept = _PROMPTED if key == "reward" else tuple(value)
            yield from _changed({one: value[one] for one in kept if one in value}, before, f"{prefix}{key}.")
        elif value != before:
            yield f"{prefix}{key}", value, before
