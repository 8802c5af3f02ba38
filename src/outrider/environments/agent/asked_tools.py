"""The tools of a request, and what it wants of the calls. Nothing asked for is left out in silence."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.environments.agent.fields import BadRequest, flag, mapping
from outrider.types import ToolSchema

_MAX_DEPTH: Final = 64  # of a schema; templates write it, and readers walk through it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """``choice`` is as the request has it; ``single_call``: a turn may hold one call at most. ``ignored``:
    fields that change nothing.
    """

    tools: tuple[ToolSchema, ...]
    choice: Any
    single_call: bool
    ignored: tuple[str, ...] = ()


def read_tools(fields: Mapping[str, Any], *, takes_tools: bool) -> ToolRequest:
    """The tools of a request, in the nested form or the flat one of ``/v1/responses``. Raises BadRequest."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    if tools and not takes_tools:
        raise BadRequest(
            "tools: name the form of the policy's calls in the recipe (environment.tool_calls = hermes, say)",
            param="tools",
        )
    ignored: list[str] = []
    read = tuple(_tool(tool, ignored) for tool in tools)
    choice = fields.get("tool_choice") or "auto"
    _require_choice(choice, [str(tool["name"]) for tool in read])
    if choice not in ("auto", "none"):
        ignored.append("tool_choice")
    return ToolRequest(
        tools=() if choice == "none" else read,
        choice=choice,
        single_call=fields.get("parallel_tool_calls") is not None and not flag(fields, "parallel_tool_calls"),
        ignored=tuple(ignored),
    )


def _require_choice(choice: Any, names: list[str]) -> None:
    if choice in ("auto", "none") or (choice == "required" and names):
        return
    if not isinstance(choice, dict):
        words = "no tools are sent" if choice == "required" else "known are auto, none, required, a function"
        raise BadRequest(f"tool_choice {choice!r}: {words}", param="tool_choice")
    if choice.get("type") != "function":
        raise BadRequest(
            f"a tool_choice of the type {choice.get('type')!r}: only a function can be named",
            param="tool_choice",
        )
    function = mapping(choice.get("function", choice), "tool_choice's function", param="tool_choice")
    name = function.get("name")
    if name not in names:
        raise BadRequest(
            f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}", param="tool_choice"
        )


def _tool(value: Any, ignored: list[str]) -> ToolSchema:
    tool = mapping(value, "a tool", param="tools")
    if tool.get("type") != "function":
        raise BadRequest(f"a tool of type {tool.get('type')!r}: only functions can be called", param="tools")
    function = mapping(tool.get("function", tool), "a tool's function", param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest("a tool's function has no name", param="tools")
    name = function["name"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    _require_schema(mapping(parameters, f"the parameters of {name}", param="tools"), name)
    known = ("type", "function", "name", "description", "parameters")
    ignored += [f"tools.{key}" for key, value in (tool | function).items() if value and key not in known]
    return {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}


def _require_schema(schema: Mapping[str, Any], name: str) -> None:
    """The form of what reads calls and of what templates write; a schema may say more than that."""
    location = f"the schema of {name}'s parameters"
    pending: list[tuple[Any, int]] = [(schema, 0)]  # no recursion: how deep it goes, the program decides
    while pending:
        node, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise BadRequest(f"{location} has more than {_MAX_DEPTH} levels", param="tools")
        if isinstance(node, bool):
            continue  # anything, or nothing
        if not isinstance(node, dict):
            raise BadRequest(f"{location} holds {node!r:.40}, which is no schema", param="tools")
        for key, is_right in _FORMS.items():
            if node.get(key) is not None and not is_right(node[key]):
                raise BadRequest(f"{location}: {key} cannot be {node[key]!r:.40}", param="tools")
        pending += [(inner, depth + 1) for inner in _inner(node)]


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FORMS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": lambda value: isinstance(value, str) or _is_text_list(value),
    "required": _is_text_list,
    "enum": lambda value: isinstance(value, list),
    "properties": lambda value: isinstance(value, dict),
    "description": lambda value: isinstance(value, str),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list)),
}


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema.get("properties") or {}).values()
    for key in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(key) or []
    for key in ("items", "additionalProperties"):
        inner = schema.get(key)
        if key == "items" and isinstance(inner, list):  # a tuple's, up to draft 7
            yield from inner
        elif inner is not None:
            yield inner
