"""Token limits that a model has no positions for: told before anything is played."""

from collections.abc import Callable, Iterator
from typing import Final

from outrider.config import Settings
from outrider.errors import ConfigError

_CONTEXT_LENGTH: Final = "model.context_length"
# Observations, splices and tips count as response, or give way to it: their budgets are upper bounds of
# something smaller.
_LIMITS: Final = ("rollout.max_response_tokens", "rollout.max_turn_tokens")


def check_positions(
    settings: Settings, *, model: str, longest: int, note: Callable[[str], None], resumed: bool = False
) -> None:
    """Hold the settings' token limits against the ``longest`` context of the model that they name.

    Raises ConfigError, one line with the setting, its value and the limit, for one that was asked for. What
    is so by default, and what a ``resumed`` run began with, goes to ``note``. A prompt takes some of the
    positions too, so a limit that passes may still be out of reach; such a rollout ends as truncated.
    """
    context_length = dict(_read_limits(settings, (_CONTEXT_LENGTH,))).get(_CONTEXT_LENGTH, (longest, False))
    positions = min(context_length[0], longest)
    limits = [
        (_CONTEXT_LENGTH, *context_length, longest),
        *((key, *entry, positions) for key, entry in _read_limits(settings, _LIMITS)),
    ]
    for key, value, is_explicit, limit in limits:
        if value <= limit:
            continue
        bound = f"model {model!r} has {longest} positions" + (
            f", of which {_CONTEXT_LENGTH} leaves {limit}" if limit < longest else ""
        )
        if is_explicit and not resumed:
            raise ConfigError(
                f"{key} is {value}, more than there is room for: {bound}, for prompt and response together"
            )
        note(f"{key} is {value}, which no rollout reaches: {bound}, for prompt and response together")


def _read_limits(settings: Settings, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Each key that these settings have: its value, and whether it was asked for (a default that is written
    out was not).
    """
    for key in keys:
        *sections, name = key.split(".")
        section: object = settings
        for part in sections:
            section = getattr(section, part, None)
        if isinstance(section, Settings) and (value := getattr(section, name, None)) is not None:
            default = type(section).model_fields[name].default
            yield key, (value, name in section.model_fields_set and value != default)
