"""What the policy wrote in one turn, parsed: thinking, words for the reader, and tool calls."""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, runtime_checkable
from urllib.parse import unquote

from outrider.types import ToolCall, ToolSchema

_OPEN: Final = "<think>"
THINKING_END: Final = "</think>"
_PYTHON_TAG: Final = "<|python_tag|>"
_CALL: Final = re.compile(rf"<tool_call>|<function=|<\|tool_call_start\|>|{re.escape(_PYTHON_TAG)}")
_CALL_END: Final = re.compile(r"</tool_call>|</function>|<\|tool_call_end\|>")
_BARE_CALL: Final = re.compile(
    r"\A\s*(?:\[\s*)?\{\s*\"name\"|\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:parameters|arguments)\""
    r"|\A\s*\[\s*[A-Za-z_][\w.]*\s*\("
)
"""Of the forms that need no tag, which are those that know Llama's."""
UNCLOSED: Final = f"The thinking was not closed with {THINKING_END}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn. ``problems`` say what was wrong with a call that could not be read; nobody raises for it."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def split_thinking(text: str, form: "CallFormat | None" = None) -> tuple[str, str, tuple[str, ...]]:
    """Thinking, the rest, and problems. A block that the template opened may lack its first tag; one that is
    not closed takes the whole text. Text without thinking is as it was written.

    Behind the beginning of a call, in a form that is built in or in ``form``, the tags are part of its
    arguments.
    """
    before, closed, behind = text.partition(THINKING_END)
    if closed and not _is_in_call(before.partition(_OPEN)[0], form):
        return before.replace(_OPEN, "", 1).strip(), behind.lstrip("\n"), ()
    head, opened, thinking = text.partition(_OPEN)
    if opened and not head.strip():
        return thinking.strip(), "", (UNCLOSED,)
    return "", text, ()


def _is_in_call(words: str, form: "CallFormat | None") -> bool:
    """Whether a call has begun in these words and is still open at their end: thinking may rehearse one."""
    ends = [match.end() for match in _CALL_END.finditer(words)]
    words = words[ends[-1] :] if ends else words
    if _CALL.search(words) or form is None:
        return _CALL.search(words) is not None
    own = [marker for marker in form.markers if not _CALL_END.fullmatch(marker)]
    is_bare = _PYTHON_TAG in form.markers and _BARE_CALL.search(words) is not None
    return is_bare or any(marker in words for marker in own)


def opened_thinking(text: str) -> str:
    """The block of thinking that ``text`` (what a template writes before a turn) opens and leaves open."""
    match = re.search(rf"{_OPEN}\s*\Z", text)
    return match[0] if match else ""


# What a tool's JSON schema says of its arguments. Whatever JSON stands where a schema should be, nothing
# raises: what cannot be understood decides nothing.


TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Of JSON schemas, and what has them in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The values that an argument takes, as far as their top level says: those of some types, and some that
    are named.
    """

    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()

    def fits(self, value: Any) -> bool:
        """Whether the value is one of them."""
        # a bool is an int to Python, and none to JSON
        is_bool = isinstance(value, bool)
        return any(
            isinstance(value, TYPES[name]) and (name == "boolean" or not is_bool) for name in self.types
        ) or any(value == choice and is_bool == isinstance(choice, bool) for choice in self.choices)

    def describe(self) -> str:
        """In words, behind "must be"."""
        names = ", ".join(
            choice if isinstance(choice, str) else json.dumps(choice) for choice in self.choices
        )
        parts = [f"one of {names}"] if self.choices else []
        return " or ".join([*parts, *([f"of type {' or '.join(self.types)}"] if self.types else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool, wherever its schema declares them: in ``properties``, or behind ``$ref``,
    ``allOf``, ``anyOf``, ``oneOf``, ``if``/``then``/``else`` and ``dependentSchemas``.

    ``is_closed``: it takes no others. ``alternatives`` are the arguments that the branches of ``anyOf`` or
    ``oneOf`` need, one tuple per branch; empty if there are no branches that differ in them. Which
    combinations a schema allows is left to the tool itself.
    """

    properties: Mapping[str, Any]
    required: tuple[str, ...]
    is_closed: bool
    root: Mapping[str, Any]
    alternatives: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def from_schema(cls, tool: ToolSchema) -> Self:
        """Those of a tool's schema."""
        parameters = tool.get("parameters")
        root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        whole = _collect(root, root, _Budget(), frozenset(), depth=0)
        return cls(
            properties=whole.properties,
            required=tuple(whole.required),
            is_closed=whole.is_declared and not whole.is_open,
            root=root,
            alternatives=whole.alternatives,
        )

    def accepted(self, name: str) -> Accepted | None:
        """What the argument takes; None where the schema does not say."""
        return accepted_values(self.schema(name), self.root)

    def schema(self, name: str) -> Any:
        """That of one argument, which may be any JSON."""
        return self.properties.get(name, self.root.get("additionalProperties"))

    def accepts_any(self, name: str) -> bool:
        """Whether the schema says of an argument that any JSON is taken."""
        if name in self.properties:
            return self.accepted(name) is None
        has_rest = "additionalProperties" in self.root
        return self.root["additionalProperties"] == {} if has_rest else not self.is_closed


_MAX_NESTED: Final = 16
_MAX_SCHEMAS: Final = 512


@dataclass(slots=True)
class _Budget:
    """The number of schemas that are still read: definitions may double at every level."""

    left: int = _MAX_SCHEMAS


@dataclass(slots=True, kw_only=True)
class _Collected:
    """The arguments that a part of a schema declares."""

    properties: dict[str, Any] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    is_declared: bool = False
    is_open: bool = False
    alternatives: tuple[tuple[str, ...], ...] = ()

    def add(self, other: "_Collected", *, needs: bool) -> None:
        """Join a part that applies too; ``needs``: its required arguments are required."""
        for name, schema in other.properties.items():
            self.properties.setdefault(name, schema)
        if needs:
            self.required |= other.required
        self.is_declared |= other.is_declared
        self.is_open |= other.is_open
        self.alternatives = self.alternatives or other.alternatives


def _collect(
    schema: Any, root: Mapping[str, Any], budget: _Budget, seen: frozenset[str], *, depth: int
) -> _Collected:
    collected = _Collected()
    if not isinstance(schema, Mapping):
        return collected
    budget.left -= 1
    if depth > _MAX_NESTED or budget.left < 0:
        collected.is_open = True
        return collected
    properties, required, rest = (
        schema.get(key) for key in ("properties", "required", "additionalProperties")
    )
    if isinstance(properties, Mapping):
        collected.properties |= properties
        collected.is_declared = True
    if isinstance(required, list | tuple):
        collected.required |= dict.fromkeys(item for item in required if isinstance(item, str))
    collected.is_open = rest not in (None, False) or bool(schema.get("patternProperties"))

    def inside(part: Any, *, seen: frozenset[str] = seen) -> _Collected:
        return _collect(part, root, budget, seen, depth=depth + 1)

    if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        target = _resolve_ref(ref, root)
        collected.is_open |= not isinstance(target, Mapping)
        collected.add(inside(target, seen=seen | {ref}), needs=True)
    for part in _get_list(schema, "allOf"):
        collected.add(inside(part), needs=True)
    for key in ("anyOf", "oneOf"):
        if branches := [inside(item) for item in _get_list(schema, key) if item is not False]:
            collected.add(_union(branches), needs=True)
    for key in ("then", "else"):
        collected.add(inside(schema.get(key)), needs=False)
    dependent = schema.get("dependentSchemas")
    for part in dependent.values() if isinstance(dependent, Mapping) else ():
        collected.add(inside(part), needs=False)
    return collected


def _union(branches: Sequence[_Collected]) -> _Collected:
    """One of the branches applies: what all of them need is required."""
    schemas: dict[str, list[Any]] = {}
    for branch in branches:
        for name, schema in branch.properties.items():
            known = schemas.setdefault(name, [])
            if schema not in known:
                known.append(schema)
    needed = [tuple(branch.required) for branch in branches]
    return _Collected(
        properties={
            name: entry[0] if len(entry) == 1 else {"anyOf": entry} for name, entry in schemas.items()
        },
        required={name: None for name in needed[0] if all(name in entry for entry in needed)},
        is_declared=any(branch.is_declared for branch in branches),
        is_open=any(branch.is_open for branch in branches),
        alternatives=tuple(dict.fromkeys(needed)) if len(set(needed)) > 1 else (),
    )


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def accepted_values(schema: Any, root: Mapping[str, Any]) -> Accepted | None:
    """What a schema takes; None where it does not say. ``root`` holds the definitions that it refers to.

    Followed are ``anyOf``, ``oneOf``, an ``allOf`` of one, and references into ``root``; ``nullable`` is
    OpenAPI's. Beside a type or choices they only say more of the same values.
    """
    types: list[str] = []
    choices: list[Any] = []
    last: list[str] = []
    queue, seen = deque([schema]), set[str]()  # no recursion: how deep it goes, a stranger decides
    while queue:
        node = queue.popleft()
        if not isinstance(node, Mapping):
            return None
        if node.get("nullable") is True:
            last = ["null"]
        if isinstance(enum := node.get("enum"), list) and enum:
            choices += enum
        elif "const" in node:
            choices.append(node["const"])
        elif (names := _types(node.get("type"))) is not None:
            types += names
        elif isinstance(ref := node.get("$ref"), str):
            if ref not in seen:
                seen.add(ref)
                queue.append(_resolve_ref(ref, root))
        elif (inner := _alternatives(node)) is not None:
            queue += inner
        else:
            return None
    if not types and not choices:  # it refers to itself only
        return None
    return Accepted(types=tuple(dict.fromkeys(types + last)), choices=tuple(choices))


def find_schema_flaw(parameters: Any) -> str:
    """Why a tool's arguments cannot be told to a model, in words; empty where they can.

    A template goes through names, and some through types; a schema deeper inside is shown as it is.
    """
    if not isinstance(parameters, Mapping):
        return "it is no object"
    if not isinstance(properties := parameters.get("properties", {}), Mapping):
        return "its properties are no object"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(schema, str) for schema in required):
        return "required is no list of names"
    for name, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            return f"the schema of {name!r} is no object"
        kind = schema.get("type", []) if isinstance(schema, Mapping) else []
        if not isinstance(kind, str) and not _is_name_list(kind):
            return f"the type of {name!r} is no name"
    return ""


def _is_name_list(kind: Any) -> bool:
    return isinstance(kind, list) and all(isinstance(item, str) for item in kind)


def _types(kind: Any) -> list[str] | None:
    names = [kind] if isinstance(kind, str) else kind
    is_known = _is_name_list(names) and names and all(name in TYPES for name in names)
    return list(names) if is_known else None


def _alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
            return list(branches)
    return None


def _resolve_ref(ref: str, root: Mapping[str, Any]) -> Any:
    """What a reference such as ``#/$defs/Unit`` stands for; None where there is nothing."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for part in _parts(ref):
        if isinstance(node, list) and part.isdecimal() and int(part[:9]) < len(node):
            node = node[int(part[:9])]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _parts(ref: str) -> Iterator[str]:
    for part in ref.removeprefix("#").split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")


# The contract of one written form of tool calls, and what its readers share.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """Calls of a turn in the order written, the words beside them, and what was wrong with the others."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


@runtime_checkable
class CallFormat(Protocol):
    """One form of calls, made without arguments. Holds nothing: it may be asked from several threads."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens, and that reading needs."""
        ...

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """The calls in a turn's words. Never raises for what was written."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of the family writes them."""
        ...

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """What a system prompt says of the tools where the chat template does not."""
        ...


@runtime_checkable
class LimitedForm(CallFormat, Protocol):
    """A form that has no way to write some names. Tools that have one are refused at load."""

    def unwritable(self, tool: ToolSchema) -> str:
        """Which name, of the tool or of an argument, in words; empty where all can be written."""
        ...


def read_between_words(
    text: str, opening: re.Pattern[str], read_call: Callable[[re.Match[str], int], tuple[ToolCall | str, int]]
) -> ParsedCalls:
    """Calls among words, for the forms whose calls have tags of their own.

    ``read_call`` is given where one opens and how many calls are in front of it. It says which call that is,
    or what is wrong with it, and where the reading goes on.
    """
    words: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = 0
    while (start := opening.search(text, position)) is not None:
        words.append(text[position : start.start()])
        call, position = read_call(start, len(calls))
        if isinstance(call, str):
            problems.append(call)
        else:
            calls.append(call)
    if not position:
        return ParsedCalls(content=text)
    words.append(text[position:])
    return ParsedCalls(content="".join(words).strip(), calls=tuple(calls), problems=tuple(problems))


def call_id(number: int) -> str:
    """The id of a turn's call: nine letters and digits, which every template takes."""
    return f"call{number:05d}"


def decode_json(text: str, start: int) -> tuple[Any, int] | str:
    """The JSON value at ``start`` (blanks may be in front) and where it ends, or what is wrong with it."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos - begin + 1}"
    except (ValueError, RecursionError):  # an endless number, or nested without end
        return "it is too large"


def parse_call(value: Any, number: int, *, keys: Sequence[str]) -> ToolCall | str:
    """A call of an object with ``name`` and its arguments under one of ``keys``, or what is wrong with it.

    Of the arguments, see :func:`call_from_arguments`.
    """
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
    """A call with these arguments: an object, text that holds one, or null for none. What is neither is kept
    as text (``ToolCall.raw``), as chat servers pass it on; no tool takes it.
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
    """In words, the first name of a tool or of its arguments that is none to a form; empty where all are."""
    if not tools(name := str(tool.get("name"))):
        return f"a tool named {name!r}"
    wrong = next(
        (argument for argument in Arguments.from_schema(tool).properties if not arguments(argument)), None
    )
    return "" if wrong is None else f"the argument {wrong!r} of {name}"


def list_schemas(tools: Sequence[ToolSchema]) -> str:
    """The schemas, one a line."""
    return "\n".join(
        json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools
    )


# Removing a model's thoughts from its text, whatever markers its family writes around them. Servers with a
# reasoning parser send thoughts in a field of their own; otherwise they are part of the text. Graders, judges
# and readers must see only the text that is left.


_NAMES: Final = (
    "think", "thinking", "thought", "thoughts", "thought_process", "chain_of_thought", "cot", "reason",
    "reasoning", "reflection", "analysis", "scratchpad", "inner_monologue", "internal_monologue",
    "longcat_think", "seed:think", "mm:think",
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
_ANALYSIS_CHANNEL: Final = re.compile(
    r"<\|channel\|>\s*analysis.*?(?:<\|(?:end|return|call|start)\|>|(?=<\|channel\|>)|\Z)", re.DOTALL
)
_CHANNEL_END: Final = re.compile(r"<\|(?:end|return|call)\|>")
_BARE_ANALYSIS: Final = re.compile(r"\s*analysis(?=[^\W_])")
# Granite 3 writes headings.
_HEADINGS: Final = re.compile(
    r"\A\s*Here(?:'s| is) my thought process:.*?(?:Here(?:'s| is) my response:|\Z)", re.DOTALL
)


def without_thoughts(text: str) -> str:
    """The part of a model's text that it addresses to its reader.

    A block that is never closed takes the rest of the text. A closing marker without an opening one ends a
    block that the chat template had opened: all text before it is thought. Blocks may be nested. Text without
    markers is returned unchanged. The time is proportional to the length.
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
