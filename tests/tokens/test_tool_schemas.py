"""Schemas of tools: calls are parsed and validated with any schema, also an invalid one."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from outrider.tokens.call_formats import CALL_FORMATS, CallFormatName, find_call_error, read_turn
from outrider.tokens.tool_calls import find_schema_flaw
from outrider.tools.base import trial_arguments, usage_line
from outrider.types import Json, ToolCall, ToolSchema

PLAIN = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text(max_size=5)
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KEYS = st.sampled_from(
    ["type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "nullable", "$ref",
     "$defs", "additionalProperties", "patternProperties", "a"]
)  # fmt: skip
WORDS = st.sampled_from(["integer", "string", "null", "object", "#", "#/$defs/a", "#/properties/a", "a"])
SCHEMAS = st.recursive(
    PLAIN | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
CALL_TEXTS: dict[CallFormatName, str] = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": VALUE}}</tool_call>',
    "qwen3_coder": "<tool_call><function=f><parameter=a>VALUE</parameter></function></tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"a": VALUE}}',
    "pythonic": "[f(a=VALUE)]",
}


def make_tool(parameters: Any) -> ToolSchema:
    return {"name": "f", "description": "d", "parameters": parameters}


@pytest.mark.parametrize("name", CALL_FORMATS)
@given(parameters=SCHEMAS, text=st.text(max_size=12) | JSON.map(json.dumps))
@example(parameters={"properties": None}, text="1")
@example(parameters={"properties": [1]}, text="1")
@example(parameters={"properties": {"a": {"type": ["integer", {}]}}}, text="1")
@example(parameters={"required": 5}, text="1")
@example(parameters={"required": [{}]}, text="1")
@example(parameters={"properties": {"a": {"$ref": "#/properties/a"}}}, text="1")
@example(parameters=5, text="1")
def test_no_schema_and_no_turn_raises(name: CallFormatName, parameters: Any, text: str) -> None:
    tools = [make_tool(parameters)]
    for turn_text in (text, CALL_TEXTS[name].replace("VALUE", text)):
        read_turn(turn_text, CALL_FORMATS[name], tools)
    find_schema_flaw(parameters)


@given(parameters=SCHEMAS, arguments=st.dictionaries(st.sampled_from("ab"), JSON, max_size=2))
def test_no_schema_and_no_arguments_raise(parameters: Any, arguments: dict[str, Json]) -> None:
    assert isinstance(find_call_error(ToolCall(name="f", arguments=arguments), [make_tool(parameters)]), str)


TEXT = st.text(
    st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=6
) | st.sampled_from(["null", "true", "7", "1.5", "[1]", "{}", '"q"', "None", "NaN", "1e999", "\n", " x "])
INNER = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
VALUES: Mapping[str, st.SearchStrategy[Json]] = {
    "string": TEXT,
    "integer": st.integers(-(10**9), 10**9),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    "boolean": st.booleans(),
    "array": st.lists(INNER, max_size=3),
    "object": st.dictionaries(TEXT, INNER, max_size=3),
    "null": st.none(),
}
DEFINED: Mapping[str, Json] = {"Unit": {"enum": ["km", "null", 3, None]}, "Point": {"type": "object"}}


@st.composite
def schema_and_value(draw: st.DrawFn, depth: int = 0) -> tuple[Json, Json, set[str]]:
    """A schema, a value that it takes, and the types beside text that it takes."""
    named = draw(st.sampled_from(list(VALUES)))
    shape = draw(st.sampled_from(["type", "types", "enum", "const", "nullable", "ref", "any", "of"]))
    match shape:
        case "type":
            return {"type": named}, draw(VALUES[named]), {named}
        case "types":
            kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
            return {"type": [*kinds, named]}, draw(VALUES[named]), {*kinds, named}
        case "enum" | "const":
            chosen = draw(VALUES[named])
            others = draw(st.lists(TEXT, max_size=2))
            written: Json = {"const": chosen} if shape == "const" else {"enum": [*others, chosen]}
            return written, chosen, {"null"} if chosen is None else set()
        case "nullable":
            value = draw(st.none() | VALUES[named])
            return {"type": named, "nullable": True}, value, {named, "null"}
        case "ref":
            return {"$ref": "#/$defs/Point"}, draw(VALUES["object"]), {"object"}
        case "of" if depth < 2:
            schema_a, value, kinds_a = draw(schema_and_value(depth + 1))
            schema_b, _, kinds_b = draw(schema_and_value(depth + 1))
            key = draw(st.sampled_from(["anyOf", "oneOf"]))
            return {key: draw(st.permutations([schema_a, schema_b]))}, value, kinds_a | kinds_b
    return {}, draw(INNER), set(VALUES)


def json_type_of(text: str) -> str:
    """The type of the JSON that a text is, where it is no text to JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return "string"
    return {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array",
            dict: "object"}.get(type(value), "string")  # fmt: skip


@given(case=schema_and_value())
@example(case=({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3, {"integer", "null"}))
@example(case=({"type": "string", "nullable": True}, None, {"string", "null"}))
@example(case=({"type": ["string", "null"]}, None, {"string", "null"}))
@example(case=({"$ref": "#/$defs/Point"}, {"x": 1}, {"object"}))
@example(case=({"$ref": "#/$defs/Unit"}, None, {"null"}))
@example(case=({"$ref": "#/$defs/Unit"}, 3, set()))
@example(case=({}, [1], set(VALUES)))
def test_text_arguments_get_the_types_of_the_schema(case: tuple[Json, Json, set[str]]) -> None:
    schema, value, kinds = case
    if isinstance(value, str):  # a text that is another value to this schema too: nothing decides
        kind = json_type_of(value)
        assume((kind not in kinds and not (kind == "integer" and "number" in kinds)) or kind == "string")
    tool = make_tool({"type": "object", "properties": {"a": schema}, "$defs": DEFINED})
    form = CALL_FORMATS["qwen3_coder"]
    call = ToolCall(name="f", arguments={"a": value}, call_id="call00000")
    turn = read_turn(form.write([call]), form, [tool])
    [read] = turn.tool_calls
    assert json.dumps(read.arguments) == json.dumps(call.arguments)


@pytest.mark.parametrize(
    ("schema", "value", "reason"),
    [
        ({"type": "string", "enum": ["x", "y"], "nullable": True}, None, ""),
        (
            {"type": "string", "enum": ["x", "y"], "nullable": True},
            "z",
            "must be one of x, y or of type null",
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", "must be of type integer or null"),
        ({"$ref": "#/$defs/Point"}, 1, "must be of type object"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}]}, "m", 'must be one of km, "null", 3, null'),
        ({"enum": [1, 2]}, True, "must be one of 1, 2"),
        ({"enum": ["1", "2"]}, 1, 'must be one of "1", "2"'),
        (
            {"enum": ["", "1 km", "-1e3", "true", True, "[]", "n/a"]},
            2,
            'must be one of "", 1 km, "-1e3", "true", true, "[]", n/a',
        ),
        ({"oneOf": [{"type": "integer"}, {}]}, "x", ""),
        ({"type": "date"}, 1, ""),
    ],
)
def test_values_that_a_schema_does_not_accept_are_errors(schema: Json, value: Json, reason: str) -> None:
    tool = make_tool({"type": "object", "properties": {"a": schema}, "$defs": DEFINED})
    case = find_call_error(ToolCall(name="f", arguments={"a": value}), [tool])
    assert case == (f"The argument 'a' of f {reason}." if reason else "")


def test_additional_properties_of_a_schema() -> None:
    call = ToolCall(name="f", arguments={"b": 1})
    assert "no argument 'b'" in find_call_error(call, [make_tool({"properties": {}})])
    for others in ({}, True, {"type": "integer"}):
        assert find_call_error(call, [make_tool({"properties": {}, "additionalProperties": others})]) == ""
    text = make_tool({"properties": {}, "additionalProperties": {"type": "string"}})
    assert "of type string" in find_call_error(call, [text])


URL = {"properties": {"url": {"type": "string"}}, "required": ["url"]}
SIZE = {"properties": {"size": {"type": "integer"}}, "required": ["size"]}
DEFS = {
    "Url": URL,
    "Size": SIZE,
    "my type": URL,
    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "url": {"type": "string"}}},
}
DECLARED: dict[str, tuple[Json, Json, Json]] = {
    "oneOf": ({"oneOf": [URL, SIZE]}, {"size": 3}, {"url": 1}),
    "anyOf": ({"anyOf": [URL, SIZE]}, {"url": "a"}, {"color": "red"}),
    "allOf": ({"allOf": [URL, SIZE]}, {"url": "a", "size": 3}, {"url": "a"}),
    "allOf and $ref": (
        {"allOf": [{"$ref": "#/$defs/Url"}, SIZE], "$defs": DEFS},
        {"url": "a", "size": 3},
        {"size": 3},
    ),
    "$ref": ({"$ref": "#/$defs/Size", "$defs": DEFS}, {"size": 3}, {}),
    "$ref with an escape": ({"$ref": "#/$defs/my%20type", "$defs": DEFS}, {"url": "a"}, {}),
    "$ref into a list": ({"$ref": "#/oneOf/1", "oneOf": [URL, SIZE]}, {"size": 3}, {"url": "a"}),
    "$ref to itself": ({"$ref": "#", **SIZE}, {"size": 3}, {}),
    "$ref to an anchor": (
        {
            "properties": {"url": {"$ref": "#link"}},
            "required": ["url"],
            "$defs": {"Link": {"$anchor": "link", "type": "string"}},
        },
        {"url": "7"},
        {"url": 7},
    ),
    "$ref to an id": (
        {"$ref": "#sizes", "definitions": {"Sizes": {"allOf": [{"$id": "#sizes", **SIZE}]}}},
        {"size": 3},
        {},
    ),
    "$ref to a missing anchor": ({"properties": {"a": {"$ref": "#b"}}}, {"a": {"b": 1}}, {"b": 1}),
    "a recursive type": (
        {"$ref": "#/$defs/Node", "$defs": DEFS},
        {"next": {"next": {"url": "a"}}},
        {"next": 1},
    ),
    "branches with required alone": (
        {
            "properties": {"url": {"type": "string"}, "size": {"type": "integer"}},
            "oneOf": [{"required": ["url"]}, {"required": ["size"]}],
        },
        {"size": 3},
        {"color": "red"},
    ),
    "beside properties": (
        {"properties": {"n": {"type": "integer"}}, "required": ["n"], "oneOf": [URL, SIZE]},
        {"n": 1, "url": "a"},
        {"url": "a"},
    ),
    "a discriminated union": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
                {"properties": {"kind": {"const": "b"}, "y": {"type": "boolean"}}, "required": ["kind", "y"]},
            ],
            "discriminator": {"propertyName": "kind"},
        },
        {"kind": "b", "y": True},
        {"kind": "c"},
    ),
    "nested": ({"allOf": [{"anyOf": [{"oneOf": [URL]}, SIZE]}]}, {"size": 3}, {"color": "red"}),
    "if and then": ({**URL, "if": {}, "then": SIZE}, {"url": "a", "size": 3}, {"size": 3}),
    "dependent": ({**URL, "dependentSchemas": {"url": SIZE}}, {"url": "a", "size": 3}, {"size": 3}),
    "object alone": ({"type": "object"}, {"anything": 1, "more": {"a": [True]}}, None),
    "an empty schema": ({}, {"anything": [1]}, None),
    "true": ({"oneOf": [True]}, {"anything": None}, None),
    "open": ({**URL, "additionalProperties": {}}, {"url": "a", "more": {"b": 2}}, {}),
    "open for numbers": ({"additionalProperties": {"type": "number"}}, {"more": 2}, {"more": "2"}),
    "open in a branch": (
        {"oneOf": [{**URL, "additionalProperties": True}, SIZE]},
        {"url": "a", "b": "c"},
        None,
    ),
    "a reference that leads nowhere": ({"$ref": "https://a.b/c"}, {"anything": 1}, None),
    "branches that are false": ({"oneOf": [False, URL]}, {"url": "a"}, {}),
    "nullable": ({"properties": {"a": {"type": "string", "nullable": True}}}, {"a": None}, {"a": 1}),
    "null in a union": (
        {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
        {"a": None},
        {"a": "x"},
    ),
    "enum, const and default": (
        {
            "properties": {
                "a": {"enum": [1, "b"]},
                "c": {"const": "d"},
                "e": {"type": "integer", "default": 3},
            },
            "required": ["a"],
        },
        {"a": "b", "c": "d"},
        {"a": 2},
    ),
    "booleans as schemas": ({"properties": {"a": True}}, {"a": {"b": 1}}, {"c": 1}),
}


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("case", DECLARED)
def test_arguments_are_found_in_all_parts_of_a_schema(name: CallFormatName, case: str) -> None:
    parameters, taken, refused = DECLARED[case]
    tool = make_tool({"type": "object", **parameters} if case != "an empty schema" else parameters)
    call = ToolCall(name="f", arguments=taken, call_id="call00000")
    turn = read_turn(CALL_FORMATS[name].write([call]), CALL_FORMATS[name], [tool])
    assert (turn.tool_calls, turn.problems) == ((call,), ())
    if refused is not None:
        assert find_call_error(ToolCall(name="f", arguments=refused), [tool])


def test_the_example_of_the_usage_line_is_a_valid_call() -> None:
    for parameters, _, _ in DECLARED.values():
        tool = make_tool(parameters)
        line = usage_line(tool)
        for arguments in trial_arguments(tool)[:1]:
            assert find_call_error(ToolCall(name="f", arguments=arguments), [tool]) == "", line
    assert usage_line(make_tool({"oneOf": [URL, SIZE]})) == (
        'Write <f>{"url": "..."}</f> for this: d. url (string, may be left out); '
        "size (integer, may be left out). Give url or size."
    )
    assert usage_line(make_tool({"type": "object"})).endswith("It takes a JSON object with any arguments.")


def test_definitions_that_double_are_read_once() -> None:
    pairs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    tool = make_tool({"$ref": "#/$defs/d0", "$defs": {**pairs, "d60": URL}})
    nested = make_tool(
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**pairs, "d60": {"type": "null"}}}
    )
    assert "of type null" in find_call_error(ToolCall(name="f", arguments={"a": 1}), [nested])
    assert find_call_error(ToolCall(name="f", arguments={"url": "a"}), [tool]) == ""


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": True}}, ""),
        ({}, ""),
        ([], "it is no object"),
        ({"properties": [1]}, "its properties are no object"),
        ({"required": 5}, "required is no list of names"),
        ({"required": [1]}, "required is no list of names"),
        ({"properties": {"a": 1}}, "the schema of 'a' is no object"),
        ({"properties": {"a": {"type": ["integer", {}]}}}, "the type of 'a' is no name"),
    ],
)
def test_flaws_of_a_schema(parameters: Any, reason: str) -> None:
    assert find_schema_flaw(parameters) == reason
