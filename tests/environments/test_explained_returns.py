"""Why a return is what it is, and what happened to each tool call: what every kind of environment and tool
reports for the records.
"""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.environments.agent.server import read_reward
from outrider.environments.base import EpisodeResult, StepResult, open_episode
from outrider.environments.conversations import Conversation
from outrider.environments.seeded import MoveRecord, SeedSettings
from outrider.environments.verifiers.player import episode_outcome
from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.tools.base import ToolOutput, recorded_call
from outrider.tools.functions import tool_class
from outrider.tools.python.tool import PythonResult, PythonTool
from outrider.tools.search import Passage, SearchTool
from outrider.types import CallRecord, Message, ToolCall
from tests.chat_server import Answer
from tests.environments import test_house as house
from tests.environments import test_native_tools as native
from tests.environments import test_scienceworld as scienceworld
from tests.environments import test_textworld as textworld
from tests.environments import test_tools as tags
from tests.environments import test_webshop as webshop
from tests.retrieval_server import retrieval_server
from tests.rollout.fakes import Fake, say
from tests.tools.test_http_search import PASSAGES, tool

THOUGHT = "<think>a</think>"


def answered(text: str, **reward: Any) -> EpisodeResult:
    environment, _ = tags.start(reward=reward)
    tags.say(environment, text)
    return environment.result()


def house_result(max_moves: int) -> EpisodeResult:
    episode = house.start("coin", max_moves)
    house.act(episode, "go attic")
    return episode.result()


def bought(*actions: str) -> EpisodeResult:
    shop = webshop.start()
    webshop.do(shop, *actions)
    return shop.result()


def moved(reward: float, **settings: Any) -> EpisodeResult:
    record = MoveRecord(name="lake", settings=SeedSettings(**settings))
    success = 1 if "success_key" in settings else None
    record.record_move("ice", reward, terminated=False, success=success)
    return record.result()


def game(*, won: bool = False) -> EpisodeResult:
    environment = textworld.play(textworld.ScriptedGame(replies=[textworld.reply(2, won=won)]), max_moves=1)
    textworld.act(environment)
    return environment.result()


def experiment(score: int) -> EpisodeResult:
    simulator = scienceworld.ScriptedSimulator(replies=[scienceworld.reply(score, completed=score == 100)])
    environment = scienceworld.play_one(simulator)
    scienceworld.act(environment)
    return environment.result()


@pytest.mark.parametrize(
    ("result", "answer", "parts", "reason"),
    [
        (lambda: answered(f"{THOUGHT}<answer>\\boxed{{Paris}}</answer>"), "Paris", {"correctness": 1.0},
         "the answer is correct by token F1"),
        (lambda: answered(f"{THOUGHT}<answer>\\boxed{{Rome}}</answer>", answer="em"), "Rome",
         {"correctness": 0.0}, "the answer equals none of the targets by exact match"),
        (lambda: answered("Paris"), None, {"format_penalty": -1.0}, "no <think>"),
        (lambda: answered(f"{THOUGHT}<answer>\\boxed{{in Paris}}</answer>"), "in Paris",
         {"correctness": pytest.approx(2 / 3)}, "the answer is partly correct (0.67) by token F1"),
        (lambda: answered(f"{THOUGHT}<answer>\\boxed{{7}}</answer>", answer="math"), "7",
         {"correctness": 0.0}, "the answer equals none of the targets by mathematical equivalence"),
        (lambda: house_result(1), None, None, "the coin was not found within max_moves = 1"),
        (lambda: house_result(9), None, None, "the coin was not found before the episode ended"),
        (lambda: game(won=True), None, None, "the game was won: score 2 of 4"),
        (game, None, None, "not solved within max_moves = 1: score 2 of 4"),
        (lambda: experiment(100), None, None, "the simulator ended the episode: score 100 of 100"),
        (lambda: experiment(-100), None, None, "the focus was on a wrong object: score -100 of 100"),
        (lambda: moved(0.5), None, None, "the episode did not end; return 0.5 < success_at = 1"),
        (lambda: moved(2.0, max_moves=1), None, None, "cut after 1 moves; return 2 >= success_at = 1"),
        (lambda: moved(0, success_key="won"), None, None, "the episode did not end; won is True"),
        (lambda: bought("search[bottle]"), None, {}, "nothing was bought"),
    ],
)  # fmt: skip
def test_every_kind_of_environment_explains_its_return(
    result: Callable[[], EpisodeResult], answer: str | None, parts: object, reason: str
) -> None:
    explained = result()
    assert (explained.answer, explained.reward_parts, explained.reason) == (answer, parts, reason)


def test_a_purchase_is_recorded_beside_the_requested_product() -> None:
    steps = webshop.family().expert(
        next(task for task in webshop.all_tasks(webshop.family()) if task.metadata["product"] == webshop.MAT),
        0,
    )
    shop = webshop.start(webshop.MAT)
    assert steps is not None
    for step in steps:
        webshop.say(shop, step.text)
    explained = shop.result()
    assert explained.targets == (explained.answer,) and "yoga mat" in str(explained.answer).lower()
    assert explained.reward_parts == {
        "type_factor": 1.0, "price_ok": 1.0, "share_attributes": 1.0, "share_options": 1.0
    }  # fmt: skip
    assert explained.reason == "the purchase has the score 1.00"


def test_the_reward_of_a_program_may_come_with_its_explanation() -> None:
    reward = read_reward(
        {"reward": 1, "answer": 42, "targets": 43, "reward_parts": {"unit": 0.5}, "reason": "near"}
    )
    assert EpisodeResult(episode_return=1, success=True, **reward.grade).to_grade() == {
        "answer": "42", "targets": '["43"]', "reward_parts": '{"unit": 0.5}', "reason": "near"
    }  # fmt: skip
    assert read_reward(1.0).grade == {} == read_reward({"reward": 1}).grade


def test_the_rewards_of_verifiers_are_parts_of_the_return() -> None:
    rewards = {"exact": SimpleNamespace(value=1.0), "length": SimpleNamespace(value=-0.25)}
    agent = SimpleNamespace(trainable=True)
    trace = SimpleNamespace(agent=agent, metrics={"num_words": 3.0}, rewards=rewards, reward=0.75)
    value = episode_outcome(SimpleNamespace(ok=True, traces=[trace]), "KEY")["value"]
    assert read_reward(value).grade == {"reward_parts": {"exact": 1.0, "length": -0.25}}


def explained(**fields: Any) -> EpisodeResult:
    result = EpisodeResult(episode_return=1, success=True, **fields)
    environment: Any = SimpleNamespace(result=lambda: result)
    return open_episode(environment).result()


def test_what_an_environment_explains_is_cut() -> None:
    texts = {"targets": ["a" * 999] * 99, "answer": "b" * 999, "reason": "c\n d"}
    grade = explained(**texts, reward_parts={"x": 1}).to_grade()
    assert grade["reason"] == "c d" and grade["reward_parts"] == '{"x": 1.0}'
    assert len(grade["answer"]) == 300 and grade["answer"].endswith("...") and len(grade["targets"]) < 7000
    assert explained().to_grade() == {}
    assert explained(answer=5).to_grade() == {"answer": "5"}
    odd = "\udcff" * 1000
    parts: dict[str, float] = {"k" * 1000: 1.0} | {f"part {number}": 0.5 for number in range(500)}
    grade = explained(answer=odd, reason=odd, targets=[odd], reward_parts=parts).to_grade()
    assert len(grade["answer"]) == len(grade["reason"]) == 300 == len(json.loads(grade["targets"])[0])
    assert len(json.loads(grade["reward_parts"])) == 20 and len(grade["reward_parts"]) < 2000
    assert len(CallRecord(name="x", arguments=odd).arguments) == 300


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"targets": "Paris"}, '["Paris"]'),
        ({"targets": 5}, '["5"]'),
        ({"targets": (5, "Rome")}, '["5", "Rome"]'),
        (
            {"reward_parts": {"a": math.nan, "b": "good", "c": None, "d": 10**400, "e": True, "f": 0.5}},
            '{"e": 1.0, "f": 0.5}',
        ),
        ({"reward_parts": ["a"]}, None),
        ({"reward_parts": "good"}, None),
    ],
)
def test_what_only_explains_a_return_never_costs_the_rollout(
    fields: dict[str, Any], column: str | None
) -> None:
    expected = {} if column is None else {next(iter(fields)): column}
    assert explained(**fields).to_grade() == expected
    assert explained(**read_reward({"reward": 1.0, **fields}).grade).to_grade() == expected


# Tool calls


def shout(text: str) -> str:
    """Write in capitals.

    Args:
        text: what to write
    """
    if text == "fail":
        raise ValueError("too loud")
    return text.strip().upper()


def python(status: Any, output: str) -> ToolOutput:
    result = PythonResult(output=output, status=status, seconds=0.0, truncated=False, sandboxed=True)
    server: Any = SimpleNamespace(run=lambda code: result)
    return PythonTool.run_text(server, "x")


SEARCH = SearchTool([Passage(passage_id="1", title="Red", text="The sky is red.")])
SHOUT = tool_class(shout)()


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (lambda: SEARCH.run_text("red sky"), "ok"),
        (lambda: SEARCH.run_text("zebra"), "empty"),
        (lambda: SEARCH.run_text(" "), "empty"),
        (lambda: SHOUT.run_text("hey"), "ok"),
        (lambda: SHOUT.run_call({"text": " "}), "empty"),
        (lambda: SHOUT.run_text("fail"), "error"),
        (lambda: SHOUT.run_call({"volume": 3}), "error"),
        (lambda: python("ok", "5"), "ok"),
        (lambda: python("ok", ""), "empty"),
        (lambda: python("error", "NameError"), "error"),
        (lambda: python("memory", "[memory]"), "error"),
        (lambda: python("timeout", "[timeout]"), "timeout"),
    ],
)
def test_every_tool_reports_what_became_of_a_call(run: Callable[[], ToolOutput], status: str) -> None:
    output, record = recorded_call(run, "tool", "x" * 999)
    assert record == CallRecord(name="tool", arguments="x" * 297 + "...", status=status)  # type: ignore[arg-type]
    assert record.seconds is not None and 0 <= record.seconds < 5
    assert output.text or status == "empty"
    assert record.is_failed == (status in ("error", "timeout"))


def test_a_result_of_an_mcp_server_has_a_status() -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    from mcp_types import CallToolResult, TextContent

    from outrider.tools.mcp.session import _to_tool_output

    def status(text: str, *, is_error: bool) -> str:
        content = [TextContent(type="text", text=text)]
        return _to_tool_output(CallToolResult(content=content, is_error=is_error), 99).call_status

    assert status("rain", is_error=False) == "ok" and status("", is_error=False) == "empty"
    assert status("no such city", is_error=True) == "error"


def test_a_search_server_without_hits_is_empty_and_one_that_is_slow_is_a_timeout() -> None:
    held = Answer({"result": [[]]}, hold=threading.Event())
    with retrieval_server(PASSAGES, [Answer({"result": [[]]}), Answer(status=500), held]) as (url, _):
        search, hasty = tool(url, max_retries=0), tool(url, timeout_s=0.05, max_retries=0)
        assert search.run_text("zebra").call_status == "empty"
        for run, status in ((search.run_text, "error"), (hasty.run_text, "timeout")):
            with pytest.raises(ToolFault, match="http-search") as raised:
                recorded_call(partial(run, "red"), "search", "red")
            assert raised.value.tool_calls == (CallRecord(name="search", arguments="red", status=status),)  # type: ignore[arg-type]
        assert held.hold is not None
        held.hold.set()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"status": "failed"}, "status of a CallRecord"), ({"seconds": "0.5"}, "seconds of a CallRecord")],
)
def test_a_record_with_a_wrong_value_is_an_invalid_result(fields: dict[str, Any], problem: str) -> None:
    wrong = CallRecord(name="x", **fields)
    with pytest.raises(InvalidResult, match=problem):
        open_episode(Fake(lambda number, text: replace(say("a"), tool_calls=(wrong,)))).act("x")


def test_the_seconds_of_a_record_are_a_finite_float_or_unknown() -> None:
    seconds: tuple[Any, ...] = (Fraction(1, 2), math.nan, None)
    calls = tuple(CallRecord(name="x", seconds=value) for value in seconds)
    result = open_episode(Fake(lambda number, text: replace(say("a"), tool_calls=calls))).act("x")
    assert [call.seconds for call in result.tool_calls] == [0.5, None, None]


def records(result: StepResult) -> list[tuple[str, str, str]]:
    return [(call.name, call.arguments, call.status) for call in result.tool_calls]


def test_calls_by_tags_are_recorded_also_those_that_were_not_executed() -> None:
    environment, _ = tags.start(max_calls=2, repeated="refuse", max_invalid=9)
    turns = [
        tags.say(environment, f"{THOUGHT}{turn}")
        for turn in (
            "<search>tower</search>", "<search>tower</search>", "<python>oops</python>", "<search> </search>",
            "<search>more</search>", "<search>more</search>",
        )
    ]  # fmt: skip
    assert [records(turn) for turn in turns] == [
        [("search", "tower", "ok")],
        [("search", "tower", "refused")],
        [("python", "oops", "error")],
        [("search", "<search> is empty.", "error")],
        [("search", "more", "refused")],
        [("search", "more", "refused")],
    ]
    assert turns[-1].done
    with pytest.raises(ToolFault) as raised:
        tags.say(tags.start()[0], "<search>break</search>")
    assert raised.value.tool_calls == (CallRecord(name="search", arguments="break", status="error"),)


def test_native_calls_are_recorded_one_by_one() -> None:
    environment, _ = native.start(max_calls=2, max_invalid=9)
    episode = open_episode(environment)
    one, two, three = (native.call("find", text) for text in ("a", "b", "c"))
    mixed = episode.act(f"{one}{native.call('nowhere')}")
    assert records(mixed)[0] == ("find", '{"input": "a"}', "ok")
    (name, problem, status) = records(mixed)[1]
    assert (name, status) == ("", "error") and "nowhere" in problem
    over = episode.act(f"{two}{three}")
    assert records(over) == [("find", '{"input": "b"}', "ok"), ("find", '{"input": "c"}', "refused")]
    ended = episode.act(one)
    assert ended.done and records(ended) == [("find", '{"input": "a"}', "refused")]
    broken = open_episode(native.start()[0])
    with pytest.raises(ToolFault) as raised:
        broken.act(f"{one}{native.call('run', 'break')}")
    assert [call.status for call in raised.value.tool_calls] == ["ok", "error"]


def test_the_calls_of_a_program_are_recorded_with_what_their_results_show() -> None:
    pytest.importorskip("uvicorn", reason="needs the extra agent")
    from outrider.environments.agent.environment import _program_calls

    calls = tuple(
        ToolCall(name=name, arguments={"text": "a"}, call_id=name) for name in ("shout", "whisper", "nowhere")
    )
    results = [
        Message(role="tool", content=text, tool_call_id=call_id, tool_name="named")
        for call_id, text in (("shout", "A"), ("whisper", ""), ("nowhere", "no such tool"), ("gone", "b"))
    ]
    tools = tuple({**SHOUT.schema, "name": name} for name in ("shout", "whisper"))
    request = Message(role="assistant", content="", tool_calls=calls)
    found = _program_calls(Conversation(messages=(request, *results), tools=tools), results)
    assert [(call.name, call.arguments, call.status) for call in found] == [
        ("shout", '{"text": "a"}', "ok"),
        ("whisper", '{"text": "a"}', "empty"),
        ("nowhere", '{"text": "a"}', "error"),
        ("named", "", "ok"),
    ]


@pytest.mark.parametrize(
    ("flags", "status"),
    [({}, "ok"), ({"refused": True}, "refused"), ({"invalid": True}, "error"), ({"text": " "}, "empty")],
)
def test_an_environment_that_records_nothing_gets_the_records_that_its_flags_imply(
    flags: dict[str, Any], status: str
) -> None:
    observation = Message(role="tool", content=flags.pop("text", "rain"))
    result = StepResult(message=observation, num_tool_calls=1, tools=("weather",), **flags)
    act = open_episode(Fake(lambda number, text: result)).act
    assert records(act("call")) == [("weather", "", status)]
    result = say("moved")
    assert act("no call").tool_calls == ()


@pytest.mark.parametrize(
    ("flags", "statuses"),
    [
        ({}, ("ok", "ok", "error")),
        ({"tools": ("a",), "num_tool_calls": 1}, ("ok", "refused", "error")),
        ({"tools": ("a",), "num_tool_calls": 1, "invalid": True}, ("ok", "refused", "error")),
        ({"invalid": True}, ("error", "error", "error")),
        ({"invalid": True, "done": True}, ("error", "error", "error")),
        ({"refused": True}, ("refused", "refused", "error")),
    ],
)
def test_native_calls_that_did_not_run_are_not_ok(flags: dict[str, Any], statuses: tuple[str, ...]) -> None:
    calls = (ToolCall(name="a", arguments={"x": 1}), ToolCall(name="b"))
    turn = Message(role="assistant", content="", tool_calls=calls, problems=("no JSON",))
    result = StepResult(message=Message(role="tool", content="rain"), **flags)
    found = records(open_episode(Fake(lambda number, text: result)).act("x", turn))
    expected = [("a", '{"x": 1}'), ("b", "{}"), ("", "no JSON")]
    assert found == [(*call, status) for call, status in zip(expected, statuses, strict=True)]


def test_a_replay_may_take_another_time_but_not_end_with_another_status() -> None:
    def episode(status: Any, seconds: float) -> Any:
        call = CallRecord(name="search", status=status, seconds=seconds)
        opened = open_episode(Fake(lambda number, text: replace(say("a"), tool_calls=(call,))))
        opened.start(0)
        return opened

    history = episode("ok", 1.0)
    history.act("x")
    for call in episode("ok", 2.0).replay(history, 0):
        call()
    with pytest.raises(EnvironmentFault, match="tool_calls"):
        for call in episode("timeout", 1.0).replay(history, 0):
            call()
