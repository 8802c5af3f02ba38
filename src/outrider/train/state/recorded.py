"""A run's own record of its settings, also where an earlier version wrote it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.algorithms.common.loss_settings import migrate_algorithm_keys, migrate_keys
from outrider.config import load_settings
from outrider.train.settings import RunSettings

RECORD: Final = "config.toml"
"""Where a run directory, and a run in a pack, has its settings."""


def recorded_settings(file: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings in a run's ``config.toml``; ``overrides`` have today's keys.

    Raises ConfigError as :func:`~outrider.config.load_settings` does.
    """
    return load_settings(RunSettings, file=file, overrides=overrides, respelled=migrate_keys)


def migrate_flat_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The same for dotted keys, as checkpoints hold them."""
    prefix = "algorithm."
    rest = {key: value for key, value in flat.items() if not key.startswith(prefix)}
    own = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
    for name, value in migrate_algorithm_keys(own).items():
        inner = value.items() if isinstance(value, Mapping) else ()
        rest |= (
            {f"{prefix}{name}.{key}": inner_value for key, inner_value in inner}
            if inner
            else {f"{prefix}{name}": value}
        )
    return rest
