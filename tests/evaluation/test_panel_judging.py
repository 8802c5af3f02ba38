"""Judging again what waits for a judge: every verdict is kept as it comes."""

from pathlib import Path

import pytest

from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.evaluation.grading import Grader, find_variant
from outrider.evaluation.results import EvalTasksStore, SampleResult
from outrider.evaluation.run import play_eval_tasks
from outrider.evaluation.tasks import BENCHMARKS, EvalSetup, EvalTasks
from outrider.rollout.settings import Limits
from outrider.types import Outcome, Task
from outrider.viewer.progress import Progress
from tests.rollout.fakes import Factory, Fake

TASKS = tuple(Task(key=f"task-{i}", question=f"q{i}", answers=(str(i),)) for i in range(40))


class Interrupted(Grader):
    """Somebody presses Ctrl-C while an answer is judged."""

    def judge_answer(self, task: Task, answer: SampleResult) -> SampleResult:
        if task.key == "task-3":
            raise KeyboardInterrupt
        return SampleResult(task_key=task.key, sample=0, outcome=Outcome.FINISHED, score=1.0, success=True)


class Nobody:
    """Plays nothing."""

    def play(self, panel: object, store: object, record: object) -> None:
        raise AssertionError("the interrupt ends it before")

    def notes(self) -> list[str]:
        return []


def test_verdicts_are_kept_when_the_judging_is_interrupted(tmp_path: Path) -> None:
    store = EvalTasksStore.open(tmp_path / "r.jsonl", identity={})
    for task in TASKS:
        store.add(
            SampleResult(
                task_key=task.key,
                sample=0,
                outcome=Outcome.ENGINE_FAULT,
                answered=Outcome.FINISHED,
                prediction="x",
            )
        )
    panel = EvalSetup(
        eval_tasks=EvalTasks(benchmark=BENCHMARKS["simpleqa"], tasks=TASKS, panel_hash=hash_tasks(TASKS)),
        factory=Factory(
            lambda task, number: Fake(
                on_step=lambda step, text: None)),  # type: ignore[arg-type, return-value]
        stop=(), limits=Limits(step_timeout_s=60), scorer="judge", tools=(), identity={},
    )  # fmt: skip
    grader = Interrupted(rules=find_variant("default"), kind="qa", scorer="judge")
    with pytest.raises(KeyboardInterrupt):
        play_eval_tasks(
            panel,
            Nobody(),  # type: ignore[arg-type]
            grader,
            store,
            num_samples=1,
            display=Progress(),
        )
    store.close()
    again = EvalTasksStore.open(tmp_path / "r.jsonl", identity={})
    kept = [result.task_key for result in again.results if result.score is not None]
    # they are asked about in this order
    assert kept == [key for key in sorted(task.key for task in TASKS) if key < "task-3"]
    again.close()
