"""From a rollout that ended to its result: the environment's record, or an answer taken out, graded and
judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final

from outrider.environments.tool_qa.judge import Judge
from outrider.errors import EngineFault, ModelError
from outrider.evals.benchmark.extraction import Kind, Scorer, Variant, count_tag_pairs
from outrider.evals.benchmark.scores import SampleResult
from outrider.rollout.collect import Collected
from outrider.trace import Trace
from outrider.types import Outcome, Task

RETURN = "episode_return"
"""Metric under which an environment's return is kept."""
JUDGE_METRICS: Final = frozenset({"num_judge_asks", "num_judge_tokens"})
"""Metrics of a verdict and not of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A rollout as it ended. ``turns`` is all that the policy wrote, results left out, and ``token_ids`` the
    same in ids where the player has them; both are None after a fault, and the rest is empty.

    ``num_tokens`` is None where a server wrote something and did not count it.
    """

    task: Task
    sample: int
    outcome: Outcome
    turns: tuple[str, ...] | None = None
    token_ids: tuple[tuple[int, ...], ...] | None = None
    episode_return: float = 0.0
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    num_tokens: int | None = 0
    detail: str = ""

    @property
    def output(self) -> str:
        """The turns as one text, which is what an answer is taken from."""
        return "".join(self.turns or ())


def from_trace(trace: Trace, sample: int) -> FinishedRollout:
    """The one rollout of a trace that the rollout loop played."""
    ((leaf, path),) = trace.rollouts()
    if leaf.episode_return is None:
        return FinishedRollout(task=trace.task, sample=sample, outcome=leaf.outcome, detail=leaf.detail)
    nodes = [node for node in path if node.trainable]
    return FinishedRollout(
        task=trace.task, sample=sample, outcome=leaf.outcome,
        turns=tuple(node.message.content for node in nodes), token_ids=tuple(node.token_ids for node in nodes),
        episode_return=leaf.episode_return, success=leaf.success, metrics=leaf.metrics,
        num_tool_calls=sum(node.metadata.get("num_tool_calls", 0) for node in path),
        num_tokens=sum(len(node.token_ids) for node in nodes),
    )  # fmt: skip


def from_collected(task: Task, sample: int, collected: Collected) -> FinishedRollout:
    """A rollout of an endpoint's agent."""
    trajectory = collected.trajectory
    if trajectory is None:
        return FinishedRollout(task=task, sample=sample, outcome=collected.outcome, detail=collected.detail)
    turns = tuple(step.text for step in trajectory.steps)
    return FinishedRollout(
        task=task, sample=sample, outcome=collected.outcome, turns=turns,
        episode_return=trajectory.reward, success=collected.success, metrics=collected.metrics,
        num_tool_calls=collected.num_tool_calls,
        num_tokens=trajectory.num_tokens or (None if any(turns) else 0),
    )  # fmt: skip


class Grader:
    """Grades rollouts of one panel; safe to use from several threads. ``scorer`` None takes the environment's
    record.

    After ``max_faults_in_a_row`` failures the judge is not asked any more, and :meth:`check` raises.
    """

    def __init__(
        self,
        *,
        rules: Variant,
        kind: Kind,
        scorer: Scorer | None,
        tools: tuple[str, ...] = (),
        judge: Judge | None = None,
        max_faults_in_a_row: int = 8,
    ) -> None:
        self._rules, self._kind, self._scorer, self._tools, self._judge = rules, kind, scorer, tools, judge
        self._max_faults = max_faults_in_a_row
        self._num_faults = 0
        self._last_fault = ""
        self._fatal_error: ModelError | None = None
        self._lock = Lock()

    def grade(self, rollout: FinishedRollout) -> SampleResult:
        """The result of one rollout."""
        task, sample = rollout.task, rollout.sample
        if rollout.outcome.is_fault:
            return SampleResult(
                task_key=task.key, sample=sample, outcome=rollout.outcome, detail=rollout.detail
            )
        if self._scorer is None:
            return SampleResult(
                task_key=task.key, sample=sample, outcome=rollout.outcome, score=float(rollout.success),
                success=rollout.success, metrics={RETURN: rollout.episode_return, **rollout.metrics},
                num_tool_calls=rollout.num_tool_calls, num_tokens=rollout.num_tokens, turns=rollout.turns,
                token_ids=rollout.token_ids,
            )  # fmt: skip
        prediction = self._rules.extract(rollout.output)
        grades = self._rules.grade(prediction, task.answers, self._kind)
        metrics = {**rollout.metrics, **grades.metrics()}
        if self._tools:
            metrics["num_written_calls"] = float(
                sum(count_tag_pairs(rollout.output, name) for name in self._tools)
            )
        answer = SampleResult(
            task_key=task.key, sample=sample, outcome=Outcome.ENGINE_FAULT, answered=rollout.outcome,
            prediction=prediction, metrics=metrics, num_tool_calls=rollout.num_tool_calls,
            num_tokens=rollout.num_tokens, turns=rollout.turns, token_ids=rollout.token_ids,
        )  # fmt: skip
        if self._scorer == "judge":
            return self.judge_answer(task, answer)
        score, success = grades.score(self._scorer)
        return replace(answer, outcome=rollout.outcome, answered=None, score=score, success=success)

    def judge_answer(self, task: Task, answer: SampleResult) -> SampleResult:
        """The result of an answer that waits for its judge; where the judge fails it still waits, and is
        never wrong for that.
        """
        assert self._judge is not None and answer.answered is not None
        if self._fatal_error is not None:
            return replace(answer, detail="judge: not asked after a refusal")
        if self._num_faults >= self._max_faults:
            return replace(answer, detail=f"judge: not asked after {self._max_faults} failures in a row")
        try:
            verdict = self._judge.judge(
                task.question, task.answers, answer.prediction, key=f"{task.key}/{answer.sample}"
            )
        except ModelError as error:  # it ends the evaluation, but not before what was played is kept
            self._fatal_error = error
            return replace(answer, detail=f"judge: {error}")
        if verdict.num_requests:  # else it was decided without the judge
            with self._lock:
                self._num_faults = self._num_faults + 1 if verdict.is_correct is None else 0
                self._last_fault = verdict.fault or self._last_fault
        judge_costs = {
            "num_judge_asks": float(verdict.num_requests),
            "num_judge_tokens": float(verdict.num_tokens),
        }
        if verdict.is_correct is None:
            return replace(answer, detail=f"judge: {verdict.fault}")
        return replace(
            answer, outcome=answer.answered, answered=None, score=float(verdict.is_correct),
            success=verdict.is_correct, metrics={**answer.metrics, **judge_costs}, detail=verdict.reply,
        )  # fmt: skip

    def check(self) -> None:
        """Raises EngineFault once the judge has failed too often in a row, ModelError when it will never
        answer.
        """
        if self._fatal_error is not None:
            raise self._fatal_error
        if self._num_faults >= self._max_faults:
            raise EngineFault(
                f"the judge failed {self._max_faults} times in a row; the last: {self._last_fault}"
            )
