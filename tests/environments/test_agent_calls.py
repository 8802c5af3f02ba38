"""Tool calls that fit no tool: a program gets them, as behind other servers, and recovers by itself."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.tokens.call_formats import CALL_FORMATS, find_call_error, read_turn, read_turn_unchecked  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Outcome, Task, ToolCall  # noqa: E402
from tests.environments.agents.clients import WEATHER  # noqa: E402
from tests.environments.agents.named import NAMED, with_program  # noqa: E402
from tests.environments.test_agent import scheduled  # noqa: E402
from tests.environments.test_agent_clients import CALL  # noqa: E402
from tests.environments.test_agent_endpoint import COUNTS, given, play  # noqa: E402
from tests.environments.test_agent_requests import with_native_calls  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

ERRING = "tests.environments.agents.erring"
TOOL: Any = WEATHER["function"]
LIMITS = Limits(max_turns=10, max_turn_tokens=400, max_response_tokens=20000)


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


UNFIT: dict[str, tuple[str, list[list[str]], int]] = {
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
    "text that holds arguments": (
        hermes("weather", '{"city": "Oslo"}'),
        [["weather", '{"city": "Oslo"}']],
        0,
    ),
    "no closing tag": (
        hermes("weather", {"city": "Oslo"}).removesuffix("\n</tool_call>"),
        [["weather", '{"city": "Oslo"}']],
        1,
    ),
    "no closing tag behind another call": (
        hermes("weather", {}) + hermes("weather", {"city": "Oslo"}).removesuffix("</tool_call>"),
        [["weather", "{}"], ["weather", '{"city": "Oslo"}']],
        2,
    ),
    "one that fits beside one that does not": (
        hermes("weather", {"city": "Oslo"}) + "\n" + hermes("weather", {"town": "Oslo"}),
        [["weather", '{"city": "Oslo"}'], ["weather", '{"town": "Oslo"}']],
        1,
    ),
}


def play_turns(
    program: str,
    said: Sequence[str],
    *answers: str,
    renderer: ChatRenderer | None = None,
    form: str = "hermes",
) -> Any:
    def script(request: Any, text: str) -> str:
        return said[int(request.request_id.rsplit("/", 1)[1])]

    with scheduled(
        function=NAMED, renderer=renderer or with_native_calls(), tool_calls=form,
        script=script, limits=LIMITS, shared=True,
    ) as scheduler:  # fmt: skip
        task = Task(key="t", question="weather?", answers=answers)
        report = scheduler.run(with_program([task], "erring", program), modes=("m",), training_step=0)
    [(leaf, path)] = report.traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), report.fault_reasons
    return leaf, path


@pytest.mark.parametrize(
    ("program", "what"),
    [
        *(
            pytest.param("recovering_items", what, marks=[pytest.mark.slow] if number % 2 else [])
            for number, what in enumerate(UNFIT)
        ),
        *(
            pytest.param("recovering", what, marks=[pytest.mark.slow] if number > 1 else [])
            for number, what in enumerate(UNFIT)
        ),
    ],
)
def test_a_program_gets_a_call_that_fits_no_tool(program: str, what: str) -> None:
    """All that was sampled is one context: the program's history is recognised."""
    text, calls, num_unfit = UNFIT[what]
    leaf, path = play_turns(program, [text, "done"], "whole", json.dumps(calls))
    assert leaf.metrics["num_unfit_calls"] == num_unfit and leaf.metrics["num_refused_requests"] == 0
    assert len(split_contexts(path)) == 1
    turns = [node for node in path if node.trainable]
    assert [node.metadata["invalid"] for node in turns] == [False, False]
    assert turns[0].message.content == text


def test_also_in_a_stream() -> None:
    pytest.importorskip("openai", reason="needs the package openai")
    text, calls, num_unfit = UNFIT["one that fits beside one that does not"]
    leaf, _ = play_turns("recovering", [text, "done"], "stream", json.dumps(calls))
    assert leaf.metrics["num_unfit_calls"] == num_unfit


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
)  # fmt: skip
def test_in_every_form_of_calls(family: str, text: str) -> None:
    one = FAMILIES[family]
    renderer = ChatRenderer(
        byte_tokenizer(one), template_kwargs=one.variables, call_format=one.call_format,
        observations=("tool",),
    )  # fmt: skip
    expected = json.dumps([["wether", '{"city": "Oslo"}']])
    leaf, path = play_turns(
        "recovering", [text, "done"], "whole", expected, renderer=renderer, form=one.call_format
    )
    assert leaf.metrics["num_unfit_calls"] == 1 and len(split_contexts(path)) == 1


@pytest.mark.slow
def test_a_default_of_a_function_of_the_agents_sdk() -> None:
    pytest.importorskip("agents", reason="needs OpenAI's Agents SDK")
    leaf, _ = play_turns("defaulting", [CALL, "It is sunny."])
    assert leaf.metrics["num_unfit_calls"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": ',
        '{"town": "Oslo"}',
        "",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("Oslo", "[1]")),
    ],
)
def test_a_call_that_another_server_has_read_is_passed_on_as_it_is(arguments: str) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "wether", "arguments": arguments}}
    first = given(None, "tool_calls", COUNTS, tool_calls=[call])
    task = Task(key="t", question="", answers=("whole", json.dumps([["wether", arguments or "{}"]])))
    played, server = play("erring:recovering", first, given("done", "stop", COUNTS), task=task)
    assert (played.outcome, played.metrics["num_unfit_calls"]) == (Outcome.FINISHED, 1.0), played.detail
    body = server.asked[1].body
    assert body is not None
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == (arguments or "{}")


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'])
def test_what_cannot_be_read_is_no_call(text: str) -> None:
    turn = read_turn_unchecked(text, CALL_FORMATS["hermes"], [TOOL])
    assert not turn.tool_calls and len(turn.problems) == 1


def test_an_environment_that_we_step_still_explains_what_is_wrong() -> None:
    for text, _, num_unfit in UNFIT.values():
        turn = read_turn(text, CALL_FORMATS["hermes"], [TOOL])
        assert len(turn.problems) == num_unfit, text
        assert all(find_call_error(call, [TOOL]) == "" for call in turn.tool_calls)


def test_nothing_that_no_request_can_hold_is_passed_on() -> None:
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    turn = read_turn_unchecked(hermes("weather", {"city": deep}), CALL_FORMATS["hermes"], [TOOL])
    assert not turn.tool_calls and "levels" in turn.problems[0]
    half = hermes("weather", {"city": "\ud83d"})
    [call] = read_turn_unchecked(half, CALL_FORMATS["hermes"], [TOOL]).tool_calls
    assert call == ToolCall(name="weather", arguments={"city": "?"}, call_id="call00000")
