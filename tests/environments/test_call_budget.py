"""The cap on a batch's tool calls: decided between rounds, the same whoever is fast, refused in words,
counted.
"""

import random
import time
from collections.abc import Sequence

import pytest

from outrider.engines.base import Request
from outrider.environments.tool_qa.environment import OVER_LIMIT, EpisodeConfig
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import CallBudget, ToolOutput
from outrider.trace import Trace
from outrider.training.step_metrics import rollout_metrics
from tests.rollout.fakes import scripted, tasks
from tests.tool_episodes import tool_factory


class Slow:
    """A tool that takes its time, differently in every run."""

    name = "search"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_runs = 0

    def run_text(self, text: str) -> ToolOutput:
        time.sleep(random.random() * self.seconds)
        self.num_runs += 1
        return ToolOutput(text="found", failed=False)

    def close(self) -> None:
        """Nothing to release."""


def play(
    limit: int | None,
    *,
    seconds: float = 0.0,
    num_steps: int = 1,
    training: bool = True,
    continued: bool = False,
) -> tuple[list[list[Trace]], Slow]:
    def script(request: Request, text: str) -> str:
        turn = int(request.request_id.rsplit("/", 1)[1])
        return (
            f"<search>{request.request_id}</search>"
            if turn < 4 and OVER_LIMIT not in text
            else "<answer>x</answer>"
        )

    tool = Slow(seconds)
    factory = tool_factory(
        tools=[tool], config=EpisodeConfig(max_calls=4, max_batch_calls=limit), system_prompt=""
    )
    runs = Scheduler(
        engine=(engine := scripted(script)), renderer=ChatRenderer(engine.tokenizer), factory=factory,
        limits=Limits(max_turns=8, step_timeout_s=10), sampling=Sampling(stop=("</search>", "</answer>")),
        run_seed=0, is_training=training,
    )  # fmt: skip
    played = [
        runs.run(tasks(2), modes=("m",) * 3, training_step=step, continued=continued and step > 0)
        for step in range(num_steps)
    ]
    return [report.traces for report in played], tool


def texts(traces: Sequence[Trace]) -> list[list[str]]:
    return [[node.message.content for node in path] for trace in traces for _, path in trace.rollouts()]


@pytest.mark.parametrize(
    ("limit", "executed"), [(None, 24), (0, 0), (1, 6), (6, 6), (7, 12), (24, 24), (99, 24)]
)
def test_a_round_that_begins_with_calls_left_has_them_and_the_next_is_refused(
    limit: int | None, executed: int
) -> None:
    [traces], tool = play(limit)
    values = rollout_metrics(traces)
    assert tool.num_runs == executed == values["rollout/num_tool_calls"]
    assert values["rollout/num_finished"] == 6
    assert values["rollout/num_tool_calls_refused"] == (6 if executed < 24 else 0)


def test_refusals_do_not_depend_on_the_speed_of_calls() -> None:
    quick, slow = play(7), play(7, seconds=0.02)
    assert texts(quick[0][0]) == texts(slow[0][0])


def test_every_batch_has_its_calls() -> None:
    steps, tool = play(6, num_steps=3)
    assert tool.num_runs == 18 and all(
        rollout_metrics(traces)["rollout/num_tool_calls"] == 6 for traces in steps
    )


def test_further_rounds_of_a_step_share_its_calls() -> None:
    """Dynamic sampling plays more tasks in the same step: the limit is the step's and not each round's."""
    steps, tool = play(6, num_steps=3, continued=True)
    assert tool.num_runs == 6
    assert [rollout_metrics(traces)["rollout/num_tool_calls"] for traces in steps] == [6, 0, 0]


def test_an_evaluation_is_not_limited() -> None:
    [traces], tool = play(1, training=False)
    assert tool.num_runs == 24 and rollout_metrics(traces)["rollout/num_tool_calls_refused"] == 0


def test_without_a_limit_nothing_is_refused() -> None:
    budget = CallBudget(None)
    for _ in range(3):
        budget.count()
        budget.begin_round()
        assert budget.is_open
