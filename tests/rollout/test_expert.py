"""Experts through the loop: what a cold start shows instead of saying is what the environment did."""

from collections.abc import Sequence

import pytest

from outrider.environments.base import EnvironmentTaskSet, StepResult
from outrider.environments.webshop.environment import WebShopConfig, WebShopEnvironment
from outrider.rollout.experts import play_experts, to_trajectory
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Splice
from outrider.rollout.settings import Limits
from outrider.seeding import reset_seed
from outrider.trace import Trace
from outrider.types import Message, Origin, Outcome, Step, Task
from tests.rollout.fakes import TOKENIZER, Factory, Fake, say, scheduler, scripted, tasks
from tests.toy import ToyTaskSet

FAMILY = EnvironmentTaskSet(WebShopEnvironment, WebShopConfig(num_train=12))


def shop(retrieve_share: float) -> list[Trace]:
    steps = {task.key: FAMILY.expert(task, 0) for task in FAMILY.tasks("train")}
    return play_experts(
        tasks=FAMILY.tasks("train"), expert=lambda task: steps[task.key], factory=FAMILY.make(),
        tokenizer=TOKENIZER,
        limits=Limits(max_turns=15, max_response_tokens=40000, max_observation_tokens=6000,
                      max_splice_tokens=6000),
        stop=FAMILY.stop, run_seed=0, context_length=60000, retrieve_share=retrieve_share,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "fewest", "most"),
    [
        pytest.param(0.0, 0, 0, marks=pytest.mark.slow),
        (0.5, 2, 10),
        pytest.param(1.0, 12, 12, marks=pytest.mark.slow),
    ],
)
def test_experts_solve_the_shop_at_any_share_of_retrieved_steps(share: float, fewest: int, most: int) -> None:
    """The shown click is done, so that the next one is on the page that it leads to."""
    traces = shop(share)
    assert len(traces) == 12 and all(trace.leaves[0].success for trace in traces)
    shown = [node for trace in traces for node in trace.nodes if node.origin is Origin.BUFFER]
    assert fewest <= len(shown) <= most
    pages = {
        node.message.content
        for trace in shop(0.0)
        for node in trace.nodes
        if node.origin is Origin.ENVIRONMENT
    }
    for node in shown:
        action, _, page = (
            node.message.content.removeprefix("<retrieve>").removesuffix("</retrieve>\n").partition("\n")
        )
        assert action.startswith("<action>") and page in pages


def test_a_retrieved_tool_call_is_executed() -> None:
    family = ToyTaskSet(1)
    ask = Step(text="<ask>?</ask>", observation="claimed")

    def expert(task: Task) -> Sequence[Step]:
        right = reset_seed(0, 0, task.key) % 1000
        return (ask, ask, Step(text=f"<answer>{right}</answer>", observation="", is_terminal=True))

    [trace] = play_experts(
        tasks=family.tasks("train"), expert=expert, factory=family.make(), tokenizer=TOKENIZER,
        limits=Limits(), stop=family.stop, run_seed=0, context_length=4096, retrieve_share=1.0,
    )  # fmt: skip
    [shown] = [node for node in trace.nodes if node.origin is Origin.BUFFER]
    assert (
        shown.message.content.startswith("<retrieve><ask>?</ask>\n<result>\nit is ")
        and trace.leaves[0].success
    )


@pytest.mark.parametrize("no", [{"invalid": True}, {"refused": True}])
def test_the_expert_writes_a_step_that_could_not_be_executed(no: dict[str, bool]) -> None:
    """The environment does nothing the first time that it hears the middle step: nothing is shown, and no
    step is skipped.
    """
    heard: list[str] = []

    def answer(n: int, text: str) -> StepResult:
        heard.append(text)
        if text == "b." and heard.count("b.") == 1:
            return StepResult(message=Message(role="inline", content="no"), **no)
        return StepResult(message=None, done=True) if text == "c." else say(" ok")

    [trace] = play_experts(
        tasks=tasks(1), expert=lambda task: [Step(text=text, observation="") for text in ("a.", "b.", "c.")],
        factory=Factory(lambda task, number: Fake(on_step=answer)), tokenizer=TOKENIZER, limits=Limits(),
        stop=(".",), run_seed=0, context_length=4096, retrieve_share=1.0,
    )  # fmt: skip
    assert heard == ["a.", "b.", "b.", "c."] and all(node.origin is not Origin.BUFFER for node in trace.nodes)


class Takes(Hook):
    """Does an action before the second turn whose text finds no room."""

    def before_turn(self, state: EpisodeState) -> Sequence[Attempt]:
        long = Splice(
            origin=Origin.BUFFER,
            text="x" * 400,
            step=Step(text="take", observation=""),
            metadata={"action": "take"},
        )
        return [Attempt(action="take", then=lambda result: long)] if state.turn == 1 else []


@pytest.mark.parametrize("ends", [True, False])
def test_a_rollout_whose_last_action_has_no_text_is_not_a_trajectory(ends: bool) -> None:
    """Its steps would not lead to its return. The record names the action."""

    def answer(n: int, text: str) -> StepResult:
        return StepResult(message=None, done=True) if text == "take" and ends else say(" ok")

    runs = scheduler(
        scripted(lambda request, text: "look."), Factory(lambda task, number: Fake(on_step=answer)),
        hooks=(Takes(),), limits=Limits(max_response_tokens=20, max_turn_tokens=10, max_splice_tokens=400),
    )  # fmt: skip
    [trace] = runs.run(tasks(1), modes=("hybrid",), training_step=0).traces
    assert trace.leaves[0].outcome is (Outcome.FINISHED if ends else Outcome.TRUNCATED_TOKENS)
    assert trace.nodes[-1].metadata["attempted"] == ["take"]
    assert to_trajectory(trace, 0, agent="self", trajectory_id="x") is None


def test_a_rollout_with_a_step_that_was_only_shown_is_not_a_trajectory() -> None:
    """Without that step it looks shorter than the complete trajectory, which it would displace."""
    trace, node = next(
        (trace, node) for trace in shop(0.5) for node in trace.nodes if node.origin is Origin.BUFFER
    )
    assert to_trajectory(trace, 0, agent="self", trajectory_id="x") is not None
    del node.metadata["action"]  # as of a step that was only shown
    assert to_trajectory(trace, 0, agent="self", trajectory_id="x") is None
