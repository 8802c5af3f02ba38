"""What episodes with tools have in common, whatever protocol their calls are written in: limits and the
record.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.tool_qa.call_budget import CallBudget
from outrider.environments.tool_qa.rewards import Judged, RewardConfig, Score
from outrider.tools.toolset import Toolset
from outrider.types import Message, Task

OVER_LIMIT = "No tool calls are left. Give the answer now."
REPEATED = "This was asked before. Ask something else or answer."


Judge: TypeAlias = Callable[[Task, str], float | None]
"""Correctness of an answer to a task, as :data:`~outrider.environments.tool_qa.rewards.Judged`."""


class EpisodeConfig(EnvironmentSettings):
    """Limits and reward of a tool-reasoning episode. ``has_verifier``: whether the tasks bring their own."""

    has_verifier: ClassVar[bool] = False
    reports_metrics: ClassVar[bool] = False  # calls, refusals and rewards have metrics of their own
    details: ClassVar[frozenset[str]] = frozenset({"max_invalid", "repeated"})

    max_calls: int = Field(default=3, ge=0)
    """Tool calls that an episode may execute, all tools together. The next one is refused once, with the
    request to answer; one more ends the episode as invalid.
    """
    max_batch_calls: int | None = Field(default=None, ge=0)
    """Tool calls that all episodes of one training step may execute together; once they are spent, further
    ones are refused as above. Evaluations and experts are not limited.
    """
    max_invalid: int = Field(default=3, ge=1)
    """Unreadable turns (and refused repetitions) after which an episode ends as invalid."""
    repeated: Literal["answer", "refuse"] = "answer"
    """Reply to a call that repeats an earlier one of the episode; either way it is counted."""
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _verifiable(self) -> "EpisodeConfig":
        if self.reward.answer == "verifier" and not self.has_verifier:
            raise ValueError('reward.answer = "verifier": these tasks have no verifier of their own')
        return self

    @property
    def calls_tools(self) -> bool:
        """They are there to be called."""
        return True


class ToolEpisode(ABC):
    """Plays one task. Tools are shared with other episodes and not closed here."""

    def __init__(
        self,
        *,
        task: Task,
        tools: Toolset,
        config: EpisodeConfig,
        system_prompt: str,
        budget: CallBudget | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._judge = judge
        self._budget = budget or CallBudget(None)
        self._task = task
        self._tools = tools
        self._config = config
        self._system_prompt = system_prompt
        self._start()

    def _start(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._num_failed = 0
        self._num_invalid = 0
        self._num_refused = 0
        self._done = False

    def reset(self, seed: int) -> Sequence[Message]:
        """Start over. Nothing is drawn, so the seed is not used; the same turns always get the same
        results.
        """
        self._start()
        question = Message(role="user", content=self._task.question)
        return (
            (Message(role="system", content=self._system_prompt), question)
            if self._system_prompt
            else (question,)
        )

    def step(self, message: Message) -> StepResult:
        """Act with one policy turn. Raises ToolFault when a tool's infrastructure broke, and ValueError after
        the end of the episode; never for what the policy wrote.
        """
        if self._done:
            raise ValueError("the episode has ended; reset the environment first")
        return self._act(message)

    def result(self) -> EpisodeResult:
        """The return by the reward's rules and the counts. An episode cut before its answer has a bad
        format. Raises ToolFault where the reward's judge has no verdict.
        """
        score = self._score()
        metrics = {
            "em": float(score.em),
            "f1": score.f1,
            "answer_contained": float(score.contained),
            "format_ok": float(score.fault is None),
            "num_invalid": float(self._num_invalid),
            "num_repeated_queries": float(sum(count - 1 for count in self._calls.values())),
            "num_refused_calls": float(self._num_refused),
            "num_failed_calls": float(self._num_failed),
            "num_undecided_answers": float(score.num_undecided),
        }
        metrics |= {f"num_tool_calls_{name}": float(self._num_calls[name]) for name in self._tools.names}
        success = score.is_correct and score.fault is None
        return EpisodeResult(episode_return=score.reward, success=success, metrics=metrics)

    def copy(self) -> Self:
        """The same episode so far; tools keep no state between calls."""
        twin = copy(self)
        twin._calls, twin._num_calls = self._calls.copy(), self._num_calls.copy()
        return twin

    def close(self) -> None:  # noqa: B027
        """Nothing of its own to release."""

    @abstractmethod
    def _act(self, message: Message) -> StepResult:
        """Read the turn and do what it asks for."""

    @abstractmethod
    def _score(self) -> Score:
        """The reward of the turns so far. Raises what a judge raises."""

    def _is_open(self, num_more: int = 0) -> bool:
        """Whether another call may be executed behind ``num_more`` of the same turn."""
        return self._num_calls.total() + num_more < self._config.max_calls and self._budget.is_open

    def _count(self, key: tuple[str, str], *, failed: bool) -> None:
        """A call ran. Counted only then: a fault leaves the record as it was."""
        self._calls[key] += 1
        self._num_calls[key[0]] += 1
        self._budget.count()
        self._num_failed += failed

    def _is_refused_repetition(self, key: tuple[str, str]) -> bool:
        return bool(self._calls[key]) and self._config.repeated == "refuse"

    @property
    def _judged(self) -> Judged | None:
        judge = self._judge
        return None if judge is None else lambda prediction: judge(self._task, prediction)
