"""Observations of a server as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ConfigError, EnvironmentFault


def observation_text(observation: Mapping[str, Any], fields: Sequence[str]) -> str:
    """What the policy reads: one field as it is, several with their names, all of several as JSON. Raises
    :class:`EnvironmentFault` for an observation that lacks a field.
    """
    if missing := [name for name in fields if name not in observation]:
        raise EnvironmentFault(f"the server's observation lacks {', '.join(missing)}")
    if len(fields) == 1:
        return _text(observation[fields[0]])
    if fields:
        return "\n".join(f"{name}: {_text(observation[name])}" for name in fields)
    return _text(next(iter(observation.values()))) if len(observation) == 1 else _json(observation)


def require_fields(schema: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raises :class:`ConfigError` for a field that no observation of the schema has."""
    properties = schema.get("properties")
    known = [name for name in properties if name not in ("done", "reward", "metadata")] if properties else []
    if missing := [name for name in fields if name not in known]:
        raise ConfigError(
            f"the server's observations have no field {missing[0]!r} (their fields: "
            f"{', '.join(known) or 'none'})"
        )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
