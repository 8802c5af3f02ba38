"""What the policy cannot be asked: status 400 in words, the program goes on, and no rollout is a fault."""

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.engines.scripted import ScriptedEngine  # noqa: E402
from outrider.environments.agent.requests import read_chat  # noqa: E402
from outrider.environments.base import ExternalEpisode, StepResult, open_episode
from outrider.environments.conversations import ExternalAgent, Refusal  # noqa: E402
from outrider.errors import EnvironmentFault, InvalidResult, NonFiniteResult  # noqa: E402
from outrider.rollout.external_agent import Unanswerable, opening_ids  # noqa: E402
from outrider.rollout.scheduler import RolloutReport  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.chat_server import Answer, completion  # noqa: E402
from tests.environments.agents.named import NAMED, with_program  # noqa: E402
from tests.environments.test_agent import scheduled  # noqa: E402
from tests.environments.test_agent_endpoint import play as play_behind_endpoint  # noqa: E402
from tests.rollout.fakes import Forking  # noqa: E402
from tests.tokens.family_templates import FAMILIES, Family, byte_tokenizer  # noqa: E402

ERRING = "tests.environments.agents.erring"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def renderer_of(family: Family, source: str = "", **settings: Any) -> ChatRenderer:
    tokenizer = byte_tokenizer(family)
    tokenizer.chat_template = source or tokenizer.chat_template
    return ChatRenderer(tokenizer, template_kwargs=family.variables, **settings)


def play(program: str, *answers: str, renderer: ChatRenderer | None = None, **settings: Any) -> RolloutReport:
    limits = Limits(max_turns=20, max_turn_tokens=64, max_response_tokens=20000)
    context = settings.pop("context", 8192)
    hooks = settings.pop("hooks", ())
    renderer = renderer or renderer_of(FAMILIES["qwen2.5"], STRICT)
    with scheduled(function=NAMED, limits=limits, renderer=renderer, shared=True, **settings) as scheduler:
        scheduler.engine = ScriptedEngine(
            tokenizer=renderer.tokenizer, script=lambda request, text: "b", context_length=context
        )
        scheduler.hooks = hooks
        task = Task(key="t", question="", answers=answers)
        return scheduler.run(
            with_program([task], "erring", program), modes=("m",) * (2 if hooks else 1), training_step=0
        )


@pytest.mark.parametrize(
    ("roles", "reason", "history"),
    [
        (["user", "system", "user"], "System message must be at the beginning.", "keep"),
        (["user", "developer"], "System message must be at the beginning.", "strip"),
        (["user", "tool"], "no tools here", "strip"),
    ],
)
def test_what_a_template_refuses_is_answered_with_its_reason(
    roles: list[str], reason: str, history: Any
) -> None:
    renderer = renderer_of(FAMILIES["qwen2.5"], STRICT, history_thinking=history)
    report = play("refused_then_asking", json.dumps(roles), reason, renderer=renderer)
    [(leaf, path)] = report.traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), report.fault_reasons
    assert leaf.metrics["num_refused_requests"] == 2 and leaf.metrics["num_requests"] == 2
    assert sum(node.trainable for node in path) == 2 and len(split_contexts(path)) == 1
    assert not report.faults


class Asking(ExternalAgent):
    """A program's environment, as far as its question is rendered."""

    call_format = None

    def __init__(self, roles: list[str]) -> None:
        messages = [{"role": role, "content": f"I am {role}."} for role in roles]
        self.request = read_chat({"messages": messages}, takes_tools=False).conversation

    def read(self, text: str) -> Any: ...
    def sampled(self, turn: Any) -> Any: ...
    def refuse(self, refusal: Any) -> Any: ...
    def reset(self, seed: int) -> Any: ...
    def step(self, message: Any) -> Any: ...
    def result(self) -> Any: ...
    def close(self) -> Any: ...


class Ended(Asking):
    """A program that has ended: its property raises."""

    def __init__(self) -> None:
        pass

    @property
    def request(self) -> Any:  # type: ignore[override]
        raise EnvironmentFault("the program asks nothing")


def test_the_kind_of_an_environment_is_known_after_its_program_has_ended() -> None:
    assert open_episode(Ended()).is_external and open_episode(Asking(["user"])).is_external


class Returning(Asking):
    """Its ``refuse`` returns a given value."""

    def __init__(self, returned: Any) -> None:
        super().__init__(["user"])
        self.returned = returned

    def refuse(self, refusal: Any) -> Any:
        return self.returned


def test_what_a_refused_program_answers_is_checked_and_converted() -> None:
    refusal = Refusal(reason="too long", is_too_long=True)

    def refused(returned: Any) -> Any:
        return ExternalEpisode(Returning(returned)).refuse(refusal)

    found = refused(StepResult(reward=np.float32(0.5), done=np.bool_(True)))  # type: ignore[arg-type]
    assert found is not None and (type(found.reward), found.reward, found.done) == (float, 0.5, True)
    assert refused(None) is None
    with pytest.raises(NonFiniteResult, match="reward"):
        refused(StepResult(reward=math.nan))
    with pytest.raises(InvalidResult, match="what refuse returned"):
        refused("end")


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_in_any_order_are_rendered_or_refused(family: str) -> None:
    """Never a fault of the rollout; neighbours of one role and system messages in front are always rendered
    where they can be joined.
    """
    renderer = renderer_of(FAMILIES[family], observations=("tool",))
    for first in product(("system", "developer", "user", "assistant", "tool"), repeat=2):
        environment = Asking([*first, "user"])
        try:
            assert opening_ids(environment.request, renderer)
        except Unanswerable as error:
            assert error.refusal.reason.startswith("the policy's chat template cannot render these messages")
    for roles in (["user", "user"], ["developer", "user"], ["user"]):
        environment = Asking(roles)
        assert opening_ids(environment.request, renderer)


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_templates_that_want_a_user_first_give_their_reason(family: str) -> None:
    renderer, environment = renderer_of(FAMILIES[family]), Asking(["assistant", "user"])
    with pytest.raises(Unanswerable, match=r"it refuses assistant, user: .*alternate"):
        opening_ids(environment.request, renderer)


def test_a_program_that_asks_nothing_that_can_be_answered_is_a_fault_with_the_reason() -> None:
    """Nothing was sampled, so there is nothing to pay."""
    report = play("always_refused")
    [leaf] = report.traces[0].leaves.values()
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
    assert "System message must be at the beginning." in leaf.detail


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_json": {}}, "guided_json: a policy in training writes freely"),
        ({"messages": [{"role": "function", "content": "a"}]}, "a message of the role 'function'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of the type 'image_url': the policy reads text",
        ),
    ],
)
def test_so_is_one_whose_requests_are_all_refused_before_they_are_rendered(
    fields: dict[str, Any], reason: str
) -> None:
    [leaf] = play("always_malformed", json.dumps(fields)).traces[0].leaves.values()
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
    assert reason in leaf.detail and "2 of its requests were refused, the last" in leaf.detail


@pytest.mark.parametrize(
    ("what", "outcome", "value"),
    [
        ("shortens", Outcome.FINISHED, 1.0),
        pytest.param("pays", Outcome.FINISHED, 0.5, marks=pytest.mark.slow),
        ("fails", Outcome.TRUNCATED_TOKENS, -1.0),
        pytest.param("insists", Outcome.TRUNCATED_TOKENS, -1.0, marks=pytest.mark.slow),
    ],
)
def test_a_conversation_that_outgrows_the_context(what: str, outcome: Outcome, value: float) -> None:
    """The policy's words may have filled it: no way to take it is a fault, or paid as one."""
    report = play("outgrowing", what, context=1024, cut_return=-1.0, failed_return=-9.0)
    [(leaf, path)] = report.traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (outcome, value), report.fault_reasons
    assert leaf.metrics["num_refused_requests"] >= 1 and not report.faults
    assert len(split_contexts(path)) == (2 if what == "shortens" else 1)


@pytest.mark.parametrize(
    ("what", "outcome", "value"),
    [("shortens", Outcome.FINISHED, 1.0), ("fails", Outcome.TRUNCATED_TOKENS, -1.0)],
)
def test_a_first_question_that_fits_no_context(what: str, outcome: Outcome, value: float) -> None:
    report = play("too_long_at_once", what, context=1024, cut_return=-1.0)
    [(leaf, path)] = report.traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (outcome, value), report.fault_reasons
    assert sum(node.trainable for node in path) == (what == "shortens")


@pytest.mark.parametrize("turn", [0, 1])
def test_a_fork_is_refused_the_same(turn: int) -> None:
    hook = Forking(lambda state: state.rollout == 0 and state.turn == turn, first_wave=1, wave=1)
    roles = json.dumps(["user", "system", "user"])
    report = play("refused_then_asking", roles, "System message", hooks=(hook,), is_repeatable=True)
    leaves = list(report.traces[0].leaves.values())
    assert [(leaf.outcome, leaf.episode_return) for leaf in leaves] == [(Outcome.FINISHED, 1.0)] * 2
    assert [leaf.metrics["num_refused_requests"] for leaf in leaves] == [2, 2], report.fault_reasons


def test_another_endpoint_s_refusal_reaches_the_program() -> None:
    bad = Answer({"error": {"message": "System message must be at the beginning."}}, status=400)
    task = Task(key="t", question="")
    program = "erring:refused_behind_an_endpoint"
    played, server = play_behind_endpoint(program, completion("b"), bad, completion("c"), task=task)
    assert (played.outcome, played.metrics["num_refused_requests"]) == (Outcome.FINISHED, 1.0), played.detail
    assert played.trajectory is not None and played.trajectory.reward == 1.0 and len(server.asked) == 3


def test_an_endpoint_that_refuses_from_the_start_is_a_fault() -> None:
    bad = Answer({"error": {"message": "unknown field seed"}}, status=400)
    played, _ = play_behind_endpoint("erring:refused_behind_an_endpoint", bad)
    assert played.outcome is Outcome.ENGINE_FAULT and "unknown field seed" in played.detail


def test_the_bytes_of_log_probs_reach_a_program() -> None:
    renderer = renderer_of(FAMILIES["qwen2.5"])
    with scheduled(
        function=f"{ERRING}:log_probs", renderer=renderer, script=lambda *_: "caf\u00e9 \U0001f60a"
    ) as scheduler:
        task = Task(key="t", question="")
        [leaf] = scheduler.run([task], modes=("m",), training_step=0).traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), leaf.detail
