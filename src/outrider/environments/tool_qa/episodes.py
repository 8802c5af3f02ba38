"""Episodes with tools, called by tags or natively."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.grading.answers import last_boxed
from outrider.environments.tool_qa.rewards import (
    Judged,
    RewardConfig,
    Score,
    final_answer,
    make_reward_judge,
    score_answer,
    score_turns,
)
from outrider.environments.tool_qa.tag_protocol import (
    Answer,
    Call,
    Malformed,
    NoAction,
    Turn,
    neutralise,
    parse_action,
    render_result,
)
from outrider.errors import ConfigError
from outrider.tokens.call_formats import describe_unwritable
from outrider.tokens.thoughts import without_thoughts
from outrider.tokens.tool_calls import call_id
from outrider.tools.base import Tool, ToolOutput, Toolset
from outrider.tools.concurrency import CallBudget
from outrider.types import Message, Task, ToolCall, ToolSchema

# What episodes with tools have in common, whatever protocol their calls are written in: limits and the
# record.


OVER_LIMIT = "No tool calls are left. Give the answer now."
REPEATED = "This was asked before. Ask something else or answer."


Judge: TypeAlias = Callable[[Task, str], float | None]
"""Correctness of an answer to a task, as :data:`~outrider.environments.tool_qa.rewards.Judged`."""


class EpisodeConfig(EnvironmentSettings):
    """Limits and reward of a tool-reasoning episode. ``has_verifier``: whether the tasks bring their own."""

    has_verifier: ClassVar[bool] = False
    reports_metrics: ClassVar[bool] = False  # calls, refusals and rewards have metrics of their own

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


# One tool-reasoning episode with native tool calls: every call gets a tool message, a turn without calls
# answers.
#
# Calls and their faults come read (:class:`outrider.environments.episode.Episode`). The answer is the text
# of the last turn: its ``\boxed{}`` where there is one.


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurn:
    """One policy turn: its words, whether it thought, what was wrong with its calls, the tools that ran."""

    content: str
    has_thought: bool
    num_calls: int = 0
    problems: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()


class NativeToolEnvironment(ToolEpisode):
    """Plays one task whose tools are called natively."""

    def _start(self) -> None:
        super()._start()
        self._turns: list[NativeTurn] = []

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        return self._tools.schemas

    @property
    def call_format(self) -> str:
        assert self._config.call_format is not None  # the factory asks for it
        return self._config.call_format

    def copy(self) -> Self:
        twin = super().copy()
        twin._turns = list(self._turns)
        return twin

    def _act(self, message: Message) -> StepResult:
        turn = NativeTurn(
            content=message.content,
            has_thought=bool(message.reasoning),
            num_calls=len(message.tool_calls),
            problems=message.problems,
        )
        if not message.tool_calls and not message.problems:
            return self._end(turn, invalid=not without_thoughts(message.content).strip())
        is_over = bool(message.tool_calls) and not self._is_open()
        if is_over and self._num_refused:
            self._num_refused += 1
            return self._end(turn, invalid=True)
        if message.problems and self._num_invalid + 1 >= self._config.max_invalid:
            return self._end(turn, invalid=True)
        return self._answer(turn, message.tool_calls)

    def _answer(self, turn: NativeTurn, calls: Sequence[ToolCall]) -> StepResult:
        """Run the calls in their order; each gets a message, and each problem one behind them."""
        outputs: list[tuple[ToolCall, ToolOutput]] = []
        messages: list[Message] = []
        is_refused = is_repeated = False
        seen_keys: set[tuple[str, str]] = set()
        for call in calls:
            key = self._tools.call_key(call)
            if not self._is_open(len(outputs)):
                is_refused = True
                messages.append(_result(call, OVER_LIMIT))
            elif self._is_refused_repetition(key) or (key in seen_keys and self._config.repeated == "refuse"):
                is_repeated = True
                messages.append(_result(call, REPEATED))
            else:
                output = self._tools.run_call(call)
                outputs.append((call, output))
                messages.append(_result(call, output.text))
            seen_keys.add(key)
        # Behind the last one: a fault leaves the record as it was.
        for call, output in outputs:
            self._count(self._tools.call_key(call), failed=output.failed)
        first = len(calls) + len(turn.problems)  # behind the numbers of all calls, read or not
        messages += [_complaint(problem, number) for number, problem in enumerate(turn.problems, first)]
        executed = tuple(call.name for call, _ in outputs)
        self._turns.append(
            NativeTurn(
                content=turn.content,
                has_thought=turn.has_thought,
                num_calls=turn.num_calls,
                problems=turn.problems,
                executed=executed,
            )
        )
        is_invalid = bool(turn.problems) or is_repeated
        self._num_refused += is_refused
        self._num_invalid += is_invalid
        if is_invalid and self._num_invalid >= self._config.max_invalid:
            self._done = True
            reward = self._score().reward
            return StepResult(
                reward=reward, done=True, invalid=True, num_tool_calls=len(executed), tools=executed
            )
        return StepResult(
            messages=tuple(messages),
            invalid=is_invalid,
            refused=is_refused and not outputs,
            num_tool_calls=len(executed),
            tools=executed,
        )

    def _end(self, turn: NativeTurn, *, invalid: bool) -> StepResult:
        # Scored first: a judge's fault leaves the record as it was.
        score = self._scored([*self._turns, turn])
        self._turns.append(turn)
        self._num_invalid += invalid
        self._done = True
        return StepResult(reward=score.reward, done=True, invalid=invalid)

    def _score(self) -> Score:
        return self._scored(self._turns)

    def _scored(self, turns: Sequence[NativeTurn]) -> Score:
        reward = self._config.reward
        fault = native_fault(turns, reward)
        answers = turns and not turns[-1].num_calls and not turns[-1].problems
        return score_answer(
            final_answer(turns[-1].content) if answers else "",
            self._task.answers,
            reward,
            fault=fault,
            num_tools=len({name for turn in turns for name in turn.executed}),
            judged=self._judged,
        )


def native_fault(turns: Sequence[NativeTurn], config: RewardConfig) -> str | None:
    """Why the episode's format is bad, or None when it is good: thought at least once where that is required,
    no unreadable call, and a last turn that answers, with a closed box where required.
    """
    if not turns:
        return "no turn"
    if config.require_think and not any(turn.has_thought for turn in turns):
        return "no <think>"
    if any(turn.problems for turn in turns):
        return "a call that cannot be read"
    if turns[-1].num_calls or not without_thoughts(turns[-1].content).strip():
        return "the last turn does not answer"
    if config.require_boxed and last_boxed(turns[-1].content) is None:
        return "no closed \\boxed{} in the answer"
    return None


def _complaint(problem: str, number: int) -> Message:
    """With the id of a call all the same: some templates refuse a tool's message without one."""
    return Message(role="tool", content=problem, tool_call_id=call_id(number))


def _result(call: ToolCall, text: str) -> Message:
    return Message(
        role="tool", content=neutralise(text).strip(), tool_call_id=call.call_id, tool_name=call.name
    )


# One tool-reasoning episode in the tag protocol: reads policy turns, runs tools within limits, keeps the
# record.


class ToolEnvironment(ToolEpisode):
    """Plays one task whose calls, results and answer stand inside one assistant message."""

    def _start(self) -> None:
        super()._start()
        self._turns: list[Turn] = []

    def copy(self) -> Self:
        twin = super().copy()
        twin._turns = list(self._turns)
        return twin

    def _act(self, message: Message) -> StepResult:
        action = parse_action(message.content, self._tools.names)
        match action:
            case Answer():
                return self._end(message.content, invalid=False)
            case NoAction():
                return self._end(message.content, invalid=True)
            case Malformed(reason=reason):
                return self._complain(message.content, reason)
            case Call():
                return self._call(message.content, action)

    def _call(self, text: str, call: Call) -> StepResult:
        if not self._is_open():
            self._num_refused += 1
            return (
                self._end(text, invalid=True)
                if self._num_refused > 1
                else self._answer(text, OVER_LIMIT, refused=True)
            )
        key = (call.tool, " ".join(call.argument.split()) if call.tool == "search" else call.argument)
        if self._is_refused_repetition(key):
            self._calls[key] += 1
            return self._complain(text, REPEATED)
        output = self._tools.run_text(call.tool, call.argument)
        self._count(key, failed=output.failed)
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
        score = self._scored([*self._turns, Turn(text=text)])
        self._turns.append(Turn(text=text))
        self._num_invalid += invalid
        self._done = True
        return StepResult(message=None, reward=score.reward, done=True, invalid=invalid)

    def _score(self) -> Score:
        return self._scored(self._turns)

    def _scored(self, turns: Sequence[Turn]) -> Score:
        answers, tools = self._task.answers, self._tools.names
        return score_turns(turns, answers, tools, self._config.reward, judged=self._judged)


class ToolEnvironmentFactory:
    """Makes environments over one set of tools, which it owns; ``config.call_format`` decides about the
    protocol.

    ``call_budget`` bounds the calls of a batch. Raises ToolUnavailable where the reward's judge does not
    answer, and ConfigError where calls in that form cannot name one of the tools or its arguments.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Tool],
        config: EpisodeConfig,
        system_prompt: str,
        verifier: Judge | None = None,
    ) -> None:
        """``verifier`` is the tasks' own, for the reward ``verifier``."""
        self._tools = Toolset(tools)
        self._config = config
        self._system_prompt = system_prompt
        self.call_budget = CallBudget(config.max_batch_calls)
        try:
            if config.call_format and (
                problem := describe_unwritable(config.call_format, self._tools.schemas)
            ):
                raise ConfigError(f"environment.protocol: {problem}")
            judge = make_reward_judge(config.reward.judge)
        except BaseException:
            self.close()
            raise
        self._judge = verifier if judge is None else judge.is_correct

    def __call__(self, task: Task) -> ToolEpisode:
        """A fresh environment for one episode of the task."""
        environment_class = ToolEnvironment if self._config.call_format is None else NativeToolEnvironment
        return environment_class(
            task=task,
            tools=self._tools,
            config=self._config,
            system_prompt=self._system_prompt,
            budget=self.call_budget,
            judge=self._judge,
        )

    def close(self) -> None:
        """Close the tools; may be called twice."""
        self._tools.close()
