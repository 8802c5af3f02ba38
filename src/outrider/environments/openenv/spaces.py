"""From a turn's text to an action of the server's schema."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.environments.text_games import parse_action
from outrider.errors import ConfigError, EnvironmentFault
from outrider.tokens.tool_calls import Arguments

_EXAMPLES: Final[Mapping[str, Any]] = {
    "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "string": "text"
}  # fmt: skip
_MAX_PROBLEMS: Final = 5  # problems of one action


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An action, or ``problem``: what was wrong, in words for the policy."""

    action: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


class FieldAction:
    """The text between ``<action>`` and ``</action>``, as it is, becomes one field of the action."""

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        self._name = name
        self.probe = f"<action>{_example(schema)}</action>"
        """A turn with which the server is tried."""
        self.instructions = f"Write one action a turn, for example {self.probe}."

    def read(self, text: str) -> Read:
        """The server decides whether the text can be that field."""
        command, problem = parse_action(text, verbatim=True)
        if problem:
            return Read(problem=problem)
        return Read(action={self._name: _clean(command)})


class JsonAction:
    """A JSON object between the tags: the fields of the action."""

    def __init__(self, properties: Mapping[str, Any], required: Sequence[str]) -> None:
        names = required or list(properties)
        example = {name: _example(properties.get(name, {})) for name in names}
        self.probe = f"<action>{json.dumps(example)}</action>"
        """A turn with which the server is tried."""
        self.instructions = f"Write one action a turn, a JSON object, for example {self.probe}."

    def read(self, text: str) -> Read:
        """JSON as the standard has it: no NaN, no infinity."""
        command, problem = parse_action(text, verbatim=True)
        if problem:
            return Read(problem=problem)
        try:
            action = json.loads(_clean(command), parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            return Read(problem=f"The action is no JSON ({error}). Write for example {self.probe}.")
        if not isinstance(action, dict):
            return Read(problem=f"The action is no JSON object. Write for example {self.probe}.")
        return Read(action=action)


def make_action(schema: Mapping[str, Any], chosen: str | None) -> FieldAction | JsonAction:
    """How actions of a schema are written. Raises :class:`ConfigError` for a field that it lacks."""
    fields = Arguments.from_schema({"parameters": schema})
    properties = {
        name: _resolved(value, schema) for name, value in fields.properties.items() if name != "metadata"
    }
    # of several kinds of actions the first one is the example
    needed = dict.fromkeys((*fields.required, *(fields.alternatives[0] if fields.alternatives else ())))
    required = [name for name in needed if name in properties]
    if chosen is not None:
        if chosen not in properties:
            known = ", ".join(properties) or "none"
            raise ConfigError(f"the server's actions have no field {chosen!r} (their fields: {known})")
        if others := [name for name in required if name != chosen]:
            raise ConfigError(
                f"the server's actions need {', '.join(others)} besides {chosen}: leave action_field out, "
                "and actions are written as JSON"
            )
        return FieldAction(chosen, properties[chosen])
    if len(properties) == 1:
        return FieldAction(*next(iter(properties.items())))
    return JsonAction(properties, required)


def describe_errors(errors: Any) -> str:
    """What the server's own check of an action found, in words for the policy."""
    problems = []
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, Mapping):
            location = ".".join(str(part) for part in error.get("loc") or ())
            problems.append(
                f"{location}: {error.get('msg', 'not valid')}" if location else str(error.get("msg"))
            )
    words = "; ".join(problems[:_MAX_PROBLEMS]) or "it does not fit"
    return f"The action was not accepted ({words})."


def _resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a field: that which it refers to (an enumeration, say), or the first of several."""
    if not isinstance(value, Mapping):
        return {}
    if isinstance(several := value.get("anyOf"), list) and several:
        return _resolved(several[0], schema)
    definitions, name = schema.get("$defs"), str(value.get("$ref", "")).rpartition("/")[2]
    definition = definitions.get(name) if isinstance(definitions, Mapping) else None
    return definition if isinstance(definition, Mapping) else value


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("examples", "enum"):
        if isinstance(values := schema.get(key), list) and values:
            return values[0]
    if "const" in schema:
        return schema["const"]
    value = _EXAMPLES.get(str(schema.get("type")), "text")
    lowest = schema.get("minimum")
    return lowest if isinstance(lowest, int) and schema.get("type") in ("integer", "number") else value


def _clean(text: str) -> str:
    """Without half characters, which no message can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number that can be sent")
    return number


# Observations of a server as text.


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
