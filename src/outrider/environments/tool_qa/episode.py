"""One tool-reasoning episode in the tag protocol: reads policy turns, runs tools within limits, keeps the
record.
"""

from collections.abc import Sequence
from typing import Self

from outrider.environments.base import StepResult
from outrider.environments.tool_qa.call_budget import CallBudget
from outrider.environments.tool_qa.native import NativeToolEnvironment
from outrider.environments.tool_qa.reward_judge import make_reward_judge
from outrider.environments.tool_qa.rewards import Score, score_turns
from outrider.environments.tool_qa.tag_protocol import (
    Answer,
    Call,
    Malformed,
    NoAction,
    Turn,
    parse_action,
    render_result,
)
from outrider.environments.tool_qa.tool_episode import OVER_LIMIT, REPEATED, EpisodeConfig, Judge, ToolEpisode
from outrider.errors import ConfigError
from outrider.tokens.calls import describe_unwritable
from outrider.tools.base import Tool
from outrider.tools.toolset import Toolset
from outrider.types import Message, Task


class ToolEnvironment(ToolEpisode):
    """Plays one task whose calls, results and answer stand inside one assistant message."""

    def _start(self) -> None:
        super()._start()
        self._turns: list[Turn] = []

    def copy(self) -> Self:
        """See :meth:`ToolEpisode.copy`."""
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

    Raises ToolUnavailable where the reward's judge does not answer, and ConfigError where calls in that form
    cannot name one of the tools or its arguments.
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
        self._budget = CallBudget(config.max_batch_calls)
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
            budget=self._budget,
            judge=self._judge,
        )

    def set_share(self, begin: int, end: int, num_groups: int) -> None:
        """See :class:`outrider.environments.base.CallCapped`."""
        self._budget.set_share(begin, end, num_groups)

    def num_spent(self) -> int:
        """See :class:`outrider.environments.base.CallCapped`."""
        return self._budget.num_spent()

    def resume_batch(self, num_spent: int) -> None:
        """See :class:`outrider.environments.base.CallCapped`."""
        self._budget.resume_batch(num_spent)

    def begin_batch(self, *, limited: bool) -> None:
        """See :class:`outrider.environments.base.RoundAware`."""
        self._budget.begin_batch(limited=limited)

    def begin_round(self) -> None:
        """See :class:`outrider.environments.base.RoundAware`."""
        self._budget.begin_round()

    def close(self) -> None:
        """Close the tools; may be called twice."""
        self._tools.close()
