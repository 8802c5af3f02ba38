"""One tool-reasoning episode: reads policy turns, runs tools within limits, keeps the record."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.tool_qa.call_budget import CallBudget
from outrider.environments.tool_qa.reward_judge import RewardJudge, make_reward_judge
from outrider.environments.tool_qa.rewards import RewardConfig, Score, score_turns
from outrider.environments.tool_qa.tag_protocol import (
    Answer,
    Call,
    Malformed,
    NoAction,
    Turn,
    parse_action,
    render_result,
)
from outrider.tools.base import Tool
from outrider.types import Message, Task

OVER_LIMIT = "No tool calls are left. Give the answer now."
REPEATED = "This was asked before. Ask something else or answer."


Verifier: TypeAlias = Callable[[Task, str], float | None]
"""Score in [0, 1] of an answer to a task; 1 is correct, None is undecided and counts as wrong."""


class EpisodeConfig(EnvironmentSettings):
    """Limits and reward of a tool-reasoning episode. ``has_verifier``: whether the tasks bring their own."""

    calls_tools: ClassVar[bool] = True
    has_verifier: ClassVar[bool] = False
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


class ToolEnvironment:
    """Plays one task. Tools are shared with other episodes and not closed here."""

    def __init__(
        self,
        *,
        task: Task,
        tools: Mapping[str, Tool],
        config: EpisodeConfig,
        system_prompt: str,
        budget: CallBudget | None = None,
        judge: RewardJudge | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self._judge = judge
        self._verifier = verifier
        self._budget = budget or CallBudget(None)
        self._task = task
        self._tools = tools
        self._config = config
        self._system_prompt = system_prompt
        self._start()

    def _start(self) -> None:
        self._turns: list[Turn] = []
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
        """Act with the text of one policy turn. Raises ToolFault when a tool's infrastructure broke, and
        ValueError after the end of the episode; never for what the policy wrote.
        """
        if self._done:
            raise ValueError("the episode has ended; reset the environment first")
        action = parse_action(message.content, tuple(self._tools))
        match action:
            case Answer():
                return self._end(message.content, invalid=False)
            case NoAction():
                return self._end(message.content, invalid=True)
            case Malformed(reason=reason):
                return self._complain(message.content, reason)
            case Call():
                return self._call(message.content, action)

    def result(self) -> EpisodeResult:
        """The return by the reward's rules and the counts. An episode cut before its answer has a bad
        format. Raises ToolFault where the reward's judge has no verdict.
        """
        score = self._score(self._turns)
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
        metrics |= {f"num_tool_calls_{name}": float(self._num_calls[name]) for name in self._tools}
        success = score.is_correct and score.fault is None
        return EpisodeResult(episode_return=score.reward, success=success, metrics=metrics)

    def copy(self) -> "ToolEnvironment":
        """The same episode so far; tools keep no state between calls."""
        twin = ToolEnvironment(
            task=self._task,
            tools=self._tools,
            config=self._config,
            system_prompt=self._system_prompt,
            budget=self._budget,
            judge=self._judge,
            verifier=self._verifier,
        )
        twin._turns = list(self._turns)
        twin._calls, twin._num_calls = self._calls.copy(), self._num_calls.copy()
        twin._num_failed, twin._num_invalid, twin._num_refused = (
            self._num_failed,
            self._num_invalid,
            self._num_refused,
        )
        twin._done = self._done
        return twin

    def close(self) -> None:
        """Nothing of its own to release."""

    def _call(self, text: str, call: Call) -> StepResult:
        if self._num_calls.total() >= self._config.max_calls or not self._budget.is_open:
            self._num_refused += 1
            return (
                self._end(text, invalid=True)
                if self._num_refused > 1
                else self._answer(text, OVER_LIMIT, refused=True)
            )
        key = (call.tool, " ".join(call.argument.split()) if call.tool == "search" else call.argument)
        if self._calls[key] and self._config.repeated == "refuse":
            self._calls[key] += 1
            return self._complain(text, REPEATED)
        # Counted only once it ran: a fault leaves the record as it was.
        output = self._tools[call.tool].run_text(call.argument)
        self._calls[key] += 1
        self._num_calls[call.tool] += 1
        self._budget.count()
        self._num_failed += output.failed
        return self._answer(text, output.text, executed=call.tool)

    def _answer(
        self,
        text: str,
        output: str,
        *,
        executed: str | None = None,
        invalid: bool = False,
        refused: bool = False,
    ) -> StepResult:
        content = render_result(output)
        self._turns.append(Turn(text=text, executed_tool=executed, result=content))
        tools = () if executed is None else (executed,)
        observation = Message(role="inline", content=content)
        return StepResult(
            message=observation, invalid=invalid, refused=refused, num_tool_calls=len(tools), tools=tools
        )

    def _complain(self, text: str, reason: str) -> StepResult:
        """An observation that says what was wrong, or the end when there were too many."""
        if self._num_invalid + 1 >= self._config.max_invalid:
            return self._end(text, invalid=True)
        self._num_invalid += 1
        return self._answer(text, reason, invalid=True)

    def _end(self, text: str, *, invalid: bool) -> StepResult:
        # Scored first: a judge's fault leaves the record as it was.
        score = self._score([*self._turns, Turn(text=text)])
        self._turns.append(Turn(text=text))
        self._num_invalid += invalid
        self._done = True
        return StepResult(message=None, reward=score.reward, done=True, invalid=invalid)

    def _score(self, turns: Sequence[Turn]) -> Score:
        judge, verifier = self._judge, self._verifier
        return score_turns(
            turns,
            self._task.answers,
            tuple(self._tools),
            self._config.reward,
            judged=None if judge is None else lambda prediction: judge.is_correct(self._task, prediction),
            verified=None if verifier is None else lambda prediction: verifier(self._task, prediction),
        )


class ToolEnvironmentFactory:
    """Makes environments over one set of tools, which it owns.

    Raises ToolUnavailable where the reward's judge does not answer.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Tool],
        config: EpisodeConfig,
        system_prompt: str,
        verifier: Verifier | None = None,
    ) -> None:
        self._verifier = verifier
        self._tools = {tool.name: tool for tool in tools}
        self._config = config
        self._system_prompt = system_prompt
        self._budget = CallBudget(config.max_batch_calls)
        try:
            self._judge = make_reward_judge(config.reward.judge)
        except BaseException:
            self.close()
            raise

    def __call__(self, task: Task) -> ToolEnvironment:
        """A fresh environment for one episode of the task."""
        return ToolEnvironment(
            task=task,
            tools=self._tools,
            config=self._config,
            system_prompt=self._system_prompt,
            budget=self._budget,
            judge=self._judge,
            verifier=self._verifier,
        )

    def take_share(self, begin: int, end: int, of: int) -> None:
        """See :class:`outrider.environments.base.CallCapped`."""
        self._budget.take_share(begin, end, of)

    def begin_batch(self, *, limited: bool) -> None:
        """See :class:`outrider.environments.base.RoundAware`."""
        self._budget.begin_batch(limited=limited)

    def begin_round(self) -> None:
        """See :class:`outrider.environments.base.RoundAware`."""
        self._budget.begin_round()

    def close(self) -> None:
        """Close the tools; may be called twice."""
        for tool in self._tools.values():
            tool.close()
