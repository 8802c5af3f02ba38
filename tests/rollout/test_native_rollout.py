"""Native calls and templates that open thinking, in the rollout loop: which ids stand where, and what the
environment is given.
"""

import json

import pytest

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.tool_qa.environment import EpisodeConfig, ToolEnvironmentFactory, ToolsConfig
from outrider.rollout.episode import Sampling, play_texts
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import Tool, ToolOutput
from outrider.trace import Trace
from outrider.types import Message, Origin, Outcome, Task
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

TASK = Task(key="t", question="Where is the tower?", answers=("Paris",))


class Search:
    name = "search"

    def __init__(self, length: int = 1) -> None:
        self._length = length

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text=f"{text}: Paris" * self._length)

    def close(self) -> None:
        """Nothing is held."""


def call(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'input': text}})}\n</tool_call>"


def play(
    name: str,
    turns: list[str],
    *,
    native: bool = True,
    tool: Tool | None = None,
    limits: Limits | None = None,
) -> tuple[Trace, ChatRenderer, ToolEnvironmentFactory]:
    family = FAMILIES[name]
    renderer = ChatRenderer(
        byte_tokenizer(family),
        template_kwargs=family.variables,
        call_format="hermes" if native else None,
        observations=("tool",) if native else ("inline",),
    )
    config = ToolsConfig(tools=("python",), protocol="hermes") if native else EpisodeConfig()
    factory = ToolEnvironmentFactory(tools=[tool or Search()], config=config, system_prompt="Rules.")

    def script(request: Request, text: str) -> str:
        return turns[int(request.request_id.rsplit("/", 1)[1])]

    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=script, context_length=20_000),
        renderer=renderer,
        factory=factory,
        limits=limits or Limits(step_timeout_s=60, max_turn_tokens=1000, max_response_tokens=4000),
        sampling=Sampling(stop=() if native else ("</search>", "</answer>")),
        run_seed=0,
    )
    [trace] = scheduler.run([TASK], modes=("m",), training_step=0).traces
    return trace, renderer, factory


def text_of(trace: Trace, renderer: ChatRenderer) -> str:
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
    shown = text_of(trace, renderer)
    assert '"name": "search"' in shown.partition("<tools>")[2]
    assert (
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nx: Paris\n</tool_response>\n"
        "<tool_response>\ny: Paris\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>" in shown
    )
    texts = [node.message.content for node in path if node.trainable]
    again, record = play_texts(factory, TASK, texts, seed=0, timeout_s=60)
    assert record.episode_return == 1.0 and again.results[0].text == path[2].message.content


@pytest.mark.parametrize("name", ["qwen3, always thinking", "deepseek-r1"])
@pytest.mark.parametrize("native", [True, False])
def test_thinking_opened_by_the_template_is_part_of_the_text_and_not_trained(name: str, native: bool) -> None:
    turns = ["It is 2+2.</think>\\boxed{Paris}" if native else "2+2</think><answer>\\boxed{Paris}</answer>"]
    trace, renderer, _ = play(name, turns, native=native)
    [(leaf, path)] = trace.rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0)
    assert path[1].message.content.startswith("<think>\n")
    decoded = str(renderer.tokenizer.decode(path[1].token_ids, skip_special_tokens=True))
    assert decoded.startswith(turns[0][:4])
    prompt = str(renderer.tokenizer.decode(path[0].token_ids, skip_special_tokens=False))
    assert prompt.endswith("<think>\n")


def test_thinking_is_opened_once_in_the_inline_protocol() -> None:
    turns = ["a</think><search>x</search>", "<think>b</think><answer>\\boxed{Paris}</answer>"]
    trace, _, _ = play("qwen3, always thinking", turns, native=False)
    [(leaf, path)] = trace.rollouts()
    assert leaf.episode_return == 1.0
    assert [n.message.content[:8] for n in path if n.trainable] == ["<think>\n", "<think>b"]


def test_several_long_results_are_truncated_one_by_one() -> None:
    limits = Limits(step_timeout_s=60, max_turn_tokens=1000, max_response_tokens=4000,
                    max_observation_tokens=300)  # fmt: skip
    turns = [call("x") + call("y"), "\\boxed{Paris}"]
    trace, renderer, _ = play("qwen2.5", turns, tool=Search(40), limits=limits)
    [(_, path)] = trace.rollouts()
    assert len(path[2].token_ids) <= 300 and path[2].metadata["num_tokens_cut"] > 0
    shown = str(renderer.tokenizer.decode(path[2].token_ids, skip_special_tokens=False))
    assert shown.count("<tool_response>") == shown.count("</tool_response>") == shown.count("[...]") == 2
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_an_unreadable_call_is_answered_with_an_explanation() -> None:
    turns = ["<tool_call>{</tool_call>", "<think>a</think>\\boxed{Paris}"]
    trace, _, _ = play("hermes", turns)
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED and "does not hold JSON" in path[2].message.content
    assert path[1].metadata["invalid"] and leaf.episode_return == -1.0


@pytest.mark.parametrize("beside", ["", call("x")])
def test_an_unreadable_call_in_a_format_with_call_ids(beside: str) -> None:
    trace, renderer, _ = play("mistral", [f"{beside}<tool_call>{{</tool_call>", "\\boxed{Paris}"])
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED and "does not hold JSON" in text_of(trace, renderer)
    assert path[2].message.content.startswith("x: Paris") == bool(beside)
