r"""One tool-reasoning episode with native tool calls: every call gets a tool message, a turn without calls
answers.

Calls and their faults come read (:func:`outrider.environments.base.turn_message`). The answer is the text of
the last turn: its ``\boxed{}`` where there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from outrider.environments.base import StepResult
from outrider.environments.grading.answers import last_boxed
from outrider.environments.tool_qa.rewards import RewardConfig, Score, final_answer, score_answer
from outrider.environments.tool_qa.tag_protocol import neutralise
from outrider.environments.tool_qa.tool_episode import OVER_LIMIT, REPEATED, ToolEpisode
from outrider.tokens.calls.format import call_id
from outrider.tokens.thoughts import without_thoughts
from outrider.tools.base import ToolOutput
from outrider.types import Message, ToolCall, ToolSchema


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
        """See :class:`outrider.environments.base.NativeTools`."""
        return self._tools.schemas

    @property
    def call_format(self) -> str:
        """See :class:`outrider.environments.base.NativeTools`."""
        assert self._config.call_format is not None  # the factory asks for it
        return self._config.call_format

    def copy(self) -> Self:
        """See :meth:`ToolEpisode.copy`."""
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
