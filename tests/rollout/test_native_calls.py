"""Native tool calls in the rollout loop: token ids, thinking, truncated answers and imported chats."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.engines.base import Request
from outrider.engines.chat import ChatEndpoint, ChatReply, EndpointSettings
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeFactory, StepResult
from outrider.environments.tool_qa.environment import EpisodeConfig, ToolsConfig
from outrider.errors import ConfigError, ModelError
from outrider.memory.chat_files import import_trajectories
from outrider.rollout.endpoint import Collector
from outrider.rollout.episode import Sampling, play_texts
from outrider.rollout.experts import join_demonstration, play_experts
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Splice
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tokens.call_formats import CALL_FORMATS, convert_calls, get_call_format, read_turn
from outrider.tools.base import Tool, ToolOutput
from outrider.trace import Node, Trace
from outrider.types import Json, Message, Origin, Outcome, Step, Task, ToolCall, ToolSchema
from tests.conversations import TOOLS
from tests.tokens.family_templates import FAMILIES, byte_tokenizer
from tests.tool_episodes import tool_factory

TASK = Task(key="t", question="Where is the tower?", answers=("Paris",))
FORMS = ("hermes", "qwen3_coder", "llama3_json", "pythonic")


class Search:
    name = "search"

    def __init__(self, length: int = 1) -> None:
        self._length = length

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text=f"{text}: Paris" * self._length)

    def close(self) -> None: ...


class Lookup:
    """A tool with a schema."""

    name, usage = "lookup", "u"
    schema: ToolSchema = TOOLS[0]

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text="rain")

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        return ToolOutput(text=f"rain in {arguments['key']}")

    def close(self) -> None: ...


def call(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'input': text}})}\n</tool_call>"


def make_factory(form: str | None, tool: Tool | None = None, **options: Any) -> EpisodeFactory:
    """An environment with native calls in the format ``form``, or None: with tags."""
    config = (
        EpisodeConfig(**options)
        if form is None
        else ToolsConfig.model_validate({"tools": ["python"], "protocol": form, **options})
    )
    return tool_factory(tools=[tool or Search()], config=config, system_prompt="Rules.")


def make_renderer(name: str, form: str | None) -> ChatRenderer:
    family = FAMILIES[name]
    return ChatRenderer(
        byte_tokenizer(family),
        template_kwargs=family.variables,
        call_format=form,
        observations=("inline",) if form is None else ("tool",),
    )


def play(
    name: str,
    turns: Sequence[str],
    *,
    form: str | None = "hermes",
    tool: Tool | None = None,
    limits: Limits | None = None,
    hooks: Sequence[Hook] = (),
    **options: Any,
) -> tuple[Trace, ChatRenderer, EpisodeFactory]:
    """One rollout of scripted turns with the chat template of the model family ``name``."""
    renderer, factory = make_renderer(name, form), make_factory(form, tool, **options)

    def script(request: Request, text: str) -> str:
        return turns[int(request.request_id.rsplit("/", 1)[1])]

    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=script, context_length=20_000),
        renderer=renderer,
        factory=factory,
        limits=limits or Limits(step_timeout_s=60, max_turn_tokens=1000, max_response_tokens=4000),
        sampling=Sampling(stop=("</search>", "</answer>") if form is None else ()),
        run_seed=0,
        hooks=hooks,
    )
    [trace] = scheduler.run([TASK], modes=("m",), training_step=0).traces
    return trace, renderer, factory


def leaf_text(trace: Trace, renderer: ChatRenderer) -> str:
    [(leaf, _)] = trace.rollouts()
    assert leaf.node_id is not None
    return str(renderer.tokenizer.decode(
        trace.token_ids(leaf.node_id), skip_special_tokens=False, clean_up_tokenization_spaces=False
    ))  # fmt: skip


def test_an_episode_of_native_calls_equals_the_rendered_conversation() -> None:
    turns = [f"<think>\na\n</think>\n\n{call('x')}\n{call('y')}", "<think>\nb\n</think>\n\n\\boxed{Paris}"]
    trace, renderer, factory = play("qwen3", turns)
    [(leaf, path)] = trace.rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0)
    assert [node.origin for node in path] == [
        Origin.PROMPT, Origin.POLICY, Origin.ENVIRONMENT, Origin.POLICY,
    ]  # fmt: skip
    assert path[2].message == Message(role="tool", content="x: Paris\ny: Paris")
    text = leaf_text(trace, renderer)
    assert '"name": "search"' in text.partition("<tools>")[2]
    assert (
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nx: Paris\n</tool_response>\n"
        "<tool_response>\ny: Paris\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>" in text
    )
    texts = [node.message.content for node in path if node.trainable]
    replay, record = play_texts(factory, TASK, texts, seed=0, timeout_s=60)
    assert record.episode_return == 1.0 and replay.results[0].text == path[2].message.content


@pytest.mark.parametrize("name", ["qwen3, always thinking", "deepseek-r1"])
@pytest.mark.parametrize("form", ["hermes", None])
def test_thinking_opened_by_the_template_is_part_of_the_text_and_not_trained(
    name: str, form: str | None
) -> None:
    turns = ["It is 2+2.</think>\\boxed{Paris}" if form else "2+2</think><answer>\\boxed{Paris}</answer>"]
    trace, renderer, _ = play(name, turns, form=form)
    [(leaf, path)] = trace.rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0)
    assert path[1].message.content.startswith("<think>\n")
    decoded = str(renderer.tokenizer.decode(path[1].token_ids, skip_special_tokens=True))
    assert decoded.startswith(turns[0][:4])
    prompt = str(renderer.tokenizer.decode(path[0].token_ids, skip_special_tokens=False))
    assert prompt.endswith("<think>\n")


def test_thinking_is_opened_once_in_the_inline_protocol() -> None:
    turns = ["a</think><search>x</search>", "<think>b</think><answer>\\boxed{Paris}</answer>"]
    [(leaf, path)] = play("qwen3, always thinking", turns, form=None)[0].rollouts()
    assert leaf.episode_return == 1.0
    assert [n.message.content[:8] for n in path if n.trainable] == ["<think>\n", "<think>b"]


def test_several_long_results_are_truncated_one_by_one() -> None:
    limits = Limits(step_timeout_s=60, max_turn_tokens=1000, max_response_tokens=4000,
                    max_observation_tokens=300)  # fmt: skip
    turns = [call("x") + call("y"), "\\boxed{Paris}"]
    trace, renderer, _ = play("qwen2.5", turns, tool=Search(40), limits=limits)
    [(_, path)] = trace.rollouts()
    assert len(path[2].token_ids) <= 300 and path[2].metadata["num_tokens_cut"] > 0
    text = str(renderer.tokenizer.decode(path[2].token_ids, skip_special_tokens=False))
    assert text.count("<tool_response>") == text.count("</tool_response>") == text.count("[...]") == 2
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


class Retrieves(Hook):
    """Executes ``text`` before the second turn."""

    def __init__(self, text: str) -> None:
        self.text, self.num_executed = text, 0

    def before_turn(self, state: EpisodeState) -> Sequence[Attempt]:
        def then(result: StepResult) -> Splice:
            self.num_executed += 1
            return Splice(origin=Origin.BUFFER, text="<retrieve>", step=Step(text=self.text, observation=""))

        return [Attempt(action=self.text, then=then, as_turn=True)] if state.turn == 1 else []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_retrieved_turn_has_the_tokens_of_the_policys_own(name: str) -> None:
    """Also with several results."""
    turns = [f"One.\n{call('x')}", text := f"Both.\n{call('y')}\n{call('z')}", "\\boxed{Paris}"]
    try:
        plain, renderer, _ = play(name, turns)
    except (ModelError, ConfigError) as error:
        pytest.skip(f"no native calls: {error}")
    if renderer.opened(plain.nodes[0].token_ids):
        pytest.skip("a demonstration closes the thinking that the template has opened")
    if renderer.closing.next_roles:
        pytest.skip("the scripted policy ends its turns as if the user followed")

    hybrid, _, _ = play(name, [turns[0], turns[2]], hooks=[Retrieves(text)])
    [(_, own)], [(_, path)] = plain.rollouts(), hybrid.rollouts()
    assert [node.origin for node in path][3:5] == [Origin.BUFFER, Origin.ENVIRONMENT]
    assert [(node.token_ids, node.message) for node in path] == [
        (node.token_ids, node.message) for node in own
    ]


@pytest.mark.parametrize("limit", ["max_splice_tokens", "max_response_tokens"])
def test_a_retrieved_turn_that_is_too_long_is_not_executed(limit: str) -> None:
    turns, text = [f"One.\n{call('x')}", "\\boxed{Paris}"], f"Two.\n{call('a long query ' * 9)}"

    def numbers(**given: int) -> tuple[int, list[Node]]:
        hook = Retrieves(text)
        limits = Limits(step_timeout_s=60, max_turn_tokens=1000, **{"max_response_tokens": 4000, **given})
        [(_, path)] = play("qwen2.5", turns, hooks=[hook], limits=limits)[0].rollouts()
        return hook.num_executed, path

    _, path = numbers()
    [position] = [place for place, node in enumerate(path) if node.origin is Origin.BUFFER]
    size = len(path[position].token_ids)
    if limit == "max_response_tokens":  # one token is left for the policy
        size = sum(len(node.token_ids) for node in path[1 : position + 1]) + 1
    assert numbers(**{limit: size})[0] == 1
    num_executed, path = numbers(**{limit: size - 1})
    assert num_executed == 0 and all(node.origin is not Origin.BUFFER for node in path)
    assert [node.metadata["num_splices_dropped"] for node in path if node.trainable] == [0, 1]


def test_where_observations_are_inline_a_retrieved_turn_is_its_text() -> None:
    """Its length is no reason to leave it out, because it is no turn."""
    hook = Retrieves("<search>" + "long " * 90 + "</search>")
    turns = ["<search>x</search>", "<answer>\\boxed{Paris}</answer>"]
    limits = Limits(step_timeout_s=60, max_turn_tokens=1000, max_response_tokens=4000, max_splice_tokens=99)
    [(_, path)] = play("qwen2.5", turns, form=None, hooks=[hook], limits=limits)[0].rollouts()
    [shown] = [node for node in path if node.origin is Origin.BUFFER]
    assert hook.num_executed == 1 and shown.message.content == "<retrieve>"


def test_an_unreadable_call_is_answered_with_an_explanation() -> None:
    trace, _, _ = play("hermes", ["<tool_call>{</tool_call>", "<think>a</think>\\boxed{Paris}"])
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED and "does not hold JSON" in path[2].message.content
    assert path[1].metadata["invalid"] and leaf.episode_return == -1.0


@pytest.mark.parametrize("valid_call", ["", call("x")])
def test_an_unreadable_call_in_a_format_with_call_ids(valid_call: str) -> None:
    trace, renderer, _ = play("mistral", [f"{valid_call}<tool_call>{{</tool_call>", "\\boxed{Paris}"])
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED and "does not hold JSON" in leaf_text(trace, renderer)
    assert path[2].message.content.startswith("x: Paris") == bool(valid_call)


# Answers over the token limit are truncated, and not wrong.

LONG = "The tower is in the capital of a country by the sea, and its name is Paris."
SHORT_TURNS = Limits(max_turn_tokens=40)
FREE = {"reward": {"require_think": False, "require_boxed": False}}


def played_outcome(name: str, form: str | None, turns: Sequence[str], limits: Limits) -> Outcome:
    [leaf] = play(name, turns, form=form, limits=limits, **(FREE if form else {}))[0].leaves.values()
    return leaf.outcome


@pytest.mark.parametrize("limits", [SHORT_TURNS, Limits(max_turn_tokens=400, max_response_tokens=40)])
@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_truncated_answer_of_the_policy(form: str | None, limits: Limits) -> None:
    text = LONG if form else f"<answer>\\boxed{{{LONG}}}</answer>"
    assert played_outcome("qwen2.5", form, [text], limits) is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize("name", ["glm4", "mistral v3", "smollm2", "command-r", "qwen3, no thinking"])
def test_a_truncated_answer_in_other_model_families(name: str) -> None:
    assert played_outcome(name, "hermes", [LONG], SHORT_TURNS) is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize("form", FORMS)
def test_a_complete_answer_is_finished(form: str) -> None:
    assert played_outcome("qwen2.5", form, ["Paris"], SHORT_TURNS) is Outcome.FINISHED


def test_answers_after_a_tool_call() -> None:
    limits = Limits(max_turn_tokens=75)
    assert played_outcome("qwen2.5", "hermes", [call("k"), LONG + LONG], limits) is Outcome.TRUNCATED_TOKENS
    assert played_outcome("qwen2.5", "hermes", [call("k"), "Paris"], limits) is Outcome.FINISHED


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_answer_of_an_expert(form: str) -> None:
    renderer = make_renderer("qwen2.5", form)
    [trace] = play_experts(
        tasks=[TASK], expert=lambda task: [Step(text=LONG, observation="", is_terminal=True)],
        factory=make_factory(form, **FREE), tokenizer=renderer.tokenizer, renderer=renderer,
        limits=SHORT_TURNS, stop=(), run_seed=0, context_length=9000,
    )  # fmt: skip
    [leaf] = trace.leaves.values()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize(("finish", "outcome"), [("length", "truncated_tokens"), ("stop", "finished")])
def test_a_truncated_answer_of_an_endpoint(finish: str, outcome: str) -> None:
    class Fixed(ChatEndpoint):
        def complete(self, messages: Sequence[Message], **options: object) -> ChatReply:
            return ChatReply(text="Paris", finish=finish, num_tokens=40)

    collector = Collector(
        endpoint=Fixed(EndpointSettings(base_url="http://127.0.0.1:9/v1")),
        factory=make_factory("hermes", **FREE), limits=SHORT_TURNS, stop=(), run_seed=0, num_concurrent=1,
    )  # fmt: skip
    [collected] = collector.collect([TASK], num_rollouts=1).collected
    assert collected.outcome.value == outcome


def test_a_replay_reports_whether_the_last_turn_is_an_answer() -> None:
    for turns, is_answer in (([LONG], True), ([call("k")], False)):
        episode, _ = play_texts(make_factory("hermes", **FREE), TASK, turns, seed=0, timeout_s=60)
        assert episode.ends_with_answer is is_answer


# Imported chats as demonstrations.

OSLO = Task(key="t", question="Weather in Oslo?", answers=("rain",))
OSLO_CALL = {"id": "c1", "type": "function", "function": {"arguments": '{"key": "Oslo"}', "name": "lookup"}}
CHAT = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "reasoning_content": "Better ask.", "tool_calls": [OSLO_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "assistant", "content": "I ask again.", "tool_calls": [OSLO_CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    {"role": "assistant", "content": "\\boxed{rain}"},
]
REPEATS = {"reward": {"require_think": False}, "repeated": "answer"}


@pytest.fixture
def steps(tmp_path: Path) -> Sequence[Step]:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"reward": 1.0, "messages": CHAT}) + "\n")
    return import_trajectories(path).trajectories[0].steps


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_a_chat_is_replayed_in_every_call_format(form: str, steps: Sequence[Step]) -> None:
    factory = make_factory(form, Lookup(), **REPEATS)
    episode, record = play_texts(factory, OSLO, [step.text for step in steps], seed=0, timeout_s=60)
    assert record.success
    assert [result.text for result in episode.results] == ["rain in Oslo", "rain in Oslo", ""]


WITHOUT_TOOL_ROLE = ("gemma", "gemma2", "gemma3", "llama2", "mistral v1")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_TOOL_ROLE])
def test_the_ids_of_a_demonstration_contain_thinking_and_calls(name: str, steps: Sequence[Step]) -> None:
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family)
    renderer = ChatRenderer(tokenizer, call_format=family.call_format, observations=("tool",))
    [trace] = play_experts(
        tasks=[OSLO], expert=lambda task: steps,
        factory=make_factory(family.call_format, Lookup(), **REPEATS), tokenizer=tokenizer, renderer=renderer,
        limits=Limits(max_turns=8, max_turn_tokens=2000, max_response_tokens=8000), stop=(), run_seed=0,
        context_length=40_000,
    )  # fmt: skip
    [(leaf, path)] = trace.rollouts()
    assert leaf.success, [(node.origin, node.message) for node in path]
    policy = [node for node in path if node.origin is Origin.POLICY]
    ids = [node.token_ids for node in policy]
    contexts = [trace.token_ids(node.parent or 0) for node in policy]
    turns = [
        renderer.parse(own, context=context, tools=TOOLS) for own, context in zip(ids, contexts, strict=True)
    ]
    calls = [[(call.name, call.arguments) for call in turn.tool_calls] for turn in turns]
    assert calls == [[("lookup", {"key": "Oslo"})], [("lookup", {"key": "Oslo"})], []]
    assert [turn.content.strip() for turn in turns] == ["", "I ask again.", "\\boxed{rain}"]
    assert turns[0].reasoning == "Better ask." and not any(turn.problems for turn in turns)
    group = Trace(task=OSLO, modes=())
    join_demonstration(group, trace)
    assert [node.token_ids for node in group.nodes if node.origin is Origin.DEMONSTRATION] == ids


HERMES = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
CONVERSIONS: list[tuple[str, str, str]] = [
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


@pytest.mark.parametrize(("form", "text", "expected"), CONVERSIONS)
def test_recorded_calls_are_converted_to_the_call_format(form: str, text: str, expected: str) -> None:
    text = text.replace("{call}", HERMES)
    expected = text if expected == "same" else expected.replace("{call}", HERMES)
    converted = convert_calls(text, get_call_format(form), TOOLS)
    assert converted == expected
    assert convert_calls(converted, get_call_format(form), TOOLS) == converted


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("arguments", [{}, {"a": 1, "b": -2}, {"a": 1, "b": 2}])
def test_several_calls_are_converted_with_their_arguments(form: str, arguments: dict[str, Any]) -> None:
    calls = [
        ToolCall(name="add", arguments=arguments),
        ToolCall(name="lookup", arguments={"key": 'a "b"\nc'}),
    ]
    text = convert_calls(CALL_FORMATS["hermes"].write(calls), CALL_FORMATS[form], TOOLS)
    parsed = CALL_FORMATS[form].read(text, TOOLS)
    assert [(one.name, one.arguments) for one in parsed.calls] == [(c.name, c.arguments) for c in calls]
    turn = read_turn(text, CALL_FORMATS[form], TOOLS)
    assert [one.name for one in turn.tool_calls] == (["add", "lookup"] if arguments else ["lookup"])
