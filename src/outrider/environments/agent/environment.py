"""One episode: a program that asks, and a policy that answers."""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outrider.environments.agent.launched import ProgramRunner, Report
from outrider.environments.agent.session import (
    Closed,
    Event,
    PendingRequest,
    ProgramExit,
    Refused,
    Reward,
    Session,
    read_reward,
)
from outrider.environments.agent.settings import ProgramConfig
from outrider.environments.agent.wire import Answer, read_json
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.conversing import Conversation, Refusal, SampledTurn, ServedTurn, before_stop
from outrider.errors import EnvironmentFault, InvalidResult, NonFiniteResult, UnusableReward
from outrider.tokens.calls import find_call_error, get_call_format, read_turn_unchecked
from outrider.tokens.parsed import split_thinking
from outrider.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from outrider.environments.agent.gateway import Gateway

_SINGLE_CALL: Final = "The program takes one tool call a turn (parallel_tool_calls = false)."


class AgentEnvironment:
    """The program's requests are the observations, the policy's turns are the answers. Its requests wait in
    the order of their arrival and are answered one by one.
    """

    def __init__(
        self, *, gateway: "Gateway", programs: ProgramRunner, config: ProgramConfig, task: Task
    ) -> None:
        """Nothing is started before :meth:`reset`."""
        self._gateway = gateway
        self._programs = programs
        self._config = config
        self._task = task
        self._session: Session | None = None
        self._program: int | None = None
        self._pending: PendingRequest | None = None
        self._turn: SampledTurn | ServedTurn | None = None
        self._answered_messages: tuple[Message, ...] = ()
        self._reward: Reward | None = None
        self._has_failed = False
        self._num_turns = 0
        self._num_unfit_calls = 0
        self._left_s = config.time_limit_s

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the program and wait for its first request. ``seed`` is its variable ``OUTRIDER_SEED``."""
        self.close()
        self._reward, self._has_failed, self._turn, self._answered_messages = None, False, None, ()
        self._num_turns, self._num_unfit_calls, self._left_s = 0, 0, self._config.time_limit_s
        session = self._gateway.open(
            takes_tools=self._config.tool_calls is not None,
            ignores_formats=self._config.response_format == "ignore",
            ignores=self._config.ignored_fields,
        )
        self._session = session
        variables = {
            "OPENAI_BASE_URL": self._gateway.url,
            "OPENAI_API_KEY": session.key,
            "OUTRIDER_SEED": str(seed),
        }
        self._program = self._programs.start(
            self._task, variables, lambda report: self._gateway.end(session, read_exit(report))
        )
        event = self._next_event()
        if not isinstance(event, PendingRequest):
            reason = f": {event.problem}" if isinstance(event, ProgramExit) and event.problem else ""
            if session.num_refused:
                reason += (
                    f"; {session.num_refused} of its requests were refused, the last: {session.last_refusal}"
                )
            raise EnvironmentFault(f"the program ended without asking the policy anything{reason}")
        self._pending = event
        return self.request.messages

    @property
    def request(self) -> Conversation:
        """The conversation of the program's pending request. Raises EnvironmentFault if there is none."""
        if self._pending is None:
            raise EnvironmentFault("the program asks nothing")
        return self._pending.request.conversation

    @property
    def call_format(self) -> str | None:
        """The form of the policy's tool calls (``environment.tool_calls``); None without tool calls."""
        return self._config.tool_calls

    def read(self, text: str) -> Message:
        """Parse a turn into the message that the program will receive.

        As behind a server, the program gets every call that can be parsed, whether or not it fits a tool. If
        a call cannot be parsed, the program gets the turn as plain text.
        """
        request, sampled_turn = self.request, self._turn
        if sampled_turn is None or sampled_turn.kind != "drawn":
            text = before_stop(text, request.stop)
        elif sampled_turn.finish == "stop":  # else none of them is in what the policy wrote
            text = before_stop(text, request.stop, opened=len(sampled_turn.opened))
        name = self._config.tool_calls
        form = None if name is None else get_call_format(name)
        turn = read_turn_unchecked(text, form, request.tools)
        if problems := turn.problems or self._call_problems(turn.tool_calls):
            reasoning, words, _ = split_thinking(text, form)
            return Message(role="assistant", content=words, reasoning=reasoning, problems=problems)
        calls = self._with_call_ids(turn.tool_calls)
        return Message(role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=calls)

    def _with_call_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Calls as the program gets them. Their ids are unique in the episode: agents find the results by
        them.
        """
        return tuple(
            replace(call, call_id=f"c{self._num_turns:04d}{number:04d}") for number, call in enumerate(calls)
        )

    def _call_problems(self, calls: Sequence[ToolCall]) -> tuple[str, ...]:
        """Of calls a program may take one alone. It is given none then: to give it the first would train on
        calls that it never saw.
        """
        return (_SINGLE_CALL,) if self.request.single_call and len(calls) > 1 else ()

    def _program_message(self, message: Message) -> Message:
        """A turn as the program takes it. Calls that a server read have other ids, and may be too many."""
        form, problems = self._config.tool_calls, self._call_problems(message.tool_calls)
        if form is None or not problems:
            return replace(message, tool_calls=self._with_call_ids(message.tool_calls))
        written = get_call_format(form).write(message.tool_calls)
        words = "\n".join(text for text in (message.content, written) if text)
        return replace(message, content=words, tool_calls=(), problems=(*message.problems, *problems))

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Store how the turn was sampled; the next ``read`` and ``step`` use it."""
        self._turn = turn

    def step(self, message: Message) -> StepResult:
        """Answer the program, and wait for what it asks next or for its end."""
        pending, turn, self._turn = self._pending, self._turn, None
        if pending is None:
            raise EnvironmentFault("the program asks nothing")
        if pending.request.include_logprobs and (turn is None or turn.kind != "drawn"):
            raise EnvironmentFault("a program that asks for log-probs needs turns that were drawn here")
        message = self._program_message(message)
        self._num_turns += 1
        tools = pending.request.conversation.tools
        self._num_unfit_calls += sum(
            bool(call.problem or find_call_error(call, tools)) for call in message.tool_calls
        )
        invalid = bool(message.problems)
        if not pending.add_answer(Answer(message=message, turn=turn)):
            return StepResult(messages=pending.request.conversation.messages[-1:], invalid=invalid)
        self._pending = None
        self._answered_messages = pending.request.conversation.messages
        return self._step_result(self._next_event(), invalid=invalid)

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Answer the pending request with status 400 and wait for the next request or the program's end.

        Returns None if the conversation is too long and the program ends without a reward. Raises
        EnvironmentFault for other ends without a reward, unless ``failed_return`` is set.
        """
        pending, session, self._turn = self._pending, self._session, None
        if pending is None or session is None:
            raise EnvironmentFault("the program asks nothing")
        code = "context_length_exceeded" if refusal.is_too_long else "invalid_request_error"
        session.refuse(pending, Refused(400, code, refusal.reason, param="messages"))
        self._pending = None
        event = self._event()
        if (
            refusal.is_too_long
            and isinstance(event, ProgramExit)
            and event.reward is None
            and not event.is_fault
        ):
            return None
        return self._step_result(self._check_event(event), invalid=False)

    def _step_result(self, event: Event, *, invalid: bool) -> StepResult:
        """What the program asks next, as an answer to what the policy has said last; or its end."""
        if not isinstance(event, PendingRequest):
            return StepResult(reward=self._final_reward(event).value, done=True, invalid=False)
        self._pending = event
        messages, before = event.request.conversation.messages, self._answered_messages
        new = messages[len(before) + 1 :] if before and messages[: len(before)] == before else messages
        results = [message for message in new if message.role == "tool"] if before else []
        return StepResult(
            messages=new or messages[-1:],
            invalid=invalid,
            num_tool_calls=len(results),
            tools=tuple(message.tool_name for message in results if message.tool_name),
        )

    def result(self) -> EpisodeResult:
        """What the program handed in; ``cut_return`` where it did not get that far."""
        reward = self._reward or Reward(value=self._config.cut_return)
        success = reward.value >= self._config.success_at if reward.success is None else reward.success
        session = self._session
        counts = {
            "num_requests": float(session.num_requests - session.num_unanswerable if session else 0),
            "num_refused_requests": float(session.num_refused if session else 0),
            "num_ignored_fields": float(session.num_ignored_fields if session else 0),
            "num_unfit_calls": float(self._num_unfit_calls),
            "num_failed": float(self._has_failed),
        }
        if self._config.response_format == "ignore":
            counts["num_ignored_formats"] = float(session.num_ignored_formats if session else 0)
        return EpisodeResult(
            episode_return=reward.value,
            success=success and self._reward is not None,
            metrics={**counts, **reward.metrics},
        )

    def close(self) -> None:
        """Kill the program and close its session; may be called twice."""
        session, self._session, self._pending = self._session, None, None
        program, self._program = self._program, None
        if session is not None:
            self._gateway.close_session(session)
        if program is not None:
            self._programs.kill(program)

    def _next_event(self) -> Event:
        """The program's next request, or its end. Raises EnvironmentFault for an end that is a fault."""
        return self._check_event(self._event())

    def _event(self) -> Event:
        """What comes next; the program has so much time in all. Raises EnvironmentFault."""
        session = self._session
        if session is None:
            raise EnvironmentFault("the episode was never reset, or is closed")
        start = time.monotonic()
        try:
            event = session.next(max(0.0, self._left_s))
        except queue.Empty:
            event = ProgramExit(reward=None, problem=f"it took longer than {self._config.time_limit_s:g} s")
        self._left_s -= time.monotonic() - start
        if isinstance(event, Closed):
            raise EnvironmentFault("the episode was closed")
        return event

    def _check_event(self, event: Event) -> Event:
        """The event, unless it is an end without a result that nobody pays. Raises EnvironmentFault."""
        if isinstance(event, ProgramExit) and event.reward is None:
            if event.unusable is not None:
                raise event.unusable
            if event.is_fault:
                raise EnvironmentFault(event.problem)
            if self._config.failed_return is None:
                raise EnvironmentFault(f"the agent program: {event.problem}")
        return event

    def _final_reward(self, event: Event) -> Reward:
        """Keep what an episode was worth."""
        reward = (
            event if isinstance(event, Reward) else event.reward if isinstance(event, ProgramExit) else None
        )
        if reward is None:
            assert self._config.failed_return is not None  # _next has raised otherwise
            reward = Reward(value=self._config.failed_return, success=False)
            self._has_failed = True
        self._reward = reward
        return reward


def read_exit(report: Report) -> ProgramExit:
    """What a report says of an episode."""
    tail = report.tail.strip().rpartition("\n")[2][-300:]
    try:
        result = read_json(report.result)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):  # the program has written there itself
        result = None
    if result is not None and "fault" in result:
        return ProgramExit(reward=None, problem=str(result["fault"])[:300], is_fault=True)
    if report.status < 0:
        return ProgramExit(
            reward=None, problem=f"it was ended by signal {-report.status} ({tail or 'no output'})"
        )
    if result is None:
        return ProgramExit(
            reward=None, problem=f"it ended with status {report.status} ({tail or 'no output'})"
        )
    if "failed" in result:
        words = [str(result["failed"])[:300], *([tail] if tail else ())]
        return ProgramExit(reward=None, problem=": ".join(words))
    if "error" in result:
        return ProgramExit(reward=None, problem=str(result["error"])[:300])
    if "unusable" in result:
        return _unusable(str(result["unusable"])[:300])
    if result.get("value") is None:
        return ProgramExit(reward=None, problem="it ended without a reward")
    try:
        return ProgramExit(reward=read_reward(result["value"]))
    except NonFiniteResult as error:
        return ProgramExit(
            reward=None, problem=str(error), unusable=NonFiniteResult(f"the agent program: {error}")
        )
    except InvalidResult as error:
        return _unusable(str(error))


def _unusable(problem: str) -> ProgramExit:
    return ProgramExit(reward=None, problem=problem, unusable=UnusableReward(problem))
