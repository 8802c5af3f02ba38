"""Imported chats played as demonstrations: their ids hold thinking and calls in the form of the family."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.environments.tool_qa.environment import ToolEnvironmentFactory, ToolsConfig
from outrider.memory.chat_files import import_trajectories
from outrider.rollout.episode import play_texts
from outrider.rollout.experts import join_demonstration, play_experts
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tokens.call_formats import CALL_FORMATS, convert_calls, get_call_format, read_turn
from outrider.tools.base import ToolOutput
from outrider.trace import Trace
from outrider.types import Json, Origin, Step, Task, ToolCall, ToolSchema
from tests.conversations import TOOLS
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"arguments": '{"key": "Oslo"}', "name": "lookup"}}
CHAT = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "reasoning_content": "Better ask.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "assistant", "content": "I ask again.", "tool_calls": [CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    {"role": "assistant", "content": "\\boxed{rain}"},
]


class Lookup:
    name, usage = "lookup", "u"
    schema: ToolSchema = TOOLS[0]

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text="rain")

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        return ToolOutput(text=f"rain in {arguments['key']}")

    def close(self) -> None: ...


@pytest.fixture
def steps(tmp_path: Path) -> Sequence[Step]:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"reward": 1.0, "messages": CHAT}) + "\n")
    return import_trajectories(path).trajectories[0].steps


def factory(form: str) -> ToolEnvironmentFactory:
    config = ToolsConfig.model_validate(
        {"tools": ["python"], "protocol": form, "reward": {"require_think": False}, "repeated": "answer"}
    )
    return ToolEnvironmentFactory(tools=[Lookup()], config=config, system_prompt="")


TASK = Task(key="t", question="Weather in Oslo?", answers=("rain",))


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_chat_is_replayed_in_every_call_format(form: str, steps: Sequence[Step]) -> None:
    played, record = play_texts(factory(form), TASK, [one.text for one in steps], seed=0, timeout_s=60)
    assert record.success
    assert [one.text for one in played.results] == ["rain in Oslo", "rain in Oslo", ""]


WITHOUT_TOOL_ROLE = ("gemma", "gemma2", "gemma3", "llama2", "mistral v1")


@pytest.mark.parametrize("name", [one for one in FAMILIES if one not in WITHOUT_TOOL_ROLE])
def test_the_ids_of_a_demonstration_contain_thinking_and_calls(name: str, steps: Sequence[Step]) -> None:
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family)
    renderer = ChatRenderer(tokenizer, call_format=family.call_format, observations=("tool",))
    [trace] = play_experts(
        tasks=[TASK],
        expert=lambda task: steps,
        factory=factory(family.call_format),
        tokenizer=tokenizer,
        renderer=renderer,
        limits=Limits(max_turns=8, max_turn_tokens=2000, max_response_tokens=8000),
        stop=(),
        run_seed=0,
        context_length=40_000,
    )
    [(leaf, path)] = trace.rollouts()
    assert leaf.success, [(node.origin, node.message) for node in path]
    policy = [node for node in path if node.origin is Origin.POLICY]
    ids = [node.token_ids for node in policy]
    before = [trace.token_ids(node.parent or 0) for node in policy]
    read = [renderer.parse(one, context=at, tools=TOOLS) for one, at in zip(ids, before, strict=True)]
    assert [[(c.name, c.arguments) for c in one.tool_calls] for one in read] == [
        [("lookup", {"key": "Oslo"})],
        [("lookup", {"key": "Oslo"})],
        [],
    ]
    assert [one.content.strip() for one in read] == ["", "I ask again.", "\\boxed{rain}"]
    assert read[0].reasoning == "Better ask." and not any(one.problems for one in read)
    group = Trace(task=TASK, modes=())
    join_demonstration(group, trace)
    shown = [node.token_ids for node in group.nodes if node.origin is Origin.DEMONSTRATION]
    assert shown == ids


WRITTEN: list[tuple[str, str, str]] = [
    ("llama3_json", "{call}", '{"name": "lookup", "parameters": {"key": "a"}}'),
    ("llama3_json", "Words.\n{call}", 'Words.\n{"name": "lookup", "parameters": {"key": "a"}}'),
    ("pythonic", "<think>\nHm.\n</think>\n\n{call}", "<think>\nHm.\n</think>\n\n[lookup(key='a')]"),
    ("pythonic", "Words.\n{call}", "Words.\n<|tool_call_start|>[lookup(key='a')]<|tool_call_end|>"),
    ("hermes", "Words.\n{call}", "Words.\n{call}"),
    ("qwen3_coder", "<function=lookup><parameter=key>a</parameter></function>", "same"),
    ("llama3_json", "No call.", "same"),
    ("llama3_json", "<tool_call>{broken</tool_call>", "same"),
    ("llama3_json", "<think>I could write {call}.</think>No.", "same"),
    ("pythonic", "[lookup(key='<tool_call>')]", "same"),
    ("llama3_json", '{"name": "lookup", "parameters": {"key": "<tool_call>"}}', "same"),
]
HERMES = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.mark.parametrize(("form", "text", "written"), WRITTEN)
def test_recorded_calls_are_converted_to_the_call_format(form: str, text: str, written: str) -> None:
    text = text.replace("{call}", HERMES)
    wanted = text if written == "same" else written.replace("{call}", HERMES)
    found = convert_calls(text, get_call_format(form), TOOLS)
    assert found == wanted
    assert convert_calls(found, get_call_format(form), TOOLS) == found


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("arguments", [{}, {"a": 1, "b": -2}, {"a": 1, "b": 2}])
def test_several_calls_are_converted_with_their_arguments(form: str, arguments: dict[str, Any]) -> None:
    calls = [
        ToolCall(name="add", arguments=arguments),
        ToolCall(name="lookup", arguments={"key": 'a "b"\nc'}),
    ]
    text = convert_calls(CALL_FORMATS["hermes"].write(calls), CALL_FORMATS[form], TOOLS)
    found = CALL_FORMATS[form].read(text, TOOLS)
    assert [(one.name, one.arguments) for one in found.calls] == [(c.name, c.arguments) for c in calls]
    turn = read_turn(text, CALL_FORMATS[form], TOOLS)
    assert [one.name for one in turn.tool_calls] == (["add", "lookup"] if arguments else ["lookup"])
