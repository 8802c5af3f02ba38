"""Requests that the policy cannot answer: the program gets status 400 with the reason and goes on."""

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.requests import CHAT, read_request  # noqa: E402
from outrider.environments.base import ExternalEpisode, StepResult, open_episode  # noqa: E402
from outrider.environments.conversations import ExternalAgent, Refusal  # noqa: E402
from outrider.errors import EnvironmentFault, InvalidResult, NonFiniteResult  # noqa: E402
from outrider.rollout.external_agent import Unanswerable, opening_ids  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Outcome  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    finished,
    leaves,
    play,
    play_one,
    task,
    turns_of,
)
from tests.rollout.fakes import Forking  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def plain_renderer(family: str = "qwen2.5", source: str = "", **settings: Any) -> ChatRenderer:
    tokenizer = byte_tokenizer(FAMILIES[family])
    tokenizer.chat_template = source or tokenizer.chat_template
    return ChatRenderer(tokenizer, template_kwargs=FAMILIES[family].variables, **settings)


@pytest.mark.parametrize("history", ["keep", "strip"])
def test_a_template_refuses_with_its_reason(history: Any) -> None:
    cases = {
        "system": (["user", "system", "user"], "System message must be at the beginning."),
        "developer": (["user", "developer"], "System message must be at the beginning."),
        "tool": (["user", "tool"], "no tools here"),
    }
    report = play(
        *(task("refused_then_asking", json.dumps(one), why, key=key) for key, (one, why) in cases.items()),
        renderer=plain_renderer(source=STRICT, history_thinking=history),
        script=lambda *_: "b",
    )
    for trace in report.traces:
        [(leaf, path)] = trace.rollouts()
        assert finished(leaf) and leaf.metrics["num_refused_requests"] == leaf.metrics["num_requests"] == 2
        assert len(turns_of(path)) == 2 and len(split_contexts(path)) == 1
    assert not report.faults


@pytest.mark.parametrize("turn", [0, 1])
def test_a_fork_is_refused_the_same(turn: int) -> None:
    hook = Forking(lambda state: state.rollout == 0 and state.turn == turn, first_wave=1, wave=1)
    roles = json.dumps(["user", "system", "user"])
    report = play(
        task("refused_then_asking", roles, "System message"),
        group=2,
        hooks=(hook,),
        renderer=plain_renderer(source=STRICT),
        script=lambda *_: "b",
        is_repeatable=True,
    )
    for leaf in report.traces[0].leaves.values():
        assert finished(leaf) and leaf.metrics["num_refused_requests"] == 2, report.fault_reasons
    assert len(report.traces[0].leaves) == 2


def test_a_program_without_an_answered_request_is_a_fault_with_the_reason() -> None:
    """Nothing was sampled, so no return would be right."""
    cases = {
        '{"guided_json": {}}': "guided_json: the policy's output is not constrained",
        '{"messages": [{"role": "function", "content": "a"}]}': "a message of the role 'function'",
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': (
            "a part of the type 'image_url': the policy reads text"
        ),
    }
    tasks = [task("always_malformed", fields, key=fields) for fields in cases]
    report = play(*tasks, task("always_refused", key="template"), renderer=plain_renderer(source=STRICT))
    found = leaves(report)
    assert {leaf.outcome for leaf in found.values()} == {Outcome.ENVIRONMENT_FAULT}
    assert "System message must be at the beginning." in found.pop("template").detail
    for fields, leaf in found.items():
        assert cases[fields] in leaf.detail and "2 of its requests were refused, the last" in leaf.detail


def test_a_conversation_that_is_too_long() -> None:
    """The policy's text may have filled the context, so a program that then fails is truncated, no fault."""
    endings = {"shortens": 1.0, "pays": 0.5, "fails": -1.0, "insists": -1.0}
    report = play(
        *(task("outgrowing", way, key=way) for way in endings),
        *(task("too_long_at_once", way, key=f"{way} at once") for way in ("shortens", "fails")),
        renderer=plain_renderer(source=STRICT),
        script=lambda *_: "b",
        context_length=1024,
        cut_return=-1.0,
        failed_return=-9.0,
    )
    assert not report.faults, report.fault_reasons
    for trace in report.traces:
        [(leaf, path)] = trace.rollouts()
        way, at_once, _ = trace.task.key.partition(" at once")
        outcome = Outcome.FINISHED if endings[way] > 0 else Outcome.TRUNCATED_TOKENS
        assert (leaf.outcome, leaf.episode_return) == (outcome, endings[way]), trace.task.key
        if at_once:
            assert len(turns_of(path)) == (way == "shortens")
        else:
            assert leaf.metrics["num_refused_requests"] >= 1
            assert len(split_contexts(path)) == (2 if way == "shortens" else 1)


def test_log_probs_contain_the_bytes_of_tokens() -> None:
    script = lambda *_: "caf\u00e9 \U0001f60a"  # noqa: E731
    assert finished(play_one(task("log_probs"), renderer=plain_renderer(), script=script))


class Program(ExternalAgent):
    """An environment with a pending request, whose ``refuse`` returns ``returned``."""

    call_format = None

    def __init__(self, *roles: str, returned: Any = None) -> None:
        messages = [{"role": role, "content": f"I am {role}."} for role in roles]
        self.request = read_request(CHAT, {"messages": messages}, takes_tools=False).conversation
        self.returned = returned

    def refuse(self, refusal: Any) -> Any:
        return self.returned


class EndedProgram(Program):
    def __init__(self) -> None:
        pass

    @property
    def request(self) -> Any:  # type: ignore[override]
        raise EnvironmentFault("the program has no pending request")


def test_the_kind_of_an_environment_does_not_depend_on_its_request() -> None:
    assert open_episode(EndedProgram()).is_external and open_episode(Program("user")).is_external


def test_the_result_of_refuse_is_checked_and_converted() -> None:
    refusal = Refusal(reason="too long", is_too_long=True)

    def refuse(returned: Any) -> Any:
        return ExternalEpisode(Program("user", returned=returned)).refuse(refusal)

    found = refuse(StepResult(reward=np.float32(0.5), done=np.bool_(True)))  # type: ignore[arg-type]
    assert found is not None and (type(found.reward), found.reward, found.done) == (float, 0.5, True)
    assert refuse(None) is None
    with pytest.raises(NonFiniteResult, match="reward"):
        refuse(StepResult(reward=math.nan))
    with pytest.raises(InvalidResult, match="what refuse returned"):
        refuse("end")


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_in_any_order_are_rendered_or_refused(family: str) -> None:
    """Neighbours of one role and system messages at the start are always rendered, joined if necessary."""
    renderer = plain_renderer(family, observations=("tool",))
    for first in product(("system", "developer", "user", "assistant", "tool"), repeat=2):
        try:
            assert opening_ids(Program(*first, "user").request, renderer)
        except Unanswerable as error:
            assert error.refusal.reason.startswith("the policy's chat template cannot render these messages")
    for roles in (["user", "user"], ["developer", "user"], ["user"]):
        assert opening_ids(Program(*roles).request, renderer)


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_templates_that_need_a_user_first_give_their_reason(family: str) -> None:
    with pytest.raises(Unanswerable, match=r"it refuses assistant, user: .*alternate"):
        opening_ids(Program("assistant", "user").request, plain_renderer(family))
