"""Thinking in ``/v1/responses``: given apart, and read out of a history as ``reasoning_content`` is."""

import importlib.util
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.engines.base import Request  # noqa: E402
from outrider.environments.agent.requests import Answer, BadRequest, read_chat
from outrider.environments.agent.responses import read_response, response  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.tokens.renderer import HistoryThinking  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Message, Outcome, Task, ToolCall  # noqa: E402
from tests.environments.test_agent import scheduled  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = (f"Where?</think>{CALL}", "It shines.</think>It is sunny.", "Well.</think>Yes.")
LIMITS = Limits(max_turns=10, max_turn_tokens=200, max_response_tokens=8000)


def asked_by(form: str, history: HistoryThinking) -> list[str]:
    """What the policy is shown by a program that speaks a form of the endpoint."""
    family = FAMILIES["qwen3, always thinking"]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes",
        observations=("tool",), history_thinking=history,
    )  # fmt: skip
    seen: list[tuple[str, str]] = []

    def script(request: Request, text: str) -> str:
        return SAID[int(request.request_id.rsplit("/", 1)[1])]

    with scheduled(
        function="tests.environments.agents.clients:sdk_thinking", renderer=renderer, script=script,
        seen=seen, limits=LIMITS, tool_calls="hermes", shared=True,
    ) as scheduler:  # fmt: skip
        task = Task(key="t", question="How is Paris?", answers=(form,))
        report = scheduler.run([task], modes=("m",), training_step=0)
    [(leaf, path)] = report.traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), report.fault_reasons
    assert history == "strip" or len(split_contexts(path)) == 1
    return [text for _, text in seen]


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai")
@pytest.mark.parametrize("history", [pytest.param("keep", marks=pytest.mark.slow), "strip"])
def test_thinking_comes_and_goes_back_as_in_chat_completions(history: HistoryThinking) -> None:
    by_responses, by_chat = asked_by("responses", history), asked_by("chat", history)
    assert by_responses == by_chat and len(by_chat) == 3
    assert "Where?" in by_chat[1] and ("Where?" in by_chat[2]) is (history == "keep")


def thought(text: str, name: str = "content") -> dict[str, Any]:
    kind = "reasoning_text" if name == "content" else "summary_text"
    return {"type": "reasoning", "id": "rs", "summary": [], name: [{"type": kind, "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def of_turn(number: int, item: dict[str, Any]) -> dict[str, Any]:
    """The item as this endpoint has written it."""
    kind = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
    behind = f"-c{number:08d}" if kind == "fc" else ""
    return {**item, "id": f"{kind}-turn-{number}{behind}"}


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([thought("a"), said("b")], [("a", "b", 0)]),
        ([thought("a", "summary"), called("c")], [("a", "", 1)]),
        ([thought("a"), said("b"), called("c"), called("d")], [("a", "b", 2)]),
        ([thought("a"), thought("b"), said("c")], [("a\nb", "c", 0)]),
        ([said("a"), thought("b"), said("c")], [("", "a", 0), ("b", "c", 0)]),
        ([{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}], []),
        ([said("a"), said("b")], [("", "a", 0), ("", "b", 0)]),
        ([said("a"), called("c")], [("", "a", 1)]),
        ([called("c"), said("a")], [("", "a", 1)]),  # its call has no result: the turn goes on
        ([thought("a"), called("c"), thought("b"), called("d")], [("a\nb", "", 2)]),
        ([of_turn(1, said("a")), of_turn(1, called("c"))], [("", "a", 1)]),
        ([of_turn(1, said("a")), of_turn(2, called("c"))], [("", "a", 0), ("", "", 1)]),
        ([of_turn(1, thought("a")), of_turn(2, thought("b"))], [("a", "", 0), ("b", "", 0)]),
        ([of_turn(1, thought("a")), said("b"), of_turn(1, called("c"))], [("a", "b", 1)]),
    ],
)
def test_the_items_of_a_turn_are_one_message(items: list[Any], turns: list[tuple[str, str, int]]) -> None:
    asked = {"role": "user", "content": "q"}
    found = read_response({"input": [asked, *items, asked]}, takes_tools=True).conversation.messages
    assert [(one.reasoning, one.content, len(one.tool_calls)) for one in found[1:-1]] == turns


def test_a_history_is_the_same_in_both_forms() -> None:
    asked, result = {"role": "user", "content": "q"}, "sunny"
    call = {"id": "c", "type": "function", "function": {"name": "c", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [call]}
    chat = [asked, turn, {"role": "tool", "tool_call_id": "c", "content": result}]
    output = {"type": "function_call_output", "call_id": "c", "output": result}
    items = [asked, thought("a"), said("b"), called("c"), output]
    expected = read_chat({"messages": chat}, takes_tools=True).conversation
    assert read_response({"input": items}, takes_tools=True).conversation == expected
    calls = (ToolCall(name="c", call_id="c"),)
    assert expected.messages[1] == Message(role="assistant", content="b", reasoning="a", tool_calls=calls)


def test_the_roles_and_forms_of_an_input() -> None:
    """Instructions come first; developers are the system; results are text, in parts or not."""
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}, called("c"), output]
    found = read_response({"instructions": "i", "input": items}, takes_tools=True).conversation.messages
    assert [(one.role, one.content) for one in found] == [
        ("system", "i"),
        ("system", "d"),
        ("user", "sunny"),
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    assert (found[-1].tool_call_id, found[-1].tool_name) == ("c", "c")
    [only] = read_response({"input": "q"}, takes_tools=True).conversation.messages
    assert only == Message(role="user", content="q")


@pytest.mark.parametrize("with_ids", [True, False])
def test_what_came_out_is_the_same_turn_when_it_goes_back_in(with_ids: bool) -> None:
    """Thinking, words and calls; else the rollout would become a sample more."""
    calls = tuple(ToolCall(name="c", arguments={"a": number}, call_id=f"c{number}") for number in range(2))
    turn = Message(role="assistant", content="b", reasoning="a", tool_calls=calls)
    asked = {"role": "user", "content": "q"}
    out = response(
        read_response({"input": [asked]}, takes_tools=True), Answer(message=turn, turn=None), "turn-3"
    )
    items = out["output"] if with_ids else [{**one, "id": None} for one in out["output"]]
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "x"} for one in calls]
    found = read_response({"input": [asked, *items, *results]}, takes_tools=True).conversation.messages
    assert found[1] == turn and len(found) == 4


@pytest.mark.parametrize("field", ["content", "summary"])
@pytest.mark.parametrize("value", ["text", [3], 7])
def test_an_odd_item_is_refused_in_words(field: str, value: object) -> None:
    body = {"input": [{"type": "reasoning", field: value}, {"role": "user"}]}
    with pytest.raises(BadRequest, match="reasoning item"):
        read_response(body, takes_tools=False)
