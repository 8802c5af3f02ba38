"""The released rollout loop's scenarios (vector ``rollout_scenarios``), played by ours: the same rows, and
each deviation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from outrider.algorithms.entropy_branching import BranchHook, BranchSettings, branches
from outrider.engines.base import Request
from outrider.environments.tool_qa.environment import OVER_LIMIT, EpisodeConfig
from outrider.errors import ToolFault
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import ToolOutput
from outrider.types import Outcome
from tests.rollout.fakes import scripted, tasks
from tests.tool_episodes import tool_factory

Script = Mapping[tuple[int, int, int], str]  # task, rollout, turn


class Table:
    """Answers "r:" and the query, and remembers what was executed."""

    name = "search"

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.executed: list[str] = []

    def run_text(self, text: str) -> ToolOutput:
        self.executed.append(text)
        if self.is_broken:
            raise ToolFault("down")
        return ToolOutput(text=f"r:{text}", failed=False)

    def close(self) -> None:
        """Nothing to release."""


def play(
    script: Script,
    *,
    leaves: int,
    first_wave: int,
    call_limit: int,
    probability: float = 1.0,
    num_tasks: int = 1,
    tool: Table,
) -> RolloutReport:
    def say(request: Request, text: str) -> str:
        task, rollout, turn = request.request_id.removeprefix("task ").split("/")
        return script[int(task), int(rollout), int(turn)]

    engine = scripted(say)
    rule = BranchSettings(first_wave=first_wave, base_probability=probability, entropy_weight=0.0)
    runs = Scheduler(
        engine=engine, renderer=ChatRenderer(engine.tokenizer), run_seed=0,
        factory=tool_factory(
            tools=[tool], config=EpisodeConfig(max_calls=call_limit), system_prompt=""),
        limits=Limits(step_timeout_s=60), sampling=Sampling(stop=("</search>", "</answer>")),
        hooks=(BranchHook(rule, group_size=leaves, vocabulary_size=256),), max_retries=2,
    )  # fmt: skip
    return runs.run(tasks(num_tasks), modes=("on_policy",) * leaves, training_step=0)


def said(report: RolloutReport) -> list[list[str]]:
    return [
        [n.message.content for n in path if n.trainable]
        for trace in report.traces
        for _, path in trace.rollouts()
    ]


def loss_masks(report: RolloutReport) -> list[list[bool]]:
    return [
        [n.trainable for n in path for _ in n.token_ids]
        for trace in report.traces
        for _, path in trace.rollouts()
    ]


def test_branch_then_limit_then_restart() -> None:
    """Same rows: the child shares prefix, mask and call count, and a missing rollout begins at the prompt.
    Deviation: a call over the limit is refused in words, where the released loop ends the rollout.
    """
    script = {
        (0, 0, 0): "<search>a</search>", (0, 1, 0): "<answer>x</answer>", (0, 0, 1): "<answer>y</answer>",
        (0, 2, 1): "<search>b</search>", (0, 2, 2): "<answer>w</answer>", (0, 3, 0): "<answer>z</answer>",
    }  # fmt: skip
    tool = Table()
    report = play(script, leaves=4, first_wave=2, call_limit=1, tool=tool)
    assert said(report) == [
        ["<search>a</search>", "<answer>y</answer>"], ["<answer>x</answer>"],
        ["<search>a</search>", "<search>b</search>", "<answer>w</answer>"], ["<answer>z</answer>"],
    ]  # fmt: skip
    assert tool.executed == ["a"]  # once, in the shared prefix
    paths = {leaf.rollout: path for leaf, path in report.traces[0].rollouts()}
    assert paths[0][1] is paths[2][1] and any(OVER_LIMIT in node.message.content for node in paths[2])
    assert any("r:a" in node.message.content and not node.trainable for node in paths[2])
    assert all(any(mask) and not all(mask) for mask in loss_masks(report))


def test_without_a_call_nothing_branches_and_the_rest_begins_at_once() -> None:
    """Same rows. Deviation: two rounds in place of three."""
    script = {(0, rollout, 0): f"<answer>{letter}</answer>" for rollout, letter in enumerate("abc")}
    report = play(script, leaves=3, first_wave=1, call_limit=2, tool=Table())
    assert said(report) == [["<answer>a</answer>"], ["<answer>b</answer>"], ["<answer>c</answer>"]]
    assert report.num_batches == 2


def test_each_group_has_its_own_budget_of_forks() -> None:
    """Same rows: the one place of the first prompt is used, the second prompt's rollouts did not branch and
    one is begun afresh.
    """
    assert branches(0.5, change=0.0, base=0.5, weight=0.2) and not branches(
        0.51, change=0.0, base=0.5, weight=0.2
    )
    script = {
        (0, 0, 0): "<search>a</search>", (0, 1, 0): "<search>b</search>", (0, 0, 1): "<answer>1</answer>",
        (0, 1, 1): "<answer>2</answer>", (0, 2, 1): "<answer>4</answer>",
        (1, 0, 0): "<answer>3</answer>", (1, 1, 0): "<answer>d</answer>", (1, 2, 0): "<answer>5</answer>",
    }  # fmt: skip
    tool = Table()
    report = play(script, leaves=3, first_wave=2, call_limit=3, num_tasks=2, tool=tool)
    assert said(report)[:3] == [
        ["<search>a</search>", "<answer>1</answer>"], ["<search>b</search>", "<answer>2</answer>"],
        ["<search>a</search>", "<answer>4</answer>"],
    ]  # fmt: skip
    assert said(report)[3:] == [["<answer>3</answer>"], ["<answer>d</answer>"], ["<answer>5</answer>"]]
    assert sorted(tool.executed) == ["a", "b"]


def test_a_tool_that_is_down_is_a_fault_and_no_text_for_the_policy() -> None:
    """Both try three times. Deviation: the released loop then tells the policy of an empty output; here the
    rollout has no reward.
    """
    tool = Table(is_broken=True)
    script = {(0, rollout, 0): "<search>e</search>" for rollout in range(2)}
    report = play(script, leaves=2, first_wave=2, call_limit=3, tool=tool)
    assert [leaf.outcome for leaf, _ in report.traces[0].rollouts()] == [Outcome.TOOL_FAULT] * 2
    assert tool.executed == ["e"] * 6 and said(report) == [[], []]


@pytest.mark.parametrize("query", [" ", " \n "])
def test_an_empty_query_gets_an_explanation(query: str) -> None:
    """Deviation: the released loop ends the rollout in silence."""
    script: dict[tuple[int, int, int], str] = {}
    for rollout in range(2):
        script |= {(0, rollout, 0): f"<search>{query}</search>", (0, rollout, 1): "<answer>1</answer>"}
    tool = Table()
    report = play(script, leaves=2, first_wave=2, call_limit=3, tool=tool)
    rows: Sequence[Any] = said(report)
    assert tool.executed == [] and rows == [[f"<search>{query}</search>", "<answer>1</answer>"]] * 2
    assert all(leaf.outcome is Outcome.FINISHED for leaf, _ in report.traces[0].rollouts())
