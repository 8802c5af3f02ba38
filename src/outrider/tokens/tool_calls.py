"""Turns of the policy: thinking, text and tool calls; schemas of tools; the contract of call formats.

Parsing never raises, whatever a policy wrote and whatever JSON is used as a schema. The policy reads the
``problems`` and the descriptions of :class:`Accepted`.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import unquote

from outrider.types import ToolCall, ToolSchema

_OPEN: Final = "<think>"
THINKING_END: Final = "</think>"
UNCLOSED: Final = f"The thinking was not closed with {THINKING_END}."
_UNCLOSED_BLOCK: Final = "The thinking was not closed."  # with the marker of another family
_PYTHON_TAG: Final = "<|python_tag|>"
_CALL: Final = re.compile(rf"<tool_call>|<function=|<\|tool_call_start\|>|{re.escape(_PYTHON_TAG)}")
_CALL_END: Final = re.compile(r"</tool_call>|</function>|<\|tool_call_end\|>")
# Calls without tags, which only formats that know Llama's tag have.
_BARE_CALL: Final = re.compile(
    r"\A\s*(?:\[\s*)?\{\s*\"name\"|\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:parameters|arguments)\""
    r"|\A\s*\[\s*[A-Za-z_][\w.]*\s*\("
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn of the policy. ``problems`` describe the calls that cannot be executed, one message each."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def split_thinking(text: str, form: "CallFormat | None" = None) -> tuple[str, str, tuple[str, ...]]:
    """Split a turn into thinking, the rest, and problems.

    The opening marker may be missing, because a template may have written it. Thinking may have several
    blocks in a row. An unclosed block takes the whole text. Text without thinking is returned unchanged.
    After the start of a call, in a built-in format or in ``form``, thinking markers are part of the call's
    arguments. Tags that only prompts use (``<reasoning>``) stay in the rest: see :func:`read_calls`.
    """
    if (channels := _LEADING_CHANNELS.match(text)) and channels[0]:
        thought, rest = _CHANNEL_MARKER.sub("", channels[0]).strip(), text[channels.end() :]
        return thought, rest, (() if rest else (_UNCLOSED_BLOCK,))
    thoughts: list[str] = []
    position = 0
    opening: re.Match[str] | None = None
    for match in _MARKERS.finditer(text):
        if not _is_of_model(match):
            continue
        kind, is_closing = _kind(match)
        if opening is not None:
            is_same = kind == _kind(opening)[0]
            # text before an opening marker belongs to a block that the template has opened
            if is_closing and (is_same or (not thoughts and text[position : opening.start()].strip())):
                inside = text[position : match.start()]
                if is_same:
                    inside = text[position : opening.start()] + text[opening.end() : match.start()]
                thoughts.append(inside.strip())
                opening, position = None, match.end()
            continue
        before = text[position : match.start()]
        if (thoughts and (is_closing or before.strip())) or _is_in_call(before, form):
            break
        if is_closing:
            thoughts.append(before.strip())
            position = match.end()
        else:
            opening = match
    problems: tuple[str, ...] = ()
    if opening is not None and not text[position : opening.start()].strip():
        thoughts.append(text[opening.end() :].strip())
        position = len(text)
        problems = (UNCLOSED if opening[0] == _OPEN else _UNCLOSED_BLOCK,)
    rest = text[position:].lstrip("\n") if thoughts else text
    return "\n".join(filter(None, thoughts)), rest, problems


def _is_in_call(text: str, form: "CallFormat | None") -> bool:
    """Whether a call is open at the end of the text. A call that is closed may be an example in a thought."""
    ends = [match.end() for match in _CALL_END.finditer(text)]
    return _has_call(text[ends[-1] :] if ends else text, form)


def _has_call(text: str, form: "CallFormat | None") -> bool:
    if _CALL.search(text) or form is None:
        return _CALL.search(text) is not None
    own_markers = [marker for marker in form.markers if not _CALL_END.fullmatch(marker)]
    is_bare = _PYTHON_TAG in form.markers and _BARE_CALL.search(text) is not None
    return is_bare or any(marker in text for marker in own_markers)


def opened_thinking(text: str) -> str:
    """Return the opening of thinking at the end of ``text``, which a template writes before a turn, or ""."""
    match = re.search(rf"{_OPEN}\s*\Z", text)
    return match[0] if match else ""


# --- JSON schemas of tools ---

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Types of JSON schemas and their Python types."""
_MAX_NESTED: Final = 16
_MAX_SCHEMAS: Final = 512  # definitions may double at every level


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The values that an argument accepts according to the top level of its schema."""

    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()

    def fits(self, value: Any) -> bool:
        """Whether the value is accepted. As in JSON Schema, 2.0 is an integer."""
        is_bool = isinstance(value, bool)  # a bool is an int in Python, but no number in JSON
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return any(
            isinstance(value, TYPES[name]) and (name == "boolean" or not is_bool) for name in self.types
        ) or any(value == choice and is_bool == isinstance(choice, bool) for choice in self.choices)

    def as_integer(self, value: Any) -> Any:
        """Return 2 for 2.0 if the schema accepts integers but no other numbers; else the value."""
        is_whole = isinstance(value, float) and value.is_integer()
        integers = "integer" in self.types or any(type(choice) is int for choice in self.choices)
        return int(value) if is_whole and integers and "number" not in self.types else value

    def describe(self) -> str:
        """Describe the values; the text continues a sentence after "must be".

        A text that reads as another value is quoted, for example ``"1"``.
        """
        names = ", ".join(
            choice if isinstance(choice, str) and not _is_json(choice) else json.dumps(choice)
            for choice in self.choices
        )
        parts = [f"one of {names}"] if self.choices else []
        return " or ".join([*parts, *([f"of type {' or '.join(self.types)}"] if self.types else [])])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text == ""
    return True


@dataclass(slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool, in ``properties`` or in ``$ref``, ``allOf``, ``anyOf``, ``oneOf``,
    ``if``/``then``/``else`` and ``dependentSchemas``. The tool itself checks which combinations are valid.

    Attributes:
        properties: name -> schema, which may be any JSON
        required: names in the order of the schema
        is_open: other arguments are accepted
        alternatives: the required arguments of each branch of ``anyOf`` or ``oneOf`` if they differ
        root: the whole schema, which has the definitions
    """

    root: Mapping[str, Any]
    properties: dict[str, Any] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    is_declared: bool = False
    is_open: bool = False
    alternatives: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def from_schema(cls, tool: ToolSchema) -> "Arguments":
        """Collect the arguments of a tool."""
        parameters = tool.get("parameters")
        root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        num_left = _MAX_SCHEMAS

        def collect(schema: Any, seen: frozenset[str], depth: int) -> Arguments:
            nonlocal num_left
            collected = cls(root=root)
            if not isinstance(schema, Mapping):
                return collected
            num_left -= 1
            if depth > _MAX_NESTED or num_left < 0:
                collected.is_open = True
                return collected
            properties, required = schema.get("properties"), schema.get("required")
            if isinstance(properties, Mapping):
                collected.properties |= properties
                collected.is_declared = True
            if isinstance(required, list | tuple):
                collected.required |= dict.fromkeys(item for item in required if isinstance(item, str))
            has_rest = schema.get("additionalProperties") not in (None, False)
            collected.is_open = has_rest or bool(schema.get("patternProperties"))
            if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
                target = resolve_reference(ref, root)
                collected.is_open |= not isinstance(target, Mapping)
                collected._add(collect(target, seen | {ref}, depth + 1))
            for part in _get_list(schema, "allOf"):
                collected._add(collect(part, seen, depth + 1))
            for key in ("anyOf", "oneOf"):
                branches = [
                    collect(item, seen, depth + 1) for item in _get_list(schema, key) if item is not False
                ]
                if branches:
                    collected._add(cls._union(root, branches))
            dependent = schema.get("dependentSchemas")
            conditional = list(dependent.values()) if isinstance(dependent, Mapping) else []
            for part in (schema.get("then"), schema.get("else"), *conditional):
                collected._add(collect(part, seen, depth + 1), is_conditional=True)
            return collected

        return collect(root, frozenset(), 0)

    def _add(self, other: "Arguments", *, is_conditional: bool = False) -> None:
        for name, schema in other.properties.items():
            self.properties.setdefault(name, schema)
        if not is_conditional:
            self.required |= other.required
        self.is_declared |= other.is_declared
        self.is_open |= other.is_open
        self.alternatives = self.alternatives or other.alternatives

    @classmethod
    def _union(cls, root: Mapping[str, Any], branches: "Sequence[Arguments]") -> "Arguments":
        """Join branches of which one applies: an argument is required if all branches require it."""
        schemas: dict[str, list[Any]] = {}
        for branch in branches:
            for name, schema in branch.properties.items():
                known = schemas.setdefault(name, [])
                if schema not in known:
                    known.append(schema)
        required = [tuple(branch.required) for branch in branches]
        return cls(
            root=root,
            properties={
                name: item[0] if len(item) == 1 else {"anyOf": item} for name, item in schemas.items()
            },
            required={name: None for name in required[0] if all(name in names for names in required)},
            is_declared=any(branch.is_declared for branch in branches),
            is_open=any(branch.is_open for branch in branches),
            alternatives=tuple(dict.fromkeys(required)) if len(set(required)) > 1 else (),
        )

    @property
    def is_closed(self) -> bool:
        """Whether the tool accepts only the declared arguments."""
        return self.is_declared and not self.is_open

    def schema(self, name: str) -> Any:
        """The schema of one argument, which may be any JSON."""
        return self.properties.get(name, self.root.get("additionalProperties"))

    def accepted(self, name: str) -> Accepted | None:
        """The values that an argument accepts, or None if the schema does not restrict them."""
        return accepted_values(self.schema(name), self.root)

    def accepts_any(self, name: str) -> bool:
        """Whether the schema declares that an argument accepts any JSON."""
        if name in self.properties:
            return self.accepted(name) is None
        has_rest = "additionalProperties" in self.root
        return self.root["additionalProperties"] == {} if has_rest else not self.is_closed


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def accepted_values(schema: Any, root: Mapping[str, Any]) -> Accepted | None:
    """The values that a schema accepts, or None if it does not restrict them.

    Follows ``anyOf``, ``oneOf``, an ``allOf`` of one, and references into ``root``; ``nullable`` is
    OpenAPI's. Next to a type or choices these keys only restrict the same values further.
    """
    types: list[str] = []
    choices: list[Any] = []
    nullable: list[str] = []
    queue, seen = deque([schema]), set[str]()  # no recursion: the schema decides how deep it goes
    while queue:
        node = queue.popleft()
        if not isinstance(node, Mapping):
            return None
        if node.get("nullable") is True:
            nullable = ["null"]
        kind = node.get("type")
        names = [kind] if isinstance(kind, str) else kind
        if isinstance(enum := node.get("enum"), list) and enum:
            choices += enum
        elif "const" in node:
            choices.append(node["const"])
        elif is_name_list(names) and names and all(name in TYPES for name in names):
            types += names
        elif isinstance(ref := node.get("$ref"), str):
            if ref not in seen:
                seen.add(ref)
                queue.append(resolve_reference(ref, root))
        else:
            lists = [(key, _get_list(node, key)) for key in ("anyOf", "oneOf", "allOf")]
            branches = next(
                (item for key, item in lists if item and (key != "allOf" or len(item) == 1)), None
            )
            if branches is None:
                return None
            queue += branches
    if not types and not choices:  # it refers only to itself
        return None
    return Accepted(types=tuple(dict.fromkeys(types + nullable)), choices=tuple(choices))


def list_branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schema, or those in its ``anyOf``, ``oneOf`` and references, of which a value fits one."""
    branches: list[Mapping[str, Any]] = []
    queue, seen = deque([schema]), set[str]()
    while queue:
        node = queue.popleft()
        if not isinstance(node, Mapping):
            continue
        inner = _get_list(node, "anyOf") or _get_list(node, "oneOf")
        if isinstance(ref := node.get("$ref"), str):
            if ref not in seen:
                seen.add(ref)
                queue.append(resolve_reference(ref, root))
        elif inner and "type" not in node:
            queue += inner
        else:
            branches.append(node)
    return branches


def find_schema_flaw(parameters: Any) -> str:
    """Why a chat template cannot render a tool's arguments, or "" if it can.

    Templates read names and types of the top level and print deeper schemas unchanged.
    """
    if not isinstance(parameters, Mapping):
        return "it is no object"
    if not isinstance(properties := parameters.get("properties", {}), Mapping):
        return "its properties are no object"
    if not is_name_list(parameters.get("required", [])):
        return "required is no list of names"
    for name, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            return f"the schema of {name!r} is no object"
        kind = schema.get("type", []) if isinstance(schema, Mapping) else []
        if not isinstance(kind, str) and not is_name_list(kind):
            return f"the type of {name!r} is no name"
    return ""


def is_name_list(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def resolve_reference(ref: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference such as ``#/$defs/Unit`` or ``#unit``, or None."""
    if not ref.startswith("#"):
        return None
    if ref != "#" and not ref.startswith("#/"):
        return _find_anchor(unquote(ref), root)
    node: Any = root
    for part in ref.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name[:9]) < len(node):
            node = node[int(name[:9])]
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _find_anchor(ref: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema with this anchor, which older drafts write as its id, or None."""
    queue: deque[Any] = deque([root])
    while queue:
        node = queue.popleft()
        if isinstance(node, Mapping):
            is_anchor = ref[1:] in (node.get("$anchor"), node.get("$dynamicAnchor"))
            if is_anchor or ref in (node.get("$id"), node.get("id")):
                return node
            queue += node.values()
        elif isinstance(node, list):
            queue += node
    return None


# --- Call formats ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """Calls of a turn in the order written, the text around them, and a message for each invalid call."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


@runtime_checkable
class CallFormat(Protocol):
    """A notation of native tool calls. The class is created without arguments and used from several threads.

    A format that cannot write some names also has a method ``unwritable(tool) -> str``, which describes the
    first name of the tool or of an argument that it cannot write, or returns "". Such tools are refused at
    load.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a tokenizer and that :meth:`read` needs."""
        ...

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Parse the calls in the text of a turn. Never raises for anything that was written."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as a model of the family writes them."""
        ...

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """Describe the tools for the system prompt, for chat templates that do not render tools."""
        ...


def read_calls(text: str, form: CallFormat, tools: Sequence[ToolSchema]) -> ParsedCalls:
    """Read the calls in the text of a turn, except those in thoughts before the first call
    (``<reasoning>``), which stay in the content. If the thoughts are not closed, that is the problem.
    """
    parsed = form.read(text, tools)
    end = _end_of_thoughts(text, form) if parsed.calls or parsed.problems else 0
    if end is None:
        return ParsedCalls(content=text, problems=(_UNCLOSED_BLOCK,))
    if not end:
        return parsed
    parsed = form.read(text[end:], tools)
    return replace(parsed, content=(text[:end] + parsed.content).strip())


def read_tagged_calls(
    text: str, opening: re.Pattern[str], read_call: Callable[[re.Match[str], int], tuple[ToolCall | str, int]]
) -> ParsedCalls:
    """Read calls with tags of their own from a text.

    Args:
        text: the text of a turn
        opening: matches the opening tag of a call
        read_call: takes the match and the number of earlier calls; returns the call or its problem, and the
            position where reading continues
    """
    parts: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = 0
    while (start := opening.search(text, position)) is not None:
        parts.append(text[position : start.start()])
        call, position = read_call(start, len(calls))
        if isinstance(call, str):
            problems.append(call)
        else:
            calls.append(call)
    if not position:
        return ParsedCalls(content=text)
    parts.append(text[position:])
    return ParsedCalls(content="".join(parts).strip(), calls=tuple(calls), problems=tuple(problems))


def call_id(number: int) -> str:
    """The id of a turn's call: nine letters and digits, which every chat template accepts."""
    return f"call{number:05d}"


def decode_json(text: str, start: int) -> tuple[Any, int] | str:
    """Decode the JSON value at ``start`` or after blanks; return it and its end, or what is wrong with it."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos - begin + 1}"
    except (ValueError, RecursionError):  # a number of thousands of digits, or too many nested brackets
        return "it is too large"


def parse_call(value: Any, number: int, *, keys: Sequence[str]) -> ToolCall | str:
    """Parse an object with ``name`` and arguments under one of ``keys``; return the call or its problem."""
    if not isinstance(value, Mapping):
        return "a call must be a JSON object"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return 'a call needs a "name"'
    key = next((key for key in keys if key in value), None)
    if key is None and (others := [other for other, inside in value.items() if isinstance(inside, Mapping)]):
        return f'{name} has its arguments under "{others[0]}", not under "{keys[0]}"'
    return call_from_arguments(name, None if key is None else value[key], call_id(number), key=key or "")


def call_from_arguments(name: str, arguments: Any, number: str, *, key: str = "arguments") -> ToolCall:
    """Build a call from an object, from text that contains one, or from None for no arguments.

    Other values are stored as text (``ToolCall.raw``), as chat servers pass them on; no tool accepts them.
    """
    value, problem = arguments, ""
    if isinstance(value, str):
        decoded = decode_json(value, 0) if value.strip() else (None, len(value))
        if isinstance(decoded, str):
            problem = f'"{key}" of {name} are not JSON: {decoded}.'
        elif value[decoded[1] :].strip():
            problem = f'"{key}" of {name} are not JSON: something stands behind them.'
        else:
            value = decoded[0]
    if not isinstance(value, Mapping | None):
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        problem = problem or f'"{key}" of {name} must be a JSON object.'
        return ToolCall(name=name, call_id=number, raw=raw, problem=problem)
    return ToolCall(name=name, arguments=dict(value or {}), call_id=number)


def find_invalid_name(
    tool: ToolSchema, *, tools: Callable[[str], object], arguments: Callable[[str], object]
) -> str:
    """Describe the first name of a tool or of its arguments that a format cannot write, or return ""."""
    if not tools(name := str(tool.get("name"))):
        return f"a tool named {name!r}"
    names = Arguments.from_schema(tool).properties
    wrong = next((argument for argument in names if not arguments(argument)), None)
    return "" if wrong is None else f"the argument {wrong!r} of {name}"


def list_schemas(tools: Sequence[ToolSchema]) -> str:
    """Write the schemas as JSON, one per line."""
    return "\n".join(
        json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools
    )


# --- Removing a model's thoughts from its text, for the markers of all families. Servers with a reasoning
# parser send thoughts in a field of their own; otherwise they are part of the text. Graders, judges and
# readers must see only the text that is left. ---

_MODEL_NAMES: Final = ("think", "longcat_think", "seed:think", "mm:think")  # which models are trained on
_MODEL_TAGS: Final = frozenset(tag for name in _MODEL_NAMES for tag in (f"<{name}>", f"</{name}>"))
_NAMES: Final = (
    *_MODEL_NAMES, "thinking", "thought", "thoughts", "thought_process", "chain_of_thought", "cot", "reason",
    "reasoning", "reflection", "analysis", "scratchpad", "inner_monologue", "internal_monologue",
)  # fmt: skip
_NAME: Final = "|".join(sorted(map(re.escape, _NAMES), key=len, reverse=True))
_PAIRS: Final = (
    (r"(?<=\[)THINK\]", r"(?<=\[)/THINK\]"),  # Mistral
    (r"(?<=\u25c1)think\u25b7", r"(?<=\u25c1)/think\u25b7"),  # Kimi-VL
    (r"(?<=<)\|START_THINKING\|>", r"(?<=<)\|END_THINKING\|>"),  # Command A
    (r"(?<=<)\|begin_of_thought\|>", r"(?<=<)\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    (r"(?<=<)\|inner_prefix\|>", r"(?<=<)\|inner_suffix\|>"),  # Apertus
    (r"(?<=<)\|channel>thought", r"(?<=<)channel\|>"),  # Gemma 4
    (r"(?<=<)unused94>", r"(?<=<)unused95>"),  # MedGemma
)
# The first sign of a marker comes first, alone, so that the search skips all other text quickly.
_MARKERS: Final = re.compile(
    rf"[<\[\u25c1](?:(?<=<)(?P<end>/?)\s*(?P<name>{_NAME})(?:\s[^<>]*)?>|"
    + "|".join(
        rf"(?P<open{index}>{opening})|(?P<close{index}>{closing})"
        for index, (opening, closing) in enumerate(_PAIRS)
    )
    + ")",
    re.IGNORECASE,
)
# gpt-oss: channels, with their special tokens or, where a server skips those, with the bare words.
_FINAL_CHANNEL: Final = re.compile(r"<\|channel\|>\s*final[^<]*<\|message\|>")
_ANALYSIS: Final = r"<\|channel\|>\s*analysis.*?(?:<\|(?:end|return|call|start)\|>|(?=<\|channel\|>)|\Z)"
_ANALYSIS_CHANNEL: Final = re.compile(_ANALYSIS, re.DOTALL)
_ASSISTANT: Final = r"(?:\s*<\|start\|>)?(?:assistant)?"
_LEADING_CHANNELS: Final = re.compile(
    rf"(?:{_ASSISTANT}{_ANALYSIS})*(?:{_ASSISTANT}{_FINAL_CHANNEL.pattern})?", re.DOTALL
)
_CHANNEL_MARKER: Final = re.compile(
    r"(?:assistant)?<\|channel\|>\s*(?:analysis|final)[^<]*<\|message\|>|<\|(?:end|return|call|start)\|>"
)
_CHANNEL_END: Final = re.compile(r"<\|(?:end|return|call)\|>")
_BARE_ANALYSIS: Final = re.compile(r"\s*analysis(?=[^\W_])")
# Granite 3 writes headings.
_HEADINGS: Final = re.compile(
    r"\A\s*Here(?:'s| is) my thought process:.*?(?:Here(?:'s| is) my response:|\Z)", re.DOTALL
)


def without_thoughts(text: str) -> str:
    """The part of a model's text that it addresses to its reader.

    An unclosed block takes the rest of the text. A closing marker without an opening one ends a block that
    the chat template had opened: all text before it is thought. Blocks may be nested. Text without markers
    is returned unchanged. The time is proportional to the length.
    """
    text = _without_channels(text)
    parts: list[str] = []
    fallback = ""
    position = 0
    opened: str | None = None  # the kind of the open block
    num_opened = num_nested = 0
    for match in _MARKERS.finditer(text):
        kind, is_closing = _kind(match)
        if opened is not None:
            if kind == opened and is_closing:
                opened, position = None, match.end()
            elif kind == opened:
                num_nested += 1
            continue
        if not is_closing:
            parts.append(text[position : match.start()])
            opened = kind
            num_opened += 1
            continue
        # No block is open. Of a block that was closed before, this may be a repeated closing at the very end.
        is_repeated = num_opened > 0 and num_nested == 0
        fallback = "".join(parts) + text[position : match.start()] if is_repeated else ""
        num_nested = max(num_nested - 1, 0)
        parts, position = [], match.end()
    if opened is None:
        parts.append(text[position:])
    result = "".join(parts)
    return result if result.strip() else fallback or result


def _end_of_thoughts(text: str, form: CallFormat) -> int | None:
    """The end of the closed blocks of thinking, of any marker, in front of the first call, and of the blanks
    after them. None if a block is not closed.
    """
    end = 0
    opened: str | None = None
    for match in _MARKERS.finditer(text):
        kind, is_closing = _kind(match)
        if opened is not None:
            if is_closing and kind == opened:
                opened, end = None, match.end()
        elif is_closing or _has_call(text[end : match.start()], form):
            break
        else:
            opened = kind
    if opened is not None:
        return None
    return end + len(text[end:]) - len(text[end:].lstrip()) if end else 0


def find_thinking_tokens(tokens: Collection[str]) -> frozenset[str]:
    """Those of a tokenizer's special tokens that are markers of thinking or parts of one."""
    parts = {"<|channel>", *(("<|channel|>", "<|message|>", "<|start|>") if "<|channel|>" in tokens else ())}
    return frozenset(token for token in tokens if token in parts or _MARKERS.fullmatch(token))


def _is_of_model(match: re.Match[str]) -> bool:
    """Whether models are trained on a marker. Other tags are those of prompts."""
    return not match["name"] or match[0] in _MODEL_TAGS


def _kind(match: re.Match[str]) -> tuple[str, bool]:
    """The kind of block that a marker belongs to, and whether it closes one."""
    if name := match["name"]:
        return name.lower(), bool(match["end"])
    group = match.lastgroup or ""
    return group.removeprefix("open").removeprefix("close"), group.startswith("close")


def _without_channels(text: str) -> str:
    if "<|channel|>" in text:
        if finals := list(_FINAL_CHANNEL.finditer(text)):
            return _CHANNEL_END.split(text[finals[-1].end() :], maxsplit=1)[0]
        return _ANALYSIS_CHANNEL.sub("", text)
    if _BARE_ANALYSIS.match(text):
        return text.rpartition("assistantfinal")[2] if "assistantfinal" in text else ""
    return _HEADINGS.sub("", text)
