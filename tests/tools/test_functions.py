"""Python functions as tools: schemas, calls by text and by arguments, errors."""

import asyncio
import datetime
import enum
import functools
import inspect
import json
import re
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Dict, List, Literal, NamedTuple, NotRequired, Optional  # noqa: UP035

import numpy as np
import pytest
import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator
from typing_extensions import TypedDict

from outrider.environments.base import Episode
from outrider.environments.tool_qa.environment import ToolsConfig
from outrider.errors import ConfigError, ToolFault
from outrider.plugins.registry import build_by_name, resolve
from outrider.testing import check_tool
from outrider.tokens.call_formats import CALL_FORMATS, read_turn
from outrider.tools.base import SchemaTool, ToolOutput, Toolset, tool_schema, usage_line
from outrider.tools.functions import CalledByText, FunctionTool, tool_class
from outrider.types import Json, Message, Task, ToolCall
from tests.tool_episodes import tool_factory


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
    """Return the day."""
    return {"day": "Monday"}


def plan(
    unit: Literal["km", "mile"],
    stops: list[str],
    share: float | None = None,
    notes: Any = None,
    options: dict[str, int] = {},  # noqa: B006
) -> str:
    """Plan a way.

    Args:
        unit: of length
        stops: names in order
        share: of the fuel
        notes: whatever else
        options: by name
    """
    return f"{len(stops)} {unit} {share} {notes} {options}"


async def slow(text: str) -> str:
    """Return a text later.

    Args:
        text: what to return
    """
    await asyncio.sleep(0)
    if text == "fail":
        raise ValueError("late")
    return f"{text}!"


def later(text: str) -> Any:
    """Return a coroutine.

    Args:
        text: what to return
    """
    return slow(text)


def generator(text: str) -> Any:
    yield from text


async def async_generator(text: str) -> Any:
    yield text


def several(*numbers: int) -> int:
    return sum(numbers)


def options(**values: int) -> int:
    return sum(values.values())


def in_order(a: int, /, b: int) -> int:
    return a + b


def leave(code: int) -> None:
    """End everything.

    Args:
        code: for the shell
    """
    raise SystemExit(code)


def broken(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: one
        b: another
    """
    raise RuntimeError("never works")


@functools.lru_cache
def cached(a: int) -> int:
    """Double a number.

    Args:
        a: the number
    """
    return 2 * a


class Shop:
    def __init__(self) -> None:
        self.prices = {"kettle": 3}

    def price(self, thing: str) -> int:
        """Look up a price.

        Args:
            thing: its name
        """
        return self.prices[thing]

    def __call__(self, thing: str) -> int:
        return self.prices[thing]


SHOP = Shop()
price = SHOP.price
part = functools.partial(add, b=1)


class NoTool:
    """A class without the attributes of a tool."""


def bare(a, b):  # type: ignore[no-untyped-def]
    return a


def tool(function: Any) -> FunctionTool:
    return tool_class(function)()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_tool_of_one_text_may_accept_other_arguments(is_open: bool) -> None:
    parameters = {"properties": {"query": {"type": "string"}}, "additionalProperties": is_open}
    find_schema = {"name": "find", "description": "Find.", "parameters": parameters}

    class Find(CalledByText):
        name = usage = "find"
        schema = find_schema

        def _run(self, arguments: Any) -> ToolOutput:
            return ToolOutput(text=json.dumps(arguments))

        def close(self) -> None:
            """Nothing to release."""

    text = '{"query": "blue", "limit": 3}'
    assert json.loads(Find().run_text(text).text) == (json.loads(text) if is_open else {"query": text})
    assert json.loads(Find().run_text("blue").text) == {"query": "blue"}


DOCSTRINGS = {
    "Google": """Add two numbers.

    Args:
        a: The first: a number.
        b: The second
            number.
    """,
    "Google with types": """Add two numbers.

    Args:
        a (int): The first: a number.
        b (int, optional): The second
            number.

    Returns:
        int: The sum.

    Raises:
        ValueError: never
    """,
    "Arguments": """Add two numbers.

    Arguments:
        a (int): The first: a number.
        b (int, defaults to 1): The second number.
    """,
    "NumPy": """Add two numbers.

    Parameters
    ----------
    a : int
        The first: a number.
    b : int, optional
        The second
        number.

    Returns
    -------
    int
        The sum.
    """,
    "NumPy without types": """Add two numbers.

    Parameters
    ----------
    a
        The first: a number.
    b
        The second number.
    """,
    "reST": """Add two numbers.

    :param a: The first: a number.
    :param b: The second
        number.
    :type b: int
    :return: The sum.
    :rtype: int
    """,
    "reST with types": """Add two numbers.

    :param int a: The first: a number.
    :param int b: The second number.
    :returns: The sum.
    """,
    "Epydoc": """Add two numbers.

    @param a: The first: a number.
    @type a: int
    @param b: The second number.
    @return: The sum.
    """,
}


@pytest.mark.parametrize("style", DOCSTRINGS)
def test_a_docstring_describes_the_arguments_in_every_style(style: str) -> None:
    def add(a: int, b: int = 1) -> int:
        return a + b

    add.__doc__ = DOCSTRINGS[style]
    function_tool = tool(add)
    assert function_tool.schema["description"] == "Add two numbers."
    assert function_tool.schema["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first: a number."},
            "b": {"type": "integer", "description": "The second number."},
        },
        "required": ["a"],
    }
    assert function_tool.run_text('{"a": 1, "b": 2}') == ToolOutput(text="3")


def test_a_docstring_may_describe_several_or_unknown_arguments() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    for doc in (
        "Add.\n\nParameters\n----------\na, b : int\n    A number.\n",
        "Add.\n\nArgs:\n    a (int): A number.\n    b: A number.\n    *more (int): None.\n    **rest: None.",
    ):
        add.__doc__ = doc
        properties = tool(add).schema["parameters"]["properties"]
        assert {name: item["description"] for name, item in properties.items()} == dict.fromkeys(
            "ab", "A number."
        )


@pytest.mark.parametrize(
    ("doc", "reason"),
    [
        (None, "it has no docstring; it needs type hints and a docstring with Args:"),
        ("Add.", "its docstring does not describe the argument 'a'; it needs"),
        ("Add.\n\nArgs:\n    a (int): one\n    c (int): other", r"the argument 'b' \(it describes a, c\)"),
        ("Add.\n\nArgs:\n    a (int): one\n    b (int):", "does not describe the argument 'b'"),
        ("Args:\n    a (int): one\n    b (int): other", "does not say what it does"),
    ],
)
def test_an_incomplete_docstring_is_refused_with_the_missing_part(doc: str | None, reason: str) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    add.__doc__ = doc
    with pytest.raises(ConfigError, match=reason):
        tool_class(add)


class Unit(enum.Enum):
    C = "c"
    F = "f"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.StrEnum):
    RED = "red"


class Odd(enum.Enum):
    NORTH = (0, 1)


@dataclass
class Point:
    x: int
    unit: Unit = Unit.C


class Box(BaseModel):
    width: int = Field(ge=0)
    parts: list["Box"] = []


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: int


CONVERTED: list[tuple[Any, Json, object]] = [
    (Unit, "c", Unit.C),
    (Level, 2, Level.HIGH),
    (Color, "red", Color.RED),
    (Unit | None, None, None),
    (Optional[Unit], "f", Unit.F),  # noqa: UP045
    (Unit | int, 3, 3),
    (list[Unit], ["c", "f"], [Unit.C, Unit.F]),
    (dict[str, Unit], {"a": "f"}, {"a": Unit.F}),
    (dict[int, str], {"1": "a"}, {1: "a"}),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[int, ...], [1, 2], (1, 2)),
    (tuple, [1], (1,)),
    (set[str], ["a"], {"a"}),
    (Sequence[int], [1], [1]),
    (Literal["a", 1], "a", "a"),
    (Point, {"x": 1, "unit": "f"}, Point(1, Unit.F)),
    (Point | None, {"x": 1}, Point(1)),
    (list[Point], [{"x": 1}], [Point(1)]),
    (Box, {"width": 1, "parts": [{"width": 2}]}, Box(width=1, parts=[Box(width=2)])),
    (Movie, {"title": "M"}, {"title": "M"}),
    (Pair, [1, 2], Pair(1, 2)),
    (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
    (datetime.datetime, "2024-02-29T01:02:03", datetime.datetime(2024, 2, 29, 1, 2, 3)),
    (datetime.timedelta, "PT90S", datetime.timedelta(seconds=90)),
    (Path, "a/b", Path("a/b")),
    (Decimal, 1.5, Decimal("1.5")),
    (uuid.UUID, str(uuid.UUID(int=1)), uuid.UUID(int=1)),
    (bytes, "a", b"a"),
    (Annotated[int, Field(ge=1)], 3, 3),
    (Annotated[str, "which one"], "a", "a"),
    (Annotated[Unit, "which one"], "c", Unit.C),
    (int | str | None, "a", "a"),
    (list[dict[str, float | None]], [{"a": None}], [{"a": None}]),
    (Any, {"a": [1]}, {"a": [1]}),
    (object, [1], [1]),
]


@pytest.mark.parametrize(("hint", "written", "value"), CONVERTED, ids=[str(item[0]) for item in CONVERTED])
def test_arguments_are_converted_to_the_types_of_the_hints(hint: Any, written: Json, value: object) -> None:
    taken: list[object] = []

    def take(value: Any, *, times: int = 1) -> str:
        """Take something.

        Args:
            value: What to take.
            times (int): How often.
        """
        taken.append(value)
        return "ok"

    take.__annotations__["value"] = hint
    function_tool = tool(take)
    assert function_tool.run_call({"value": written, "times": 2}) == ToolOutput(text="ok")
    assert taken == [value] and type(taken[0]) is type(value)
    for name, form in CALL_FORMATS.items():
        call = ToolCall(name="take", arguments={"value": written})
        turn = read_turn(form.write([call]), form, [function_tool.schema])
        assert [item.arguments for item in turn.tool_calls] == [{"value": written}], (name, turn.problems)
    json.dumps(function_tool.schema)
    assert function_tool.schema["parameters"]["properties"]["value"]["description"] == "What to take."
    assert "value" in function_tool.usage


def taking(hint: Any) -> Callable[..., str]:
    """A function with an argument of this type, which is never called."""

    def take(value: Any) -> str:
        """Take something.

        Args:
            value: What to take.
        """
        raise AssertionError("never called")

    take.__annotations__["value"] = hint
    return take


@pytest.mark.parametrize(
    ("hint", "written", "reason"),
    [
        (Unit, "x", "must be one of c, f"),
        (Point, {"x": "far"}, "The argument 'value' of take: x: Input should be a valid integer"),
        (Box, {"width": -1}, "width: Input should be greater than or equal to 0"),
        (list[Unit], ["x"], "The argument 'value' of take: 0: Input should be 'c' or 'f'."),
        (datetime.date, "soon", "valid date"),
        (Annotated[int, Field(ge=1)], 0, "greater than or equal to 1"),
        (tuple[int, str], [1], "The argument 'value' of take: 1: Field required."),
    ],
)
def test_an_argument_that_cannot_be_converted_is_an_observation(
    hint: Any, written: Json, reason: str
) -> None:
    output = tool(taking(hint)).run_call({"value": written})
    assert output.failed and reason in output.text and "\n" not in output.text


class Country(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _look_up(cls, name: str) -> str:
        if name == "down":
            raise ToolFault("no power")
        return {"France": "fr"}[name]


@dataclass
class Share:
    parts: int

    def __post_init__(self) -> None:
        self.value = 1 / self.parts


def exit_at_once(value: object) -> object:
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("hint", "written", "text"),
    [
        (Country, {"name": "Spain"}, "KeyError: 'Spain'"),
        (Share, {"parts": 0}, "ZeroDivisionError: division by zero"),
        (list[Share] | None, [{"parts": 0}], "ZeroDivisionError: division by zero"),
        (Annotated[str | int, BeforeValidator(str.lower)], 1, "TypeError: descriptor 'lower'"),
        (Annotated[str, BeforeValidator(exit_at_once)], "a", "SystemExit: 2"),
    ],
)
def test_an_error_while_an_argument_is_converted_is_a_failed_call(
    hint: Any, written: Json, text: str
) -> None:
    output = tool(taking(hint)).run_call({"value": written})
    assert output.failed and output.text.startswith(text)


def test_a_tool_fault_while_an_argument_is_converted_is_raised() -> None:
    with pytest.raises(ToolFault, match="no power"):
        tool(taking(Country)).run_call({"value": {"name": "down"}})


@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        (Shop, "the type hint Shop of 'value' cannot be made from JSON .* use text, numbers, lists, an Enum"),
        (list[Shop], r"the type hint list\[.*Shop\] of 'value' cannot be made from JSON"),
        (Callable[[int], int], "of 'value' cannot be made from JSON"),
        (Literal[Unit.C] | None, "Literal\\[Unit.C\\], which 'value' takes, is no text or number"),
        (Odd, "the value of Odd.NORTH, which 'value' takes, is no text or number"),
        (enum.Enum("Nothing", []), "the Enum Nothing, which 'value' takes, has no members"),
        ("Nowhere", "the type hint 'Nowhere' of 'value' cannot be resolved: name 'Nowhere' is not defined"),
    ],
)
def test_a_hint_that_json_cannot_express_is_refused(hint: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tool_class(taking(hint))


def test_a_return_value_becomes_json() -> None:
    def make(unit: Unit) -> "Nowhere":  # type: ignore[name-defined] # noqa: F821
        """Make something.

        Args:
            unit: Of what.
        """
        return {"point": Point(1, unit), "box": Box(width=1), "unit": unit, "day": datetime.date(2024, 1, 2)}

    assert json.loads(tool(make).run_text("f").text) == {
        "point": {"x": 1, "unit": "f"}, "box": {"width": 1, "parts": []}, "unit": "f", "day": "2024-01-02"
    }  # fmt: skip


def test_a_recursive_type_keeps_its_definition() -> None:
    def take(box: Box) -> str:
        """Take something.

        Args:
            box (Box): What to take.
        """
        return str(box.width)

    function_tool = tool(take)
    parts = function_tool.schema["parameters"]["properties"]["box"]["properties"]["parts"]
    assert parts["items"] == {"$ref": "#/$defs/Box"} and set(function_tool.schema["parameters"]["$defs"]) == {
        "Box"
    }
    assert function_tool.run_call({"box": {"width": 3}}) == ToolOutput(text="3")


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
    assert tool(add).usage == (
        'Write <add>{"a": 1, "b": 1}</add> for this: Add two numbers. '
        "a (integer): the first; b (integer, may be left out): the second."
    )
    assert tool(shout).usage == (
        "Write <shout>text</shout> for this: Write a text large. text (string): what to write."
    )
    assert tool(today).usage == "Write <today>{}</today> for this: Return the day."
    assert tool(plan).usage == (
        'Write <plan>{"unit": "km", "stops": ["..."], "share": 1.5, "notes": "...", "options": {}}</plan> '
        "for this: Plan a way. unit (one of km, mile): of length; stops (array): names in order; "
        "share (number or null, may be left out): of the fuel; notes (may be left out): whatever else; "
        "options (object, may be left out): by name."
    )


def test_calls_by_arguments_and_by_text() -> None:
    assert tool(add).run_call({"a": 2, "b": 3}) == ToolOutput(text="5")
    assert tool(add).run_text('{"a": 2}') == ToolOutput(text="3")
    assert tool(add).run_text('{"a": 2.0, "b": 1e1}').text == "12"  # integers of JSON Schema
    assert tool(shout).run_text("hey") == ToolOutput(text="HEY")
    assert tool(today).run_text("{}").text == '{"day": "Monday"}'


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (tool(add).run_text("2, 3"), "JSON object"),
        (tool(add).run_text("[2]"), "JSON object"),
        (tool(add).run_call({"b": 2}), "add needs the argument 'a'."),
        (tool(add).run_call({"a": "x"}), "The argument 'a' of add must be of type integer."),
        (tool(add).run_text('{"a": 1.5}'), "The argument 'a' of add must be of type integer."),
        (tool(add).run_text('{"a": 1, "c": 1}'), "add has no argument 'c'. Arguments: a, b."),
        (tool(plan).run_text('{"unit": "m", "stops": []}'), "must be one of km, mile."),
        (tool(slow).run_text("fail"), "ValueError: late"),
        (tool(leave).run_call({"code": 3}), "SystemExit: 3"),
        (tool(shout).run_call({"text": " "}), "ValueError: nothing to shout"),
    ],
)
def test_errors_are_observations_of_one_line(output: ToolOutput, reason: str) -> None:
    assert output.failed and reason in output.text and "\n" not in output.text


def test_coroutines_share_one_event_loop() -> None:
    """So that a lock or a client of the module is used from many threads and calls."""
    lock = asyncio.Semaphore(1)

    async def locked(text: str) -> str:
        """Return a text.

        Args:
            text: what to return
        """
        async with lock:
            await asyncio.sleep(0.001)
        if text == "leave":
            raise SystemExit(1)
        return text

    tool = tool_class(locked)()
    texts = [*"abcd", "leave"] * 4
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda text: tool.run_call({"text": text}), texts))
    assert [output.text for output in outputs] == [
        "SystemExit: 1" if text == "leave" else text for text in texts
    ]


def test_a_coroutine_may_call_another_tool() -> None:
    inner = tool_class(slow)()

    async def outer(text: str) -> str:
        """Return a text.

        Args:
            text: what to return
        """
        return inner.run_call({"text": text}).text

    assert tool_class(outer)().run_call({"text": "well"}).text == "well!"


def test_a_call_by_tag_may_name_its_only_argument() -> None:
    tool = tool_class(shout)()
    for text in ("well", '{"text": "well"}', ' {"text": "well"}\n'):
        assert tool.run_text(text).text == "WELL"
    for text in ('{"word": "well"}', '{"text": 1}', '["well"]'):
        assert tool.run_text(text).text == text.upper()


@pytest.mark.parametrize(
    ("hint", "fits", "fails"),
    [
        (list[Literal["red", "blue"]], ["red"], ["green"]),
        (dict[str, list[int]], {"a": [1]}, {"a": ["x"]}),
        (list[float] | None, [0.5], ["x"]),
        (Dict, {"a": 1}, None),  # noqa: UP006
        (List[Dict], [{"a": 1}], None),  # noqa: UP006
        (list[int], [1, 2], ["1"]),
        (list[float], [1, 2.5], [True]),
    ],
)
def test_elements_of_lists_and_dictionaries_are_checked(hint: Any, fits: Json, fails: Json) -> None:
    def show(values: Any) -> Any:
        """Show values.

        Args:
            values: what to show
        """
        return values

    show.__annotations__["values"] = hint
    tool = tool_class(show)()
    assert tool.run_call({"values": fits}).text == json.dumps(fits)  # no value is converted
    if fails is not None:
        assert tool.run_call({"values": fails}).failed


@dataclass
class Tree:
    size: int
    children: list["Tree"]


@pytest.mark.parametrize(
    ("hint", "written", "text"),
    [
        (int, 2.0, "2"),
        (list[int], [1.0, 2], "[1, 2]"),
        (dict[str, int], {"a": 2.0}, '{"a": 2}'),
        (dict[str, list[int | None]] | None, {"a": [2.0, None]}, '{"a": [2, null]}'),
        (list[int] | dict[str, int], [2.0], "[2]"),
        (list[int] | list[float], [2.0], "[2.0]"),
        (list[int | float], [2.0, 1], "[2.0, 1]"),
        (list[float], [2.0, 1], "[2.0, 1]"),
        (list[Any], [2.0, True, "1"], '[2.0, true, "1"]'),
        (list[str], ["2.0", "1"], '["2.0", "1"]'),
        (list[Literal[1, 2]], [1.0], "[1]"),
        (Sequence[int], [1.0, 2], "[1, 2]"),
        (dict[Annotated[str, Field(pattern="^a")], int], {"a": 2.0}, '{"a": 2}'),
        (dict[Annotated[str, Field(pattern="^a")], int], {"a": "2"}, "a: Input should be a valid integer."),
        (tuple[int, float, str], [1.0, 2.0, "3"], '[1, 2.0, "3"]'),
        (set[int] | str, "1", "1"),
        (Sequence[bool | str], [True, "1"], '[true, "1"]'),
        (Sequence[int | str], [1.0, "1"], '[1, "1"]'),
        (dict[int, str], {"1": "a"}, '{"1": "a"}'),
        (Tree, {"size": 1.0, "children": [{"size": 2.0, "children": []}]},
         '{"size": 1, "children": [{"size": 2, "children": []}]}'),
        (list[int], [1, "2"], "1: Input should be a valid integer."),
        (Sequence[int], ["1", True], "0: Input should be a valid integer."),
        (tuple[int, ...], [1, True], "1: Input should be a valid integer."),
        (dict[str, set[int]] | None, {"a": ["1"]}, "a.0: Input should be a valid integer."),
        (Sequence[float | None], [None, "1.5"], "1: Input should be a valid number."),
        (list[Level], ["1"], "0: Input should be a valid integer."),
        (list[Literal[1, 2]], [True], "0: Input should be a valid integer."),
        (Tree, {"size": 1, "children": [{"size": "2", "children": []}]},
         "children.0.size: Input should be a valid integer."),
    ],
)  # fmt: skip
def test_whole_numbers_are_integers_in_elements_and_texts_are_not(
    hint: Any, written: Json, text: str
) -> None:
    def show(values: Any) -> Any:
        """Show values.

        Args:
            values: what to show
        """
        return values

    show.__annotations__["values"] = hint
    output = tool(show).run_call({"values": written})
    assert output.text.removeprefix("The argument 'values' of show: ") == text
    assert output.failed == ("Input should be" in text)


def test_the_example_of_a_nested_argument_is_a_valid_call() -> None:
    class Place(BaseModel):
        city: str
        year: int

    def find(place: Place | None = None, at: tuple[int, int] = (0, 0)) -> str:
        """Find a place.

        Args:
            place: which one
            at: position
        """
        return f"{place} {at}"

    tool = tool_class(find)()
    [text] = re.findall(r"<find>(.*)</find>", tool.usage)
    assert json.loads(text).keys() == {"place", "at"} and not tool.run_text(text).failed


def test_numbers_and_arrays_of_numpy_are_json() -> None:
    def count(kind: str) -> Any:
        """Count.

        Args:
            kind: of the result
        """
        return results[kind]

    results = {
        "number": np.int64(3), "array": np.array([1, 2]), "inside": {"a": np.float32(0.5)},
        "long": np.array([1.5], dtype=np.longdouble), "day": np.datetime64("2020-01-01", "ns"),
        "kind": np.ndarray,
    }  # fmt: skip
    tool = tool_class(count)()
    outputs = [tool.run_call({"kind": kind}).text for kind in results]
    assert outputs[:4] == ["3", "[1, 2]", '{"a": 0.5}', "[1.5]"]
    assert "2020-01-01" in outputs[4] and "ndarray" in outputs[5]


@dataclass
class Tagged:
    tags: set[str]
    raw: bytes


class Model(BaseModel):
    tags: set[str]
    day: datetime.date = datetime.date(2020, 1, 1)


class Nameless:
    """Its text would be an address, which differs between processes."""


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"a", "c", "b"}, '["a", "b", "c"]'),
        ({"kinds": frozenset({2, 10})}, '{"kinds": [2, 10]}'),
        ({2, "b", None}, '[null, 2, "b"]'),
        (b"Z\xc3\xbcrich\n", "Zürich\n"),
        (Tagged(tags={"b", "a", "c"}, raw=b"\xff"), '{"tags": ["a", "b", "c"], "raw": "\ufffd"}'),
        (Model(tags={"b", "a", "c"}), '{"tags": ["a", "b", "c"], "day": "2020-01-01"}'),
        ({"out": b"\xff"}, '{"out": "\ufffd"}'),
        (torch.tensor([1.5, 2.0]), "[1.5, 2.0]"),
    ],
    ids=["set", "frozenset", "mixed", "bytes", "dataclass", "model", "nested", "tensor"],
)
def test_results_that_json_lacks_have_one_text(result: object, text: str) -> None:
    def get() -> object:
        """Get it."""
        return result

    assert tool(get).run_call({}).text == text


class Line(BaseModel):
    item: str
    count: int = 1


class Order(BaseModel):
    lines: list[Line]
    replaces: Optional["Order"] = None


def test_the_example_of_a_nested_model_is_a_valid_call() -> None:
    def total(orders: list[Order]) -> int:
        """Add up.

        Args:
            orders: to add
        """
        return sum(line.count for order in orders for line in order.lines)

    adds = tool(total)
    [example] = re.findall(r"<total>(.*)</total>", usage_line(adds.schema))
    assert json.loads(example) == {
        "orders": [{"lines": [{"item": "...", "count": 1}],
                    "replaces": {"lines": [{"item": "...", "count": 1}], "replaces": None}}]
    }  # fmt: skip
    assert adds.run_call(json.loads(example)).text == "1"


class Kind(enum.Enum):
    SMALL = "small"


def test_keys_that_json_lacks_are_text() -> None:
    def get() -> dict[Any, Any]:
        """Get it."""
        return {Kind.SMALL: 1, datetime.date(2020, 1, 1): {np.int64(4): 2}, (1, 2): [{1: 3}], None: 4}

    assert json.loads(tool(get).run_call({}).text) == {
        "small": 1, "2020-01-01": {"4": 2}, "(1, 2)": [{"1": 3}], "null": 4,
    }  # fmt: skip


def test_keys_with_the_same_text_are_a_failed_call() -> None:
    def get() -> dict[Any, Any]:
        """Get it."""
        return {Kind.SMALL: 1, "small": 2}

    output = tool(get).run_call({})
    assert output.failed and "two keys of the result have the same text" in output.text


def test_labels_of_pandas_that_occur_twice_lose_no_value() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"land": ["AT", "CH"], "people": [4, 2]})
    results = {
        "twice": pandas.Series(["x", "y"], index=[1, 1]),
        "columns": pandas.DataFrame([[1, 2]], columns=["a", "a"]),
        "index": table.set_index("land"), "day": pandas.Series([1], index=pandas.to_datetime(["2020-01-01"])),
    }  # fmt: skip

    def get(kind: str) -> object:
        """Get it.

        Args:
            kind: of the result
        """
        return results[kind]

    texts = [json.loads(tool(get).run_call({"kind": kind}).text) for kind in results]
    assert texts[0] == ["x", "y"] and texts[1].split() == ["a", "a", "0", "1", "2"]
    assert texts[2:] == [
        [{"land": "AT", "people": 4}, {"land": "CH", "people": 2}], {"2020-01-01 00:00:00": 1},
    ]  # fmt: skip


def test_results_of_pandas_keep_their_labels() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"land": ["AT", "CH"], "people": [4, 2]})

    def get(kind: str) -> object:
        """Get it.

        Args:
            kind: of the result
        """
        return {"table": table, "labelled": table.groupby("land")["people"].sum(), "plain": table["people"]}[
            kind
        ]

    texts = [tool(get).run_call({"kind": kind}).text for kind in ("table", "labelled", "plain")]
    assert [json.loads(text) for text in texts] == [
        [{"land": "AT", "people": 4}, {"land": "CH", "people": 2}], {"AT": 4, "CH": 2}, [4, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "result",
    [(one for one in "ab"), Nameless(), [Nameless()], iter([1])],
    ids=["generator", "object", "list", "iterator"],
)
def test_results_without_a_text_are_failed_calls(result: object) -> None:
    def get() -> object:
        """Get it."""
        return result

    output = tool(get).run_call({})
    assert output.failed and "return a text, a number or a list" in output.text


def test_a_partial_is_refused() -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    with pytest.raises(ConfigError, match="it is a partial"):
        tool_class(functools.update_wrapper(functools.partial(add, a=1), add))


def test_a_field_as_default_is_refused() -> None:
    def limited(limit: int = Field(default=5, description="how many")) -> int:
        """Count.

        Args:
            limit: how many
        """
        return limit

    with pytest.raises(ConfigError, match=r"write Annotated\[\.\.\., Field"):
        tool_class(limited)


def test_a_coroutine_is_awaited_with_and_without_a_running_loop() -> None:
    assert tool(slow).run_text("hey") == tool(later).run_text("hey") == ToolOutput(text="hey!")

    async def inside() -> ToolOutput:
        return tool(slow).run_text("hey")

    assert asyncio.run(inside()).text == "hey!"
    with ThreadPoolExecutor(2) as pool:
        assert [item.text for item in pool.map(tool(slow).run_text, "ab")] == ["a!", "b!"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (generator, "generator cannot be a tool: it is a generator: return"),
        (async_generator, "async_generator cannot be a tool: it is a generator: return"),
        (several, r"\*numbers is no argument with a name: take a list"),
        (options, r"\*\*values is no argument with a name"),
        (in_order, "a is positional only, .* leave the / out"),
        (part, "a partial cannot be a tool: it has no name: write a function"),
        (SHOP, "a Shop cannot be a tool: it has no name: write a function"),
    ],
)
def test_a_function_that_no_call_can_reach_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tool_class(function)


@pytest.mark.parametrize(("name", "text", "output"), [("cached", '{"a": 2}', "4"), ("price", "kettle", "3")])
def test_a_wrapped_function_is_a_tool(name: str, text: str, output: str) -> None:
    for _ in range(2):
        assert build_by_name("tools", f"{__name__}:{name}", None, None).run_text(text).text == output


def test_a_plug_in_that_is_no_tool_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"NoTool .* is not a tool: it has no method run_text"):
        ToolsConfig.model_validate({"tools": [f"{__name__}:NoTool"]})
    with pytest.raises(ConfigError, match="is no class and no function"):
        resolve("tools", f"{__name__}:__name__")
    for typo, suggestion in (
        ("chached", "cached"),
        ("Shopp", "Shop"),
        ("Shop.pirce", "price"),
        ("PRICE", "price"),
    ):
        with pytest.raises(ConfigError, match=f"has no '{typo}', did you mean {suggestion}?"):
            resolve("tools", f"{__name__}:{typo}")


def test_a_tool_fault_is_raised() -> None:
    with pytest.raises(ToolFault, match="no power"):
        tool(shout).run_text("down")


async def shout_all(texts: list[str]) -> list[str]:
    """Write several texts large at once.

    Args:
        texts: what to write
    """

    async def shout_one(text: str) -> str:
        return shout(text)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(shout_one(text)) for text in texts]
    return [task.result() for task in tasks]


def test_errors_of_concurrent_tasks_are_those_of_the_function() -> None:
    assert tool(shout_all).run_call({"texts": ["a", "b"]}).text == '["A", "B"]'
    output = tool(shout_all).run_call({"texts": ["a", " ", ""]})
    assert output == ToolOutput(text="ValueError: nothing to shout", failed=True)
    with pytest.raises(ToolFault, match="no power"):
        tool(shout_all).run_call({"texts": ["a", " ", "down"]})


def pop_largest(numbers: list[int]) -> int:
    """Return the largest number.

    Args:
        numbers: at least one
    """
    return numbers.pop(numbers.index(max(numbers)))


def test_a_function_may_change_its_arguments() -> None:
    arguments: dict[str, Json] = {"numbers": [7, 9, 8]}
    assert tool(pop_largest).run_call(arguments).text == "9"
    assert arguments == {"numbers": [7, 9, 8]}


class Popping:
    """A tool with a schema that changes its arguments."""

    name, usage = "pop_largest", "u"
    schema = tool(pop_largest).schema

    def run_text(self, text: str) -> ToolOutput:
        raise AssertionError

    def run_call(self, arguments: Any) -> ToolOutput:
        return ToolOutput(text=str(pop_largest(arguments.pop("numbers"))))

    def close(self) -> None: ...


@pytest.mark.parametrize("popping", [tool(pop_largest), Popping()])
def test_changed_arguments_are_recorded_and_recognized_as_they_were_written(popping: Any) -> None:
    config = ToolsConfig.model_validate({"tools": ["python"], "protocol": "hermes", "max_calls": 9})
    environment = tool_factory(tools=[popping], config=config)(Task(key="t", question="?", answers=("1",)))
    episode = Episode(environment)
    episode.start(0)
    for numbers, num_repeated in (([7, 9, 8], 0), ([7, 9, 8], 1), ([7, 8], 1)):
        call = ToolCall(name="pop_largest", arguments={"numbers": list(numbers)})
        text = CALL_FORMATS["hermes"].write([call])
        turn = episode.read(text)
        assert episode.act(text, turn).text == str(max(numbers))
        assert turn.tool_calls[0].arguments == {"numbers": numbers}
        assert episode.result().metrics["num_repeated_queries"] == num_repeated


def test_a_function_without_hints_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bare cannot be a tool: .*type hints and a docstring"):
        tool_class(bare)


@pytest.mark.parametrize("function", [add, shout, today, plan, slow, cached])
def test_functions_keep_the_contract_of_a_tool(function: Any) -> None:
    check_tool(tool(function), texts=['{"a": 1}'])


def test_the_check_calls_with_arguments_of_the_schema() -> None:
    with pytest.raises(AssertionError, match=r"no call succeeds .* returns 'RuntimeError: never works'"):
        check_tool(tool(broken))
    check_tool(tool(price), texts=["kettle"])

    class Bare(FunctionTool):
        name, usage, schema = "bare", "", tool_class(add).schema

        def run_call(self, arguments: Any) -> Any:
            return f"{arguments['a']}"

    with pytest.raises(AssertionError, match=r"run_call returns '1' for \{'a': 1\}, not a ToolOutput"):
        check_tool(Bare())


def test_a_recipe_names_a_function() -> None:
    name = f"{__name__}:add"
    assert issubclass(resolve("tools", name), FunctionTool)
    assert build_by_name("tools", name, None, None).run_call({"a": 1}).text == "2"
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
    assert tool_schema(plain)["description"] == "Say it."
    assert [item["name"] for item in tools.schemas] == ["plain", "add"]
    assert tools.run_call(ToolCall(name="plain", arguments={"words": "hi"})).text == "hi"
    assert tools.run_call(ToolCall(name="plain", arguments={"words": " "})).failed
    assert tools.run_text("plain", "hi") == tools.run_call(ToolCall(name="plain", arguments={"words": "hi"}))
    item, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert tools.call_key(ToolCall(name="add", arguments=item)) == tools.call_key(
        ToolCall(name="add", arguments=other)
    )


def test_an_argument_that_a_decorator_fills_in_is_not_in_the_schema() -> None:
    def look(where: str, context: str) -> str:
        """Look somewhere.

        Args:
            where: the place
            context: what the decorator knows
        """
        return f"{context}: {where}"

    @functools.wraps(look)
    def filled(where: str) -> str:
        return look(where, "home")

    filled.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("where", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)]
    )
    assert list(tool_class(filled).schema["parameters"]["properties"]) == ["where"]


def test_a_text_that_is_a_member_of_an_enum_is_its_value() -> None:
    class Seen(str, enum.Enum):  # noqa: UP042 - its str() differs from that of StrEnum
        NORTH = "a door to the north"

    assert Message(role="user", content=Seen.NORTH).content == "a door to the north"
