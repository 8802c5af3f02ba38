"""Presets of the algorithms: named combinations of settings, which a recipe may also name as ``type``."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, get_args

from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.plugins.names import BUILT_IN, Kind, is_known
from outrider.plugins.registry import load_settings_class

PAPER: Final = "-paper"  # the variant that a method's plain name means, unless that is a preset itself


def preset_values(settings: type[Settings]) -> tuple[str, ...]:
    """The values of the field ``preset``, the default first; none without that field."""
    field = settings.model_fields.get("preset")
    return () if field is None else tuple(map(str, get_args(field.annotation)))


@cache
def preset_types(kind: Kind) -> Mapping[str, tuple[str, str]]:
    """What else may be a ``type`` of this kind, with the type and the preset that it stands for: every preset
    whose name is no type, and ``dapo`` for ``dapo-paper``. Only algorithms have such names.
    """
    presets: dict[str, tuple[str, str]] = {}
    for name in BUILT_IN[kind] if kind == "algorithms" else ():
        for preset in preset_values(load_settings_class(kind, name)):
            if preset not in BUILT_IN[kind]:
                presets[preset] = (name, preset)
    plain = {preset.removesuffix(PAPER): chosen for preset, chosen in presets.items()}
    return {**{name: chosen for name, chosen in plain.items() if name not in BUILT_IN[kind]}, **presets}


def preset_names(kind: Kind) -> list[str]:
    """Presets that a message lists: of two names for one, the shorter."""
    return [name for name in preset_types(kind) if not name.endswith(PAPER)]


def expand_preset(kind: Kind, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section whose ``type`` may be a preset, spelled out as ``type`` and ``preset``; what the section sets
    itself stays. Spelling may differ in case, hyphens and dots (``DrGRPO``, ``dr_grpo``).

    Raises ConfigError if the section has a preset that is no variant of the one in ``type``.
    """
    name = str(table.get("type"))
    if kind != "algorithms" or is_known(kind, name):
        return table
    known = {_bare(preset_name): (preset_name, *chosen) for preset_name, chosen in preset_types(kind).items()}
    if _bare(name) not in known:
        return table
    spelled, owner, preset = known[_bare(name)]
    requested = table.get("preset", preset)
    if not str(requested).startswith(spelled):
        raise ConfigError(
            f"{name} is the preset {preset} of type {owner}, and preset = {requested} contradicts it: "
            f"use type = {owner} with the preset that you want"
        )
    return {**table, "type": owner, "preset": requested}


def preset_keys(kind: Kind, owner: str, preset: str) -> list[str]:
    """The settings that a preset sets differently from its type's default."""
    settings = load_settings_class(kind, owner)
    default = settings().model_dump(mode="json")
    values = settings.model_validate({"preset": preset}).model_dump(mode="json")
    return [key for key, value in values.items() if key != "preset" and default.get(key, ...) != value]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())
