"""Environments of the package verifiers: their rows, their rewards, and whose fault it is when something
breaks. A fake package stands for it, in a process as the real one's; the last test plays the real one.
"""

import json
import logging
import os
import queue
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.environment import ProgramFactory  # noqa: E402
from outrider.environments.agent.programs import Report  # noqa: E402
from outrider.environments.verifiers.environment import VerifiersConfig, VerifiersTaskSet, run_episodes
from outrider.errors import DataError, EnvironmentFault, ToolUnavailable  # noqa: E402
from outrider.plugins.imports import add_search_folder  # noqa: E402
from outrider.rollout.scheduler import RolloutReport  # noqa: E402
from outrider.training.experts import read_demonstrations  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.agents.harness import finished, scheduler  # noqa: E402
from tests.environments.verifiers_fake.make import write_fake  # noqa: E402

ROWS = (
    "good", "two", "raise", "nan", "unscored", "judge", "HarnessError", "TaskError", "EnvError", "hang",
)  # fmt: skip
REAL = os.environ.get("OUTRIDER_VERIFIERS_PYTHON")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_fake(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(*rows: str, **settings: Any) -> VerifiersConfig:
    given = {"num_train": len(rows), "num_valid": 0, "num_test": 0, "options": {"taskset": {"rows": rows}}}
    return VerifiersConfig(**{"id": "fake_taskset", **given, **settings})


@contextmanager
def loaded(config: VerifiersConfig) -> Iterator[tuple[Any, Sequence[Task]]]:
    """The process that plays, and the tasks. Several factories may use the process."""
    episodes = run_episodes(config)
    try:
        yield episodes, VerifiersTaskSet(config).tasks("train")
    finally:
        episodes.close()


def play(
    config: VerifiersConfig, episodes: Any, tasks: Sequence[Task], *, group: int = 1, script: Any = None
) -> RolloutReport:
    """Play groups of the tasks with other settings of rewards and limits than the process has."""
    made = scheduler(ProgramFactory(config, lambda: episodes), script=script or (lambda *_: "an answer"))
    made.max_concurrent = len(tasks) * group
    try:
        return made.run(list(tasks), modes=("m",) * group, training_step=0)
    finally:
        made.factory._gateway.close()  # type: ignore[attr-defined]


def test_rows_are_tasks_of_their_versions(folder: Path) -> None:
    config = config_of("a", "b", "c", "d", num_train=2, num_valid=1, num_test=0, first_row=1)
    family = VerifiersTaskSet(config)
    assert [task.question for task in family.tasks("train")] == ["b", "c"]
    assert [task.key for task in family.tasks("valid")] == ["row d"] and not family.tasks("test")
    [first, _] = family.tasks("train")
    versions = first.metadata["versions"]
    assert isinstance(versions, dict) and versions["verifiers"] == "0.0.fake"
    (folder / "fake_taskset.py").write_text((folder / "fake_taskset.py").read_text() + "\n# changed\n")
    shuffled = VerifiersTaskSet(config.model_copy(update={"shuffle_seed": 0})).tasks("train")
    assert [task.question for task in shuffled] == ["c", "b"]
    assert shuffled[0].metadata["versions"] != versions


def test_what_cannot_be_played(folder: Path) -> None:
    with pytest.raises(ToolUnavailable, match="has 2 rows, and the splits need 3"):
        VerifiersTaskSet(config_of("a", "b", num_train=3)).tasks("train")
    with pytest.raises(ToolUnavailable, match="nosuch"):
        VerifiersTaskSet(config_of("a", id="nosuch")).make()
    with pytest.raises(ToolUnavailable, match="cannot be started"):
        VerifiersTaskSet(config_of("a", python=folder / "python")).make()
    with pytest.raises(DataError, match="two rows have the key 'row a'"):
        VerifiersTaskSet(config_of("a", "a")).tasks("train")
    (folder / "verifiers").rename(folder / "gone")
    with pytest.raises(ToolUnavailable, match=r"has no verifiers.*environment\.python"):
        VerifiersTaskSet(config_of("a")).tasks("train")
    with pytest.raises(ValueError, match="without an id"):
        config_of("a", options={"taskset": {"id": "b"}})


def test_rewards_and_faults(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reward is one, whatever else fails in the process; everything else is a fault with its name."""
    caplog.set_level(logging.DEBUG)
    config = config_of(*ROWS, time_limit_s=3.0)
    with loaded(config) as (episodes, tasks):
        report = play(config, episodes, tasks)
        found = {trace.task.question: next(iter(trace.leaves.values())) for trace in report.traces}
        assert finished(found["good"], 0.75) and not found["good"].success
        metrics = {"num_words": 2.0, "reward_right": 0.25, "reward_more": 0.5}
        assert metrics.items() <= found["good"].metrics.items()
        assert finished(found["two"], 0.5)
        broken = set(ROWS[2:])
        assert {name for name, leaf in found.items() if leaf.outcome is Outcome.ENVIRONMENT_FAULT} == broken
        assert report.faults["environment_fault"] == len(broken)
        reasons = "\n".join(report.fault_reasons)
        for words in ("RuntimeError: of the machinery", "nan", "gave no reward", "not to be trained",
                      "HarnessError: it broke here", "TaskError: it broke here", "run() broke",
                      "longer than 3 s"):  # fmt: skip
            assert words in reasons
        assert "OUTRIDER_API_KEY" not in caplog.text and "Bearer" not in caplog.text
        # Only the agent's own failure has the return of failures.
        failing = [task for task in tasks if task.question in ("HarnessError", "TaskError")]
        again = config_of(*ROWS, failed_return=-0.5)
        failed, fault = (next(iter(trace.leaves.values())) for trace in play(again, episodes, failing).traces)
        assert finished(failed, -0.5) and failed.metrics["num_failed"] == 1
        assert fault.outcome is Outcome.ENVIRONMENT_FAULT


def test_a_process_that_dies_is_a_fault_and_starts_again(folder: Path) -> None:
    config = config_of("die", "good", failed_return=-1.0)
    with loaded(config) as (episodes, (dying, good)):
        report = play(config, episodes, [dying])
        assert report.faults["environment_fault"] == 1
        assert "is gone (no memory)" in report.fault_reasons[0]
        [leaf] = play(config, episodes, [good]).traces[0].leaves.values()
        assert finished(leaf, 0.75)


def test_cancelling_reports_an_end(folder: Path) -> None:
    config = config_of("hang")
    [task] = VerifiersTaskSet(config).tasks("train")
    episodes = run_episodes(config)
    try:
        ended: queue.Queue[Report] = queue.Queue()
        # nobody answers at this address, and the request hangs until it is cancelled
        place = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "a key"}
        number = episodes.start(task, place, ended.put)
        episodes.kill(number)
        assert "fault" in json.loads(ended.get(timeout=60).result)
        episodes.kill(number)
    finally:
        episodes.close()
        episodes.close()
    with pytest.raises(EnvironmentFault):
        episodes.start(task, place, ended.put)


def test_nothing_is_left_when_the_trainer_goes(folder: Path) -> None:
    episodes = run_episodes(config_of("good"))
    process = episodes._process._process
    episodes._process._sock.shutdown(2)  # as the kernel does when the trainer is killed
    assert process.wait(60) == 0
    episodes.close()
    again = run_episodes(config_of("good"))
    os.kill(again._process._process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not again._process.is_over and time.monotonic() < deadline:
        time.sleep(0.01)
    assert again._process.is_over
    again.close()


@pytest.mark.skipif(REAL is None, reason="OUTRIDER_VERIFIERS_PYTHON names no Python with verifiers")
def test_the_real_package() -> None:
    """The recipe's environment: two turns of one conversation, both rewards, and many episodes at once. Its
    demonstrations are for the first tasks, and right.
    """
    add_search_folder(Path("recipes").absolute())
    config = VerifiersConfig(id="verifiers_desk", python=REAL, num_train=64, num_valid=0, num_test=0)

    def answer(request: Any, text: str) -> str:
        return "urgent" if "urgent or normal" in text else "It is shipping"

    with loaded(config) as (episodes, tasks):
        report = play(config, episodes, tasks, group=3, script=answer)
    assert not report.faults
    rows = Path("recipes/agent-desk/train.jsonl").read_text().splitlines()
    for trace, row in zip(report.traces, rows, strict=True):
        desk, haste = json.loads(row)["answer"].split()
        for leaf in trace.leaves.values():
            assert leaf.episode_return == 0.5 * (desk == "shipping") + 0.5 * (haste == "urgent")
            assert leaf.metrics["num_requests"] == 2 and leaf.metrics["num_words"] == 1
    known = read_demonstrations("recipes/verifiers-desk.jsonl", tasks)
    assert [task.key for task in tasks if known.get(task.key)] == [task.key for task in tasks[:32]]
    for task, row in zip(tasks[:32], rows[:32], strict=True):
        steps = known[task.key]
        assert steps is not None and " ".join(step.text for step in steps) == json.loads(row)["answer"]
