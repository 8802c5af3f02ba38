"""Which tokens of an observation are its text: recorded for an update that trains on them."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from outrider.environments.base import StepResult
from outrider.errors import ModelError
from outrider.rollout.episode import body_spans
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import BODY, Node, Trace
from outrider.types import Message, Origin, Role
from tests.rollout.fakes import TOKENIZER, Factory, Fake, say, scheduler, scripted, tasks
from tests.rollout.test_tips import Tips
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

TEXTS = ("0 doors; the key is\nin the box x", "rain")


@pytest.mark.parametrize("role", ["user", "tool", "inline"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_body_is_the_text_without_the_template(family: str, role: Role) -> None:
    with suppress(ModelError):  # of a template that has no such message
        renderer = ChatRenderer(byte_tokenizer(FAMILIES[family]), observations=(role,))
        context = renderer.prompt(
            [Message(role="user", content="Where?"), Message(role="inline", content="I")]
        )
        messages = [
            Message(role=role, content=text, tool_call_id=f"call0000{i}", tool_name="f")
            for i, text in enumerate(TEXTS[: 1 + (role == "tool")])
        ]
        ids = renderer.bridge(context, messages)
        spans = body_spans(ids, context, messages, renderer=renderer)
        found = [renderer.template.continuation.decode(ids[start:end]).strip() for start, end in spans]
        texts = [message.content for message in messages]
        if texts[0].split("\n")[0] not in renderer.template.continuation.decode(ids):
            texts = []  # templates that leave out what a tool returns
        assert found in (texts, [json.dumps(text)[1:-1] for text in texts])


def play(role: Role, *, text: str = "A key", marks: bool = True, tip: str = "", size: int = 1024) -> Trace:
    def step(number: int, written: str) -> StepResult:
        return say(text, role) if number < 2 else StepResult(message=None, done=True, reward=1.0)

    runs = scheduler(
        scripted(lambda request, context: "act."),
        Factory(lambda task, number: Fake(on_step=step)),
        limits=Limits(step_timeout_s=60, max_observation_tokens=size),
        hooks=[Tips(tip, None)] if tip else (),
    )
    runs = replace(runs, marks_observations=marks)
    return runs.run(tasks(1), modes=("tips_on",), training_step=0).traces[0]


def bodies(trace: Trace) -> list[str]:
    return [
        str(TOKENIZER.decode([node.token_ids[at] for at in sorted(node.body_positions)]))
        for node in trace.nodes
        if node.origin is Origin.ENVIRONMENT and node.message.content
    ]


@pytest.mark.parametrize("role", ["user", "inline"])
@pytest.mark.parametrize("tip", ["", " a tip"])
def test_rollouts_of_training_record_it_on_request(role: Role, tip: str) -> None:
    """Also on a node whose last tokens moved behind a tip."""
    trace = play(role, tip=tip)
    assert bodies(trace) == ["A key"] * 2

    def without_marks(node: Node) -> Node:
        return replace(node, metadata={name: value for name, value in node.metadata.items() if name != BODY})

    plain = play(role, tip=tip, marks=False)
    assert not any(BODY in node.metadata for node in plain.nodes)
    assert [without_marks(node) for node in trace.nodes] == plain.nodes


def test_a_truncated_observation_has_a_body_too() -> None:
    first, second = bodies(play("user", text="A" * 50 + "B" * 50, size=60))
    assert first == second and first.startswith("AAA") and first.endswith("B") and "[...]" in first
