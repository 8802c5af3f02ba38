"""The environment ``tools`` with an MCP server: its contract, native calls, servers that end in a rollout."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.environments.base import Episode  # noqa: E402
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig  # noqa: E402
from outrider.rollout.episode import Sampling  # noqa: E402
from outrider.rollout.scheduler import RolloutReport, Scheduler  # noqa: E402
from outrider.rollout.settings import Limits
from outrider.testing import check_environment  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.rollout.fakes import scripted  # noqa: E402
from tests.tools.mcp.servers import fake, hostile  # noqa: E402

REWARD = {"require_think": False, "require_boxed": False, "multi_tool_bonus": 0.0}


def config(tool: Any, **options: Any) -> ToolsConfig:
    return ToolsConfig.model_validate({"tools": [tool], "prompt": "none", "reward": REWARD} | options)


def test_the_contract_of_an_environment(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "2 and 3?", "answer": "5"}\n')
    family = ToolEnvironment.build(
        config(fake(only=["add", "shout"]), train={"path": tmp_path / "tasks.jsonl"})
    )
    check_environment(family, texts=['<add>{"a": 2, "b": 3}</add>', "<answer>5</answer>"])


def test_native_calls() -> None:
    factory = ToolEnvironment.build(config(fake(only=["add"]), protocol="hermes")).make()
    environment = factory(Task(key="t", question="q", answers=("5",)))
    environment.reset(0)
    turn = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    step = Episode(environment).act(turn + turn)
    assert [(message.role, message.content) for message in step.messages] == [("tool", "5"), ("tool", "5")]
    wrong = '<tool_call>\n{"name": "add", "arguments": {"a": "two"}}\n</tool_call>'
    step = Episode(environment).act(wrong)
    assert step.invalid and step.text == "The argument 'a' of add must be of type integer."
    factory.close()


def play(settings: ToolsConfig, turns: list[str], *, num_rollouts: int, max_retries: int) -> RolloutReport:
    """Generate rollouts that all write these turns."""
    family = ToolEnvironment.build(settings)
    factory = family.make()
    engine = scripted(lambda request, text: turns[text.count("<result>")])
    try:
        return Scheduler(
            engine=engine,
            renderer=ChatRenderer(engine.tokenizer),
            factory=factory,
            limits=Limits(step_timeout_s=120),
            sampling=Sampling(stop=family.stop),
            run_seed=0,
            max_retries=max_retries,
        ).run(
            [Task(key=f"task {i}", question="q", answers=("5",)) for i in range(2)],
            modes=("plain",) * num_rollouts,
            training_step=1,
        )
    finally:
        factory.close()


def test_a_rollout_with_a_fault_is_retried(tmp_path: Path) -> None:
    turns = ["<say>{}</say>", "<answer>5</answer>"]
    tool = hostile("dies-after-each", tmp_path, max_restarts=100)  # it may have ended before a call
    report = play(config(tool), turns, num_rollouts=2, max_retries=50)
    leaves = [leaf for trace in report.traces for leaf, _ in trace.rollouts()]
    assert [leaf.outcome for leaf in leaves] == [Outcome.FINISHED] * 4
    assert [leaf.episode_return for leaf in leaves] == [1.0] * 4
    assert report.faults["retries"] == report.faults["tool_fault"] == report.num_retries
