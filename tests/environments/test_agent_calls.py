"""Tool calls that fit no tool: a program gets them, as behind other servers, and recovers by itself."""

import json
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens.call_formats import CALL_FORMATS, find_call_error, read_turn, read_turn_unchecked  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Message, ToolCall  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    by_turn,
    family_renderer,
    finished,
    play,
    shared_factory,
    task,
    turn_of,
    turns_of,
)
from tests.environments.agents.programs import WEATHER  # noqa: E402
from tests.tokens.family_templates import FAMILIES  # noqa: E402

TOOL: Any = WEATHER["function"]
LIMITS = Limits(max_turns=10, max_turn_tokens=400, max_response_tokens=20000)


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


UNFIT: dict[str, tuple[str, list[list[str]], int]] = {  # a turn, its calls, and how many of them do not fit
    "an unknown tool": (hermes("wether", {"city": "Oslo"}), [["wether", '{"city": "Oslo"}']], 1),
    "an argument is missing": (hermes("weather", {}), [["weather", "{}"]], 1),
    "another type": (hermes("weather", {"city": 3}), [["weather", '{"city": 3}']], 1),
    "an argument too many": (
        hermes("weather", {"city": "Oslo", "unit": "C"}),
        [["weather", '{"city": "Oslo", "unit": "C"}']],
        1,
    ),
    "a list of arguments": (hermes("weather", ["Oslo"]), [["weather", '["Oslo"]']], 1),
    "text for arguments": (hermes("weather", "{city: Oslo}"), [["weather", "{city: Oslo}"]], 1),
    "no number": (hermes("weather", {"city": float("nan")}), [["weather", '{"city": NaN}']], 1),
    "text that contains arguments": (
        hermes("weather", '{"city": "Oslo"}'),
        [["weather", '{"city": "Oslo"}']],
        0,
    ),
    "no closing tag": (
        hermes("weather", {"city": "Oslo"}).removesuffix("\n</tool_call>"),
        [["weather", '{"city": "Oslo"}']],
        1,
    ),
    "no closing tag after another call": (
        hermes("weather", {}) + hermes("weather", {"city": "Oslo"}).removesuffix("</tool_call>"),
        [["weather", "{}"], ["weather", '{"city": "Oslo"}']],
        2,
    ),
    "one that fits and one that does not": (
        hermes("weather", {"city": "Oslo"}) + "\n" + hermes("weather", {"town": "Oslo"}),
        [["weather", '{"city": "Oslo"}'], ["weather", '{"town": "Oslo"}']],
        1,
    ),
}


@pytest.mark.parametrize("program", ["recovering", "recovering_items"])
def test_a_program_gets_a_call_that_fits_no_tool(program: str) -> None:
    """Everything sampled is one context: the program's history is recognized."""
    report = play(
        *(task(program, json.dumps(calls), key=key) for key, (_, calls, _) in UNFIT.items()),
        script=lambda request, _: "done" if turn_of(request) else UNFIT[request.request_id.split("/")[0]][0],
        renderer=family_renderer(),
        tool_calls="hermes",
        limits=LIMITS,
    )
    for trace in report.traces:
        [(leaf, path)] = trace.rollouts()
        text, _, num_unfit = UNFIT[trace.task.key]
        assert finished(leaf) and leaf.metrics["num_unfit_calls"] == num_unfit, trace.task.key
        assert leaf.metrics["num_refused_requests"] == 0 and len(split_contexts(path)) == 1
        turns = turns_of(path)
        assert [node.metadata["invalid"] for node in turns] == [False, False]
        assert turns[0].message.content == text


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen3-coder",
            "<tool_call>\n<function=wether>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        ),
        ("llama3", '{"name": "wether", "parameters": {"city": "Oslo"}}'),
        ("lfm2", "<|tool_call_start|>[wether(city='Oslo')]<|tool_call_end|>"),
    ],
)
def test_in_every_format_of_calls(family: str, text: str) -> None:
    [trace] = play(
        task("recovering", json.dumps([["wether", '{"city": "Oslo"}']])),
        script=by_turn(text, "done"),
        renderer=family_renderer(family),
        tool_calls=FAMILIES[family].call_format,
    ).traces
    [(leaf, path)] = trace.rollouts()
    assert finished(leaf) and leaf.metrics["num_unfit_calls"] == 1 and len(split_contexts(path)) == 1


def test_a_program_that_takes_a_single_call_gets_several_as_text() -> None:
    """It has seen everything that is trained, and its history keeps the ids."""
    call = hermes("look", {})
    [trace] = play(
        task("one_call"),
        script=by_turn(f"{call}\n{call}", call, "done"),
        renderer=family_renderer(),
        tool_calls="hermes",
    ).traces
    [(leaf, path)] = trace.rollouts()
    assert finished(leaf) and len(split_contexts(path)) == 1
    assert [node.metadata["invalid"] for node in turns_of(path)] == [True, False, False]
    records = [(call.name, call.status) for node in path for call in node.tool_calls]
    assert records == [("", "error"), ("look", "ok")]
    environment = shared_factory(tool_calls="hermes")(task("one_call"))
    try:
        environment.reset(0)
        look = ToolCall(name="look", arguments={})  # as a server parses it
        result = environment.step(Message(role="assistant", content="so:", tool_calls=(look, look)))
        assert result.invalid and not result.done
    finally:
        environment.close()


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'])
def test_a_call_that_cannot_be_parsed_is_none(text: str) -> None:
    turn = read_turn_unchecked(text, CALL_FORMATS["hermes"], [TOOL])
    assert not turn.tool_calls and len(turn.problems) == 1


def test_an_environment_of_ours_explains_the_problems() -> None:
    for text, _, num_unfit in UNFIT.values():
        turn = read_turn(text, CALL_FORMATS["hermes"], [TOOL])
        assert len(turn.problems) == num_unfit, text
        assert all(find_call_error(call, [TOOL]) == "" for call in turn.tool_calls)


def test_calls_that_no_request_can_contain_are_none() -> None:
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    turn = read_turn_unchecked(hermes("weather", {"city": deep}), CALL_FORMATS["hermes"], [TOOL])
    assert not turn.tool_calls and "levels" in turn.problems[0]
    half = hermes("weather", {"city": "\ud83d"})
    [call] = read_turn_unchecked(half, CALL_FORMATS["hermes"], [TOOL]).tool_calls
    assert call == ToolCall(name="weather", arguments={"city": "?"}, call_id="call00000")
