"""One episode: a program that asks, and a policy that answers."""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outrider.environments.agent.launched import ProgramRunner, Report
from outrider.environments.agent.session import (
    Closed,
    Ended,
    Event,
    OpenQuestion,
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
from outrider.tokens.calls import fault_of, form_named, read_turn_unchecked
from outrider.tokens.parsed import split_thinking
from outrider.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from outrider.environments.agent.gateway import Gateway

_ONE_CALL: Final = "The program takes one tool call a turn (parallel_tool_calls = false)."


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
        self._question: OpenQuestion | None = None
        self._turn: SampledTurn | ServedTurn | None = None
        self._answered: tuple[Message, ...] = ()
        self._reward: Reward | None = None
        self._has_failed = False
        self._num_turns = 0
        self._num_unfit_calls = 0
        self._left_s = config.time_limit_s

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the program and wait for its first request. ``seed`` is its variable ``OUTRIDER_SEED``."""
        self.close()
        self._reward, self._has_failed, self._turn, self._answered = None, False, None, ()
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
            self._task, variables, lambda report: self._gateway.end(session, ended(report))
        )
        event = self._next()
        if not isinstance(event, OpenQuestion):
            why = f": {event.problem}" if isinstance(event, Ended) and event.problem else ""
            if session.num_refused:
                why += (
                    f"; {session.num_refused} of its requests were refused, the last: {session.last_refusal}"
                )
            raise EnvironmentFault(f"the program ended without asking the policy anything{why}")
        self._question = event
        return self.asked.messages

    @property
    def asked(self) -> Conversation:
        """The conversation of the program's pending request. Raises EnvironmentFault if there is none."""
        if self._question is None:
            raise EnvironmentFault("the program asks nothing")
        return self._question.ask.conversation

    @property
    def call_format(self) -> str | None:
        """The form of the policy's tool calls (``environment.tool_calls``); None without tool calls."""
        return self._config.tool_calls

    def read(self, text: str) -> Message:
        """Parse a turn into the message that the program will receive.

        As behind a server, the program gets every call that can be parsed, whether or not it fits a tool. If
        a call cannot be parsed, the program gets the turn as plain text.
        """
        asked, drawn = self.asked, self._turn
        if drawn is None or drawn.kind != "drawn":
            text = before_stop(text, asked.stop)
        elif drawn.finish == "stop":  # else none of them is in what the policy wrote
            text = before_stop(text, asked.stop, opened=len(drawn.opened))
        name = self._config.tool_calls
        form = None if name is None else form_named(name)
        turn = read_turn_unchecked(text, form, asked.tools)
        if problems := turn.problems or self._too_many(turn.tool_calls):
            reasoning, words, _ = split_thinking(text, form)
            return Message(role="assistant", content=words, reasoning=reasoning, problems=problems)
        calls = self._told(turn.tool_calls)
        return Message(role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=calls)

    def _told(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Calls as the program gets them. Their ids are unique in the episode: agents find the results by
        them.
        """
        return tuple(
            replace(call, call_id=f"c{self._num_turns:04d}{number:04d}") for number, call in enumerate(calls)
        )

    def _too_many(self, calls: Sequence[ToolCall]) -> tuple[str, ...]:
        """Of calls a program may take one alone. It is given none then: to give it the first would train on
        calls that it never saw.
        """
        return (_ONE_CALL,) if self.asked.one_call and len(calls) > 1 else ()

    def _taken(self, message: Message) -> Message:
        """A turn as the program takes it. Calls that a server read have other ids, and may be too many."""
        form, problems = self._config.tool_calls, self._too_many(message.tool_calls)
        if form is None or not problems:
            return replace(message, tool_calls=self._told(message.tool_calls))
        written = form_named(form).write(message.tool_calls)
        words = "\n".join(one for one in (message.content, written) if one)
        return replace(message, content=words, tool_calls=(), problems=(*message.problems, *problems))

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Store how the turn was sampled; the next ``read`` and ``step`` use it."""
        self._turn = turn

    def step(self, message: Message) -> StepResult:
        """Answer the program, and wait for what it asks next or for its end."""
        question, turn, self._turn = self._question, self._turn, None
        if question is None:
            raise EnvironmentFault("the program asks nothing")
        if question.ask.wants_logprobs and (turn is None or turn.kind != "drawn"):
            raise EnvironmentFault("a program that asks for log-probs needs turns that were drawn here")
        message = self._taken(message)
        self._num_turns += 1
        tools = question.ask.conversation.tools
        self._num_unfit_calls += sum(
            bool(call.problem or fault_of(call, tools)) for call in message.tool_calls
        )
        invalid = bool(message.problems)
        if not question.give(Answer(message=message, turn=turn)):
            return StepResult(messages=question.ask.conversation.messages[-1:], invalid=invalid)
        self._question = None
        self._answered = question.ask.conversation.messages
        return self._observed(self._next(), invalid=invalid)

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Answer the pending request with status 400 and wait for the next request or the program's end.

        Returns None if the conversation is too long and the program ends without a reward. Raises
        EnvironmentFault for other ends without a reward, unless ``failed_return`` is set.
        """
        question, session, self._turn = self._question, self._session, None
        if question is None or session is None:
            raise EnvironmentFault("the program asks nothing")
        code = "context_length_exceeded" if refusal.is_too_long else "invalid_request_error"
        session.refuse(question, Refused(400, code, refusal.reason, param="messages"))
        self._question = None
        event = self._event()
        if refusal.is_too_long and isinstance(event, Ended) and event.reward is None and not event.is_fault:
            return None
        return self._observed(self._required(event), invalid=False)

    def _observed(self, event: Event, *, invalid: bool) -> StepResult:
        """What the program asks next, as an answer to what the policy has said last; or its end."""
        if not isinstance(event, OpenQuestion):
            return StepResult(reward=self._ended(event).value, done=True, invalid=False)
        self._question = event
        said, before = event.ask.conversation.messages, self._answered
        new = said[len(before) + 1 :] if before and said[: len(before)] == before else said
        results = [one for one in new if one.role == "tool"] if before else []
        return StepResult(
            messages=new or said[-1:],
            invalid=invalid,
            num_tool_calls=len(results),
            tools=tuple(one.tool_name for one in results if one.tool_name),
        )

    def result(self) -> EpisodeResult:
        """What the program handed in; ``cut_return`` where it did not get that far."""
        reward = self._reward or Reward(value=self._config.cut_return)
        success = reward.value >= self._config.success_at if reward.success is None else reward.success
        session = self._session
        counted = {
            "num_requests": float(session.num_requests - session.num_unanswerable if session else 0),
            "num_refused_requests": float(session.num_refused if session else 0),
            "num_ignored_fields": float(session.num_ignored_fields if session else 0),
            "num_unfit_calls": float(self._num_unfit_calls),
            "num_failed": float(self._has_failed),
        }
        if self._config.response_format == "ignore":
            counted["num_ignored_formats"] = float(session.num_ignored_formats if session else 0)
        return EpisodeResult(
            episode_return=reward.value,
            success=success and self._reward is not None,
            metrics={**counted, **reward.metrics},
        )

    def close(self) -> None:
        """Kill the program and close its session; may be called twice."""
        session, self._session, self._question = self._session, None, None
        program, self._program = self._program, None
        if session is not None:
            self._gateway.forget(session)
        if program is not None:
            self._programs.kill(program)

    def _next(self) -> Event:
        """The program's next request, or its end. Raises EnvironmentFault for an end that is a fault."""
        return self._required(self._event())

    def _event(self) -> Event:
        """What comes next; the program has so much time in all. Raises EnvironmentFault."""
        session = self._session
        if session is None:
            raise EnvironmentFault("the episode was never reset, or is closed")
        began = time.monotonic()
        try:
            event = session.next(max(0.0, self._left_s))
        except queue.Empty:
            event = Ended(reward=None, problem=f"it took longer than {self._config.time_limit_s:g} s")
        self._left_s -= time.monotonic() - began
        if isinstance(event, Closed):
            raise EnvironmentFault("the episode was closed")
        return event

    def _required(self, event: Event) -> Event:
        """The event, unless it is an end without a result that nobody pays. Raises EnvironmentFault."""
        if isinstance(event, Ended) and event.reward is None:
            if event.unusable is not None:
                raise event.unusable
            if event.is_fault:
                raise EnvironmentFault(event.problem)
            if self._config.failed_return is None:
                raise EnvironmentFault(f"the agent program: {event.problem}")
        return event

    def _ended(self, event: Event) -> Reward:
        """Keep what an episode was worth."""
        reward = event if isinstance(event, Reward) else event.reward if isinstance(event, Ended) else None
        if reward is None:
            assert self._config.failed_return is not None  # _next has raised otherwise
            reward = Reward(value=self._config.failed_return, success=False)
            self._has_failed = True
        self._reward = reward
        return reward


def ended(report: Report) -> Ended:
    """What a report says of an episode."""
    tail = report.tail.strip().rpartition("\n")[2][-300:]
    try:
        found = read_json(report.result)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):  # the program has written there itself
        found = None
    if found is not None and "fault" in found:
        return Ended(reward=None, problem=str(found["fault"])[:300], is_fault=True)
    if report.status < 0:
        return Ended(reward=None, problem=f"it was ended by signal {-report.status} ({tail or 'no output'})")
    if found is None:
        return Ended(reward=None, problem=f"it ended with status {report.status} ({tail or 'no output'})")
    if "failed" in found:
        words = [str(found["failed"])[:300], *([tail] if tail else ())]
        return Ended(reward=None, problem=": ".join(words))
    if "error" in found:
        return Ended(reward=None, problem=str(found["error"])[:300])
    if "unusable" in found:
        return _unusable(str(found["unusable"])[:300])
    if found.get("value") is None:
        return Ended(reward=None, problem="it ended without a reward")
    try:
        return Ended(reward=read_reward(found["value"]))
    except NonFiniteResult as error:
        return Ended(reward=None, problem=str(error), unusable=NonFiniteResult(f"the agent program: {error}"))
    except InvalidResult as error:
        return _unusable(str(error))


def _unusable(problem: str) -> Ended:
    return Ended(reward=None, problem=problem, unusable=UnusableReward(problem))
