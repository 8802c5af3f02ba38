"""Actions and observations of an OpenEnv server's schemas as text."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.environments.seeded import ActionFormat
from outrider.environments.text_games import parse_action
from outrider.errors import ConfigError, EnvironmentFault
from outrider.tokens.tool_calls import Arguments

_EXAMPLES: Final[Mapping[str, Any]] = {
    "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "string": "text"
}  # fmt: skip
_MAX_PROBLEMS: Final = 5  # problems of one action


def field_action(name: str, schema: Mapping[str, Any]) -> ActionFormat:
    """The text between the tags becomes one field of the action; the server checks it."""
    probe = f"<action>{_example(schema)}</action>"

    def read(text: str) -> tuple[Mapping[str, Any], str]:
        action, problem = parse_action(text, verbatim=True)
        return ({}, problem) if problem else ({name: _clean(action)}, "")

    return ActionFormat(
        instructions=f"Write one action a turn, for example {probe}.", probes=(probe,), read=read
    )


def json_action(properties: Mapping[str, Any], required: Sequence[str]) -> ActionFormat:
    """A JSON object between the tags with the fields of the action; NaN and infinity are rejected."""
    names = required or list(properties)
    example = {name: _example(properties.get(name, {})) for name in names}
    probe = f"<action>{json.dumps(example)}</action>"

    def read(text: str) -> tuple[Mapping[str, Any], str]:
        content, problem = parse_action(text, verbatim=True)
        if problem:
            return {}, problem
        try:
            action = json.loads(_clean(content), parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            return {}, f"The action is no JSON ({error}). Write for example {probe}."
        if not isinstance(action, dict):
            return {}, f"The action is no JSON object. Write for example {probe}."
        return action, ""

    instructions = f"Write one action a turn, a JSON object, for example {probe}."
    return ActionFormat(instructions=instructions, probes=(probe,), read=read)


def make_action(schema: Mapping[str, Any], chosen: str | None) -> ActionFormat:
    """The format of a schema's actions. Raises ConfigError if ``chosen`` is not a field of it."""
    fields = Arguments.from_schema({"parameters": schema})
    properties = {
        name: _resolved(value, schema) for name, value in fields.properties.items() if name != "metadata"
    }
    # With several kinds of actions the first one is the example.
    needed = dict.fromkeys((*fields.required, *(fields.alternatives[0] if fields.alternatives else ())))
    required = [name for name in needed if name in properties]
    if chosen is not None:
        if chosen not in properties:
            known = ", ".join(properties) or "none"
            raise ConfigError(f"the server's actions have no field {chosen!r} (their fields: {known})")
        if others := [name for name in required if name != chosen]:
            raise ConfigError(
                f"the server's actions need {', '.join(others)} besides {chosen}: remove action_field to "
                "write actions as JSON"
            )
        return field_action(chosen, properties[chosen])
    if len(properties) == 1:
        return field_action(*next(iter(properties.items())))
    return json_action(properties, required)


def describe_errors(errors: Any) -> str:
    """The errors of the server's own check of an action, in words for the policy."""
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
    """The schema of a field after references (for example, to an enumeration); the first one of several."""
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
    """Replace lone surrogates, which cannot be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number that can be sent")
    return number


def observation_text(observation: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The text of an observation: one field as it is, several with their names, and all fields as JSON.

    Raises EnvironmentFault if a field is missing.
    """
    if missing := [name for name in fields if name not in observation]:
        raise EnvironmentFault(f"the server's observation lacks {', '.join(missing)}")
    if len(fields) == 1:
        return _text(observation[fields[0]])
    if fields:
        return "\n".join(f"{name}: {_text(observation[name])}" for name in fields)
    return _text(next(iter(observation.values()))) if len(observation) == 1 else _json(observation)


def require_fields(schema: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raises ConfigError for a field that is not in the schema of observations."""
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
