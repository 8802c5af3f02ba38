"""Native answers that the token limit cuts are truncated, whoever writes them: the policy, an expert, an
agent behind an endpoint, in every form of calls.
"""

import json
from collections.abc import Sequence

import pytest

from outrider.engines.chat import ChatEndpoint, ChatReply, EndpointSettings
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.tool_qa.environment import EpisodeConfig, ToolEnvironmentFactory, ToolsConfig
from outrider.rollout.endpoint import Collector
from outrider.rollout.episode import Sampling, play_texts
from outrider.rollout.experts import play_experts
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import ToolOutput
from outrider.types import Message, Outcome, Step, Task
from tests.tokens.family_templates import FAMILIES, tokenizer_of

TASK = Task(key="t", question="Capital of Norway?", answers=("Oslo",))
LONG = "The capital of Norway is a city by a fjord, and its name is Oslo."
CALL = '<tool_call>\n{"name": "look", "arguments": {"input": "k"}}\n</tool_call>'
FORMS = ("hermes", "qwen3_coder", "llama3_json", "pythonic")
CUT = (Limits(max_turn_tokens=40), Limits(max_turn_tokens=400, max_response_tokens=40))


class Look:
    name = "look"

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text="found")

    def close(self) -> None:
        """Nothing is held."""


def factory_of(form: str | None, *, max_calls: int = 3) -> ToolEnvironmentFactory:
    config = (
        EpisodeConfig(max_calls=max_calls)
        if form is None
        else ToolsConfig(
            tools=("python",), protocol=form, max_calls=max_calls,
            reward={"require_think": False, "require_boxed": False},
        )
    )  # fmt: skip
    return ToolEnvironmentFactory(tools=[Look()], config=config, system_prompt="Rules.")


def renderer_of(name: str, form: str | None) -> ChatRenderer:
    family = FAMILIES[name]
    return ChatRenderer(
        tokenizer_of(family),
        template_kwargs=family.variables,
        call_format=form,
        observations=("inline",) if form is None else ("tool",),
    )


def played(name: str, form: str | None, turns: Sequence[str], limits: Limits) -> Outcome:
    renderer = renderer_of(name, form)
    scheduler = Scheduler(
        engine=ScriptedEngine(
            tokenizer=renderer.tokenizer,
            script=lambda request, text: turns[int(request.request_id.rsplit("/", 1)[1])],
            context_length=9000,
        ),
        renderer=renderer,
        factory=factory_of(form),
        limits=limits,
        sampling=Sampling(stop=("</look>", "</answer>") if form is None else ()),
        run_seed=0,
    )
    [leaf] = scheduler.run([TASK], modes=("m",), training_step=0).traces[0].leaves.values()
    return leaf.outcome


@pytest.mark.parametrize("limits", CUT)
@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_truncated_answer_of_the_policy(form: str | None, limits: Limits) -> None:
    said = LONG if form else f"<answer>\\boxed{{{LONG}}}</answer>"
    assert played("qwen2.5", form, [said], limits) is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize("name", ["glm4", "mistral v3", "smollm2", "command-r", "qwen3, no thinking"])
def test_a_truncated_answer_in_other_model_families(name: str) -> None:
    assert played(name, "hermes", [LONG], CUT[0]) is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize("form", FORMS)
def test_complete_and_truncated_answers_after_a_tool_call(form: str) -> None:
    assert played("qwen2.5", form, ["Oslo"], CUT[0]) is Outcome.FINISHED
    room = Limits(max_turn_tokens=64)
    assert played("qwen2.5", "hermes", [CALL, LONG + LONG], room) is Outcome.TRUNCATED_TOKENS
    assert played("qwen2.5", "hermes", [CALL, "Oslo"], room) is Outcome.FINISHED


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_answer_of_an_expert(form: str) -> None:
    renderer = renderer_of("qwen2.5", form)
    [trace] = play_experts(
        tasks=[TASK], expert=lambda task: [Step(text=LONG, observation="", is_terminal=True)],
        factory=factory_of(form), tokenizer=renderer.tokenizer, renderer=renderer, limits=CUT[0], stop=(),
        run_seed=0, context_length=9000,
    )  # fmt: skip
    [leaf] = trace.leaves.values()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS


@pytest.mark.parametrize(("finish", "outcome"), [("length", "truncated_tokens"), ("stop", "finished")])
def test_a_truncated_answer_of_an_endpoint(finish: str, outcome: str) -> None:
    class Saying(ChatEndpoint):
        def complete(self, messages: Sequence[Message], **options: object) -> ChatReply:
            return ChatReply(text="Oslo", finish=finish, num_tokens=40)

    collector = Collector(
        endpoint=Saying(EndpointSettings(base_url="http://127.0.0.1:9/v1")), factory=factory_of("hermes"),
        limits=CUT[0], stop=(), run_seed=0, num_concurrent=1,
    )  # fmt: skip
    [one] = collector.collect([TASK], num_rollouts=1).collected
    assert one.outcome.value == outcome


def test_a_replay_reports_whether_the_last_turn_is_an_answer() -> None:
    for turns, answers in (([LONG], True), ([CALL], False)):
        episode, _ = play_texts(factory_of("hermes"), TASK, turns, seed=0, timeout_s=60)
        assert episode.ends_with_answer is answers, json.dumps(turns)
