"""Python functions as tools: their schema, calls by text and by arguments, faults in words."""

from typing import Any

import pytest

from outrider.errors import ConfigError, ToolFault
from outrider.plugins.registry import build_named, resolve
from outrider.testing.tool import check_tool
from outrider.tools.base import SchemaTool, ToolOutput
from outrider.tools.functions import FunctionTool, tool_class
from outrider.tools.toolset import Toolset, schema_of
from outrider.types import ToolCall


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def shout(text: str) -> str:
    """Write a text large.

    Args:
        text: what to write
    """
    if text == "down":
        raise ToolFault("no power")
    if not text.strip():
        raise ValueError("nothing to\nshout")
    return text.upper()


def today() -> dict[str, Any]:
    """Tell the day."""
    return {"day": "Monday"}


def pairs() -> Any:
    """Tell what JSON does not have."""
    return {(1, 2): 3}


def bare(a, b):  # type: ignore[no-untyped-def]
    return a


def tool(function: Any) -> FunctionTool:
    return tool_class(function)()


def test_hints_and_docstring_become_the_schema() -> None:
    assert tool(add).schema == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "integer", "description": "the second"},
            },
            "required": ["a"],
        },
    }
    assert tool(add).usage == 'Write <add>{"a": "...", "b": "..."}</add> for this: Add two numbers.'
    assert tool(shout).usage == "Write <shout>text</shout> for this: Write a text large."


def test_calls_by_arguments_and_by_text() -> None:
    assert tool(add).run_call({"a": 2, "b": 3}) == ToolOutput(text="5")
    assert tool(add).run_text('{"a": 2}') == ToolOutput(text="3")
    assert tool(shout).run_text("hey") == ToolOutput(text="HEY")
    assert tool(today).run_text("{}").text == '{"day": "Monday"}'


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (tool(add).run_text("2, 3"), "JSON object"),
        (tool(add).run_text("[2]"), "JSON object"),
        (tool(add).run_call({"b": 2}), "add: missing a required argument: 'a'."),
        (tool(add).run_call({"a": "x"}), "TypeError"),
        (tool(shout).run_call({"text": " "}), "ValueError: nothing to shout"),
        (tool(pairs).run_call({}), "TypeError: keys must be str"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(output: ToolOutput, told: str) -> None:
    assert output.failed and told in output.text and "\n" not in output.text


def test_a_fault_of_the_infrastructure_is_one() -> None:
    with pytest.raises(ToolFault, match="no power"):
        tool(shout).run_text("down")


def test_a_function_without_hints_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"bare cannot be a tool: .*type hints and a docstring"):
        tool_class(bare)


@pytest.mark.parametrize("function", [add, shout, today])
def test_functions_keep_the_contract_of_a_tool(function: Any) -> None:
    check_tool(tool(function), texts=['{"a": 1}'])


def test_a_recipe_names_a_function() -> None:
    name = f"{__name__}:add"
    assert issubclass(resolve("tools", name), FunctionTool)
    assert build_named("tools", name, None, None).run_call({"a": 1}).text == "2"
    with pytest.raises(ConfigError, match="is no class"):
        resolve("tools", f"{__name__}:__name__")


class Plain:
    name = "plain"
    description = "Say it."
    argument = "words"

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text=text)

    def close(self) -> None:
        """Nothing is held."""


def test_one_registry_for_text_and_arguments() -> None:
    plain = Plain()
    tools = Toolset([plain, tool(add)])
    assert tools.names == ("plain", "add") and not isinstance(plain, SchemaTool)
    assert schema_of(plain)["description"] == "Say it."
    assert [one["name"] for one in tools.schemas] == ["plain", "add"]
    assert tools.run_call(ToolCall(name="plain", arguments={"words": "hi"})).text == "hi"
    assert tools.run_call(ToolCall(name="plain", arguments={"words": " "})).failed
    assert tools.run_text("plain", "hi") == tools.run_call(ToolCall(name="plain", arguments={"words": "hi"}))
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert tools.key_of(ToolCall(name="add", arguments=one)) == tools.key_of(
        ToolCall(name="add", arguments=other)
    )
