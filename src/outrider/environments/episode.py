"""The driver of one episode: whatever steps an environment does it through :class:`Episode`."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Self, TypeVar

from outrider.environments.base import (
    Env,
    EpisodeResult,
    StepResult,
    as_bool,
    as_count,
    as_float,
    as_messages,
    as_metrics,
    as_names,
    describe,
)
from outrider.environments.conversations import Conversation, ExternalAgent, Refusal, SampledTurn, ServedTurn
from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.tokens.call_formats import convert_calls, get_call_format, read_turn
from outrider.types import Message, Step, ToolSchema

_T = TypeVar("_T")


class Episode:
    """One episode of an environment and its history.

    Checks every value that the environment returns and converts numbers and flags to Python's own types.
    Methods that call the environment raise InvalidResult for values of a wrong type and NonFiniteResult for
    NaN and infinity. ``actions`` and ``results`` are the texts that the environment was given and its
    answers; ``prompt`` is what ``reset`` returned.
    """

    is_external = False
    """Whether an external program keeps the conversation (:class:`ExternalEpisode`)."""

    def __init__(self, environment: Env) -> None:
        self.environment = environment
        self.prompt: tuple[Message, ...] = ()
        self.actions: list[str] = []
        self.results: list[StepResult] = []
        self.ends_with_answer = False

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """Tools that the prompt describes and that calls are checked against; empty if turns are text."""
        schemas: Sequence[ToolSchema] = getattr(self.environment, "tool_schemas", ())
        return schemas

    @property
    def call_format(self) -> str | None:
        """The form of native tool calls; None if turns are text."""
        form: str | None = getattr(self.environment, "call_format", None)
        return form

    @property
    def steps(self) -> tuple[Step, ...]:
        """The history as the steps of a trajectory."""
        return tuple(
            Step(text=text, observation=result.text, is_terminal=result.done)
            for text, result in zip(self.actions, self.results, strict=True)
        )

    def start(self, seed: int) -> tuple[Message, ...]:
        """Reset the environment and return the prompt."""
        self.prompt = as_messages(self.environment.reset(seed), "what reset returned")
        if not self.prompt:
            raise InvalidResult("reset gives no message: the policy would have no prompt")
        return self.prompt

    def read(self, text: str) -> Message:
        """Parse a turn of the policy into the message that the environment gets: its tool calls are parsed if
        the environment calls tools natively. Raises EnvironmentFault for whatever breaks in the environment's
        code.
        """
        if self.call_format is None:
            return Message(role="assistant", content=text)
        return self._guarded(lambda: self._read_calls(text))

    def _read_calls(self, text: str) -> Message:
        assert self.call_format is not None
        turn = read_turn(text, get_call_format(self.call_format), self.tools)
        return Message(
            role="assistant",
            content=turn.content,
            reasoning=turn.reasoning,
            tool_calls=turn.tool_calls,
            problems=turn.problems,
        )

    def convert(self, text: str) -> str:
        """A recorded turn with its tool calls in this environment's form: imported chats have them in the
        Hermes form. Raises EnvironmentFault as :meth:`read` does.
        """
        form = self.call_format
        if form is None:
            return text
        return self._guarded(lambda: convert_calls(text, get_call_format(form), self.tools))

    def _guarded(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except (ToolFault, EnvironmentFault, InvalidResult):
            raise
        except (Exception, SystemExit) as error:  # a plug-in's code must not end the run
            kind = type(self.environment).__name__
            raise EnvironmentFault(f"{kind} cannot read a turn: {type(error).__name__}: {error}") from error

    def act(self, text: str, turn: Message | None = None) -> StepResult:
        """Step the environment with one policy turn. ``turn`` is the parsed text (None: parse it here)."""
        turn = self.read(text) if turn is None else turn
        # A native turn without calls is an answer as a whole. If the token limit cuts it, it is not the
        # answer that the policy was writing. An external program decides itself what a turn is.
        has_calls = bool(turn.tool_calls or turn.problems)
        self.ends_with_answer = self.call_format is not None and not self.is_external and not has_calls
        result = _converted(self.environment.step(turn), "step")
        self.actions.append(text)
        self.results.append(result)
        return result

    def play(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """Act with texts until they or the episode end; texts after the end are left out."""
        num_before = len(self.actions)
        for text in texts:
            if self.act(text).done:
                break
        return self.steps[num_before:]

    def result(self) -> EpisodeResult:
        """The environment's record of the episode."""
        record: object = self.environment.result()
        if not isinstance(record, EpisodeResult):
            raise InvalidResult(f"what result returned is {describe(record)}, no EpisodeResult")
        return replace(
            record,
            episode_return=as_float(record.episode_return, "episode_return"),
            success=as_bool(record.success, "success"),
            metrics=as_metrics(record.metrics),
        )

    # Forks

    def history(self) -> Self:
        """The episode so far, for :meth:`replay` and :meth:`resume`; it does not change when this one goes
        on.
        """
        twin = copy(self)
        twin.actions, twin.results = list(self.actions), list(self.results)
        return twin

    def resume(self, history: Self) -> None:
        """Continue in a copied environment whose episode so far is ``history``."""
        self.prompt, self.actions, self.results = history.prompt, list(history.actions), list(history.results)

    def replay(self, history: Self, seed: int) -> Iterator[Callable[[], object]]:
        """The calls that bring a fresh environment to where ``history`` ends, to be made one after the other.

        Raises EnvironmentFault, as the calls do, if the environment answers differently.
        """
        yield partial(self.start, seed)
        self._require_prompt(history)
        for number in range(len(history.actions)):
            yield partial(self._repeat, history, number)

    def _require_prompt(self, history: Self) -> None:
        if self.prompt != history.prompt:
            raise EnvironmentFault("the environment opened differently: it cannot fork by replay")

    def _repeat(self, history: Self, number: int) -> None:
        answer, expected = asdict(self.act(history.actions[number])), asdict(history.results[number])
        if differences := [name for name, value in expected.items() if answer[name] != value]:
            raise EnvironmentFault(
                f"a replayed prefix was answered differently ({', '.join(differences)}): "
                "this environment cannot fork by replay"
            )

    # Conversations of external programs: an ordinary environment has no requests.

    @property
    def request(self) -> Conversation | None:
        """The pending request of an external program; None if the rollout keeps the conversation itself."""
        return None


class ExternalEpisode(Episode):
    """An episode whose conversation an external program keeps. Records the requests and refusals for replays.

    ``turns`` are the sampled turns by number of the step; ``refusals`` are the refused requests with the
    number of the step before which they were refused.
    """

    is_external = True

    def __init__(self, environment: ExternalAgent) -> None:
        super().__init__(environment)
        self.environment: ExternalAgent
        self.requests: list[Conversation] = []
        self.turns: dict[int, SampledTurn] = {}
        self.refusals: list[tuple[int, Refusal]] = []
        self.pending: Conversation | None = None  # the last request of a history

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return self.request.tools

    @property
    def request(self) -> Conversation:
        return self.environment.request

    def read(self, text: str) -> Message:
        return self._guarded(lambda: self.environment.read(text))

    def set_sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Report how the next turn was sampled; called before :meth:`read`."""
        if isinstance(turn, SampledTurn):
            self.turns[len(self.actions)] = turn
        self.environment.sampled(turn)

    def act(self, text: str, turn: Message | None = None) -> StepResult:
        self.requests.append(self.request)
        return super().act(text, turn)

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Refuse the pending request. Returns the program's next request or its end, or None if the program
        ended because its conversation is too long.
        """
        self.refusals.append((len(self.actions), refusal))
        result: object = self.environment.refuse(refusal)
        converted = None if result is None else _converted(result, "refuse")
        if converted is not None and not converted.done and not self.actions:
            self.prompt = self.request.messages
        return converted

    def history(self) -> Self:
        twin = super().history()
        twin.requests, twin.turns, twin.refusals = list(self.requests), dict(self.turns), list(self.refusals)
        # The environment of a history that is copied again has gone on.
        twin.pending = self.request if self.pending is None else self.pending
        return twin

    def resume(self, history: Self) -> None:
        super().resume(history)
        self.requests, self.turns = list(history.requests), dict(history.turns)
        self.refusals = list(history.refusals)

    def replay(self, history: Self, seed: int) -> Iterator[Callable[[], object]]:
        yield partial(self.start, seed)
        yield from self._refuse_again(history, 0)
        self._require_prompt(history)
        for number in range(len(history.actions)):
            self._require_request(history.requests[number])
            if number in history.turns:
                self.set_sampled(history.turns[number])
            yield partial(self._repeat, history, number)
            yield from self._refuse_again(history, number + 1)
        self._require_request(history.pending)

    def _refuse_again(self, history: Self, num_actions: int) -> Iterator[Callable[[], object]]:
        for number, refusal in history.refusals:
            if number == num_actions:
                yield partial(self._require_next, refusal)

    def _require_next(self, refusal: Refusal) -> None:
        result = self.refuse(refusal)
        if result is None or result.done:
            raise EnvironmentFault("a program ended where it went on: it cannot fork by replay")

    def _require_request(self, expected: Conversation | None) -> None:
        if self.request != expected:
            raise EnvironmentFault("a program asked something else the second time: it cannot fork by replay")


def open_episode(environment: Env) -> Episode:
    """The driver of an environment."""
    return ExternalEpisode(environment) if isinstance(environment, ExternalAgent) else Episode(environment)


def _converted(result: object, method: str) -> StepResult:
    """The result that ``method`` of an environment returned, with its fields checked and converted."""
    if not isinstance(result, StepResult):
        raise InvalidResult(f"what {method} returned is {describe(result)}, no StepResult")
    if result.message is not None and not isinstance(result.message, Message):
        raise InvalidResult(f"message is {describe(result.message)}, no Message")
    return replace(
        result,
        messages=as_messages(result.messages, "messages"),
        reward=as_float(result.reward, "reward"),
        done=as_bool(result.done, "done"),
        invalid=as_bool(result.invalid, "invalid"),
        refused=as_bool(result.refused, "refused"),
        truncated=as_bool(result.truncated, "truncated"),
        num_tool_calls=as_count(result.num_tool_calls, "num_tool_calls"),
        tools=as_names(result.tools),
    )
