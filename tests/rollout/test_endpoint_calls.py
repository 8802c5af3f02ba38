"""Native tool calls of an agent behind a chat server, whether the server reads them or not."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.chat import (
    ChatEndpoint,
    ChatReply,
    EndpointSettings,
    Transient,
    served_calls,
    wire_messages,
)
from outrider.environments.base import Episode, EpisodeFactory
from outrider.environments.tool_qa.environment import ToolsConfig
from outrider.rollout.endpoint import Collected, Collector, endpoint_turn
from outrider.rollout.settings import Limits
from outrider.tokens.call_formats import CALL_FORMATS, CallFormatName, read_turn
from outrider.tools.base import tool_schema
from outrider.types import Outcome
from tests.chat_server import Answer, Asked, ChatServer, chat_server, completion
from tests.rollout.test_native_calls import TASK, Search
from tests.tool_episodes import tool_factory

ANSWER = completion("It is \\boxed{Paris}.")
Wire = list[dict[str, Any]]


def served(*calls: tuple[str | None, str, object], text: str | None = None, **message: Any) -> Answer:
    """What a server answers that reads calls: id, name and arguments of each."""
    written = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        | ({} if one is None else {"id": one})
        for one, name, arguments in calls
    ]
    said = {"role": "assistant", "content": text, "tool_calls": written, **message}
    return Answer({"choices": [{"message": said, "finish_reason": "tool_calls"}]})


def factory_of(form: CallFormatName | Literal["tags"] = "hermes") -> EpisodeFactory:
    reward = {"require_think": form == "tags", "multi_tool_bonus": 0.0}
    config = ToolsConfig.model_validate({"tools": ["python"], "protocol": form, "reward": reward})
    return tool_factory(tools=[Search()], config=config, system_prompt="Rules.")


def play(
    *answers: Answer, form: CallFormatName | Literal["tags"] = "hermes", **settings: Any
) -> tuple[Collected, ChatServer, list[Wire]]:
    """One episode, and the messages of each of its requests."""
    with chat_server(list(answers)) as server:
        chosen = EndpointSettings(base_url=server.url, model="agent", max_retries=1, **settings)
        collector = Collector(
            endpoint=ChatEndpoint(chosen, sleep=lambda seconds: None),
            factory=factory_of(form), limits=Limits(step_timeout_s=60), stop=(), run_seed=0,
        )  # fmt: skip
        [played] = collector.collect([TASK], num_rollouts=1).collected
    return played, server, [body_of(asked)["messages"] for asked in server.asked]


def body_of(asked: Asked) -> dict[str, Any]:
    assert asked.body is not None
    return asked.body


def test_calls_and_results_have_ids() -> None:
    calls = ("a1", "search", '{"input": "tower"}'), ("a2", "search", {"input": "city"})
    played, server, (first, second) = play(served(*calls, text="I look."), ANSWER)
    assert (played.outcome, played.success, played.num_tool_calls) == (Outcome.FINISHED, True, 2)
    told = body_of(server.asked[0])["tools"]
    assert [(one["type"], one["function"]["name"]) for one in told] == [("function", "search")]
    assert [one["role"] for one in first] == ["system", "user"]
    said, *results = second[2:]
    assert said["content"] == "I look." and [one["id"] for one in said["tool_calls"]] == ["a1", "a2"]
    written = [one["function"] for one in said["tool_calls"]]
    assert [json.loads(one["arguments"]) for one in written] == [{"input": "tower"}, {"input": "city"}]
    assert results == [
        {"role": "tool", "tool_call_id": "a1", "content": "tower: Paris"},
        {"role": "tool", "tool_call_id": "a2", "content": "city: Paris"},
    ]


def test_calls_in_the_text_are_parsed_if_the_server_does_not_parse_them() -> None:
    text = 'I look.\n<tool_call>\n{"name": "search", "arguments": {"input": "tower"}}\n</tool_call>'
    played, _, (_, second) = play(completion(text), ANSWER)
    assert played.success and played.num_tool_calls == 1 and played.trajectory is not None
    assert played.trajectory.steps[0].text == text
    said, result = second[2:]
    assert said["content"] == "I look." and said["tool_calls"][0]["function"]["name"] == "search"
    assert (result["role"], result["tool_call_id"]) == ("tool", said["tool_calls"][0]["id"])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (("a1", "search", '{"input": '), '"arguments" of search are not JSON'),
        (("a1", "search", '{"input": "x"} y'), "something stands behind them"),
        (("a1", "search", "[1]"), "must be a JSON object"),
        (("a1", "search", ""), "search needs the argument 'input'"),
        (("a1", "find", '{"input": "x"}'), "There is no tool 'find'"),
    ],
)
def test_an_unreadable_call_has_an_explanation(call: tuple[str, str, str], complaint: str) -> None:
    good = ("a2", "search", '{"input": "tower"}')
    played, _, (_, second, third) = play(served(call, good), served(good), ANSWER)
    assert played.outcome == Outcome.FINISHED and played.num_tool_calls == 2
    said, *answers = second[2:]
    assert "tool_calls" not in said and call[1] in said["content"] and '"tower"' in said["content"]
    assert [one["role"] for one in answers] == ["user", "user"]
    assert answers[0]["content"] == "tower: Paris" and complaint in answers[1]["content"]
    assert third[5]["tool_calls"] and third[6]["role"] == "tool"


@pytest.mark.parametrize("calls", ["text", [5], {"a": 1}, [{"function": {"name": 3}}], [{}]])
def test_malformed_tool_calls_of_the_server_are_requested_again(calls: object) -> None:
    bad = Answer({"choices": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "stop"}]})
    played, server, _ = play(bad, ANSWER)
    assert played.success and len(server.asked) == 2


def test_an_error_of_the_call_parser_is_a_fault_of_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of calls and schemas of tools may be somebody else's."""

    def broken(*_: Any) -> Any:
        raise TypeError("'int' object is not iterable")

    monkeypatch.setattr("outrider.rollout.endpoint.read_turn", broken)
    played, _, _ = play(ANSWER)
    assert played.outcome == Outcome.ENVIRONMENT_FAULT and "not iterable" in played.detail


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_separate_thinking_is_returned_separately(key: str) -> None:
    look = served(("a1", "search", '{"input": "tower"}'), **{key: "Hm."})
    played, _, (_, second) = play(look, ANSWER)
    assert (second[2]["reasoning"], second[2]["reasoning_content"], second[2]["content"]) == (
        "Hm.",
        "Hm.",
        "",
    )
    assert played.trajectory is not None
    assert read_turn(played.trajectory.steps[0].text, CALL_FORMATS["hermes"], TOOLS).reasoning == "Hm."


def test_separate_thinking_counts_as_thinking_of_the_tag_protocol() -> None:
    answer = "<answer>\\boxed{Paris}</answer>"
    whole = f"<think>Hm.</think>{answer}"
    said = [{"content": answer, "reasoning_content": "Hm."}, {"content": whole},
            {"content": whole, "reasoning_content": "Hm."},
            {"content": f"Hm.</think>{answer}", "reasoning_content": "Hm."}]  # fmt: skip
    for message in said:
        reply = Answer({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]})
        played, _, _ = play(reply, form="tags")
        assert played.trajectory is not None and played.trajectory.reward == 1.0
        text = played.trajectory.steps[0].text
        assert "".join(text.split()) == whole


@pytest.mark.parametrize(
    "thought",
    [
        "I could write <search>x</search> first.",
        "The format is <answer>\\boxed{Rome}</answer>.",
        "Tags </think>",
    ],
)
def test_tags_in_separate_thinking_are_no_actions(thought: str) -> None:
    message = {"role": "assistant", "content": "<answer>\\boxed{Paris}</answer>", "reasoning": thought}
    played, _, _ = play(Answer({"choices": [{"message": message, "finish_reason": "stop"}]}), form="tags")
    assert played.trajectory is not None and played.trajectory.reward == 1.0
    assert played.trajectory.steps[0].text.count("<answer>") == 1


def test_thinking_in_the_text_is_kept_or_stripped() -> None:
    look = served(("a1", "search", '{"input": "tower"}'), text="<think>\nHm.\n</think>\n\nI look.")
    _, kept_server, (_, kept) = play(look, ANSWER)
    _, server, (_, stripped) = play(look, ANSWER, history_thinking="strip")
    assert kept[2]["content"] == "<think>\nHm.\n</think>\n\nI look." and "reasoning" not in kept[2]
    assert (stripped[2]["content"], stripped[2]["reasoning"]) == ("I look.", "Hm.")
    assert body_of(server.asked[1])["chat_template_kwargs"] == {"history_thinking": "strip"}
    assert "chat_template_kwargs" not in body_of(kept_server.asked[1])


TOOLS = (tool_schema(Search()),)


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_trajectory_has_calls_in_the_format_of_the_environment(form: CallFormatName) -> None:
    message = {"tool_calls": [{"id": "x", "function": {"name": "search", "arguments": '{"input": "a b"}'}}]}
    reply = ChatReply(text="", served=served_calls(message, TOOLS))
    episode = Episode(factory_of(form)(TASK))
    episode.start(0)
    turn = endpoint_turn(reply, episode)
    read = read_turn(turn.text, CALL_FORMATS[form], TOOLS)
    assert [(one.name, one.arguments) for one in read.tool_calls] == [("search", {"input": "a b"})]


ARGUMENTS = st.one_of(
    st.sampled_from(['{"input": "x"}', '{"input": 1}', "{", "", "null", '"\\ud800"', '{"input": "\\ud800"}']),
    st.just('{"input": "x"}'), st.text(max_size=8), st.just({"input": "y"}), st.none(), st.integers(),
)  # fmt: skip
CALLS = st.one_of(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a", "b", "", "call00001", None, 3]),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["search", "other", ""]), "arguments": ARGUMENTS}
            ),
        }
    ),
    st.sampled_from([None, {}, [], "x"]),
)


@given(
    st.lists(CALLS, max_size=4), st.text(max_size=12), st.sampled_from(["", "<think>", "a</think>b", "Hm."])
)
def test_every_call_has_one_result(calls: list[Any], text: str, thinking: str) -> None:
    """As servers ask for it, whatever was written; nothing raises but for what only a server writes."""
    try:
        read = served_calls({"tool_calls": calls}, TOOLS)
    except Transient:
        return
    environment = factory_of()(TASK)
    prompt = list(environment.reset(0))
    turn = endpoint_turn(
        ChatReply(text=thinking + text, served=read, reasoning=thinking), Episode(environment)
    )
    turn.text.encode()
    answers = environment.step(turn.response).observations
    wire, _ = wire_messages([*prompt, turn.history_message, *answers], continues=False)
    json.dumps(wire).encode()
    called = [one["id"] for message in wire for one in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in wire if message["role"] == "tool"]
    assert len(set(called)) == len(called) and len(read.calls) + len(read.problems) == len(calls)
    assert answered == (called if answers else [])
