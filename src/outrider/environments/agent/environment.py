"""Which program is the agent, what it works on, and how an episode of it is paid."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from outrider.environments.agent.launcher import FunctionRole, load_function
from outrider.environments.agent.programs import ProgramRunner, Programs, Report
from outrider.environments.agent.requests import IGNORABLE, Answer, read_json
from outrider.environments.agent.server import (
    Closed,
    Event,
    PendingRequest,
    ProgramExit,
    Refused,
    Reward,
    Session,
    read_reward,
)
from outrider.environments.base import EnvironmentSettings, EpisodeResult, ExternalEpisode, StepResult
from outrider.environments.conversations import (
    Conversation,
    ExternalAgent,
    Refusal,
    SampledTurn,
    ServedTurn,
    before_stop,
)
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.errors import (
    DataError,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolUnavailable,
    UnusableReward,
)
from outrider.plugins.registry import is_import_path
from outrider.tokens.call_formats import CallFormatName, find_call_error, get_call_format, read_turn_unchecked
from outrider.tokens.tool_calls import split_thinking
from outrider.types import Message, Step, Task, ToolCall

if TYPE_CHECKING:
    from outrider.environments.agent.server import Gateway


class ProgramConfig(EnvironmentSettings):
    """How an episode is paid whose policy is asked by a program, and what such a program may take."""

    tool_calls: CallFormatName | None = None
    """The form of the policy's native tool calls. None: requests with tools are refused."""
    response_format: Literal["refuse", "ignore"] = "refuse"
    """What becomes of requests whose answer has to be JSON (``response_format``, ``text.format``), to which
    nothing holds the policy. ``ignore``: they are answered and counted (``num_ignored_formats``).
    """
    ignored_fields: tuple[str, ...] = ()
    """Fields of requests that are refused by default, and that are ignored and counted instead
    (``num_ignored_fields``), such as ``logit_bias``.
    """
    success_at: float = 1.0
    """An episode with at least this return is a success, where the reward does not say so itself."""
    time_limit_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a program may take, without those in which it waits for the policy."""
    failed_return: float | None = None
    """Return of a program that ends with an error or runs out of time. None: that is a fault, and the rollout
    is played again.
    """
    cut_return: float = 0.0
    """Return of an episode that ``rollout.max_turns`` or a full context ended."""
    is_repeatable: bool = False
    """Whether a program that gets the same answers always asks the same: methods that fork by replay (ARPO,
    Tree-GRPO) need it.
    """
    max_programs: Annotated[int, Field(ge=1)] | None = None
    """Programs at a time, of all rollout workers together."""

    @field_validator("ignored_fields")
    @classmethod
    def _can_be_ignored(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in IGNORABLE:
                raise ValueError(f"{name!r} is no field that can be ignored: {', '.join(sorted(IGNORABLE))}")
        return names

    @property
    def has_experts(self) -> bool:
        """Nobody knows what a program would have to be told."""
        return False

    @property
    def call_format(self) -> str | None:
        return self.tool_calls

    @property
    def keeps_conversations(self) -> bool:
        return True

    @property
    def max_concurrent(self) -> int | None:
        return self.max_programs

    def waiting_s(self, num_concurrent: int) -> float:
        """A program's own limit ends it first: only then is it one that took too long."""
        return self.time_limit_s

    def replayed_differently(self) -> list[str]:
        """All of them, unless the recipe says otherwise."""
        return [] if self.is_repeatable else [self.type]


class AgentConfig(ProgramConfig):
    """A program of yours that speaks to an OpenAI endpoint. It owns its loop, its prompts and its tools; the
    endpoint that it is given (``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``) is the policy.
    """

    type: Literal["agent"] = "agent"
    function: str | None = None
    """A Python function, as ``my_agent:run``: called with the task, in a process of its own per episode. What
    it returns is the reward (a number, or an object with ``reward``, ``success`` and ``metrics``), or what
    ``reward`` is given.
    """
    command: tuple[str, ...] = ()
    """Or a program with its arguments, in which ``{question}`` stands for the question. The task is its
    standard input, as JSON; its standard output is what ``reward`` is given.
    """
    reward: str | None = None
    """A function ``my_agent:score``, called with the task and what the program came back with; returns as
    ``function`` does. None: the function returns the reward, or the program posts it to ``/reward`` under
    the base URL.
    """
    expert: str | None = None
    """A function ``my_agent:answer`` that knows what to say, for a cold start: called with the task and the
    conversation (a list of objects with ``role`` and ``content``), it gives the text of the policy's turn.
    Episodes that are no success are not used.
    """
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None

    @model_validator(mode="after")
    def _validate(self) -> "AgentConfig":
        if (self.function is None) == (not self.command):
            raise ValueError("set exactly one of function and command")
        for name in ("function", "reward", "expert"):
            value = getattr(self, name)
            if value is not None and not is_import_path(value):
                raise ValueError(f"{name} is an import path such as my_agent:run, not {value!r}")
        return self

    @property
    def has_experts(self) -> bool:
        """Where a function is named."""
        return self.expert is not None

    def imported(self) -> Mapping[str, str]:
        """The functions that the recipe names."""
        return {str(key): path for key, path in self._functions().items()}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """They, as they are called."""
        return {key: partial(load_function, key, path) for key, path in self._functions().items()}

    def _functions(self) -> Mapping[FunctionRole, str]:
        paths: dict[FunctionRole, str | None] = {
            "function": self.function, "reward": self.reward, "expert": self.expert
        }  # fmt: skip
        return {key: path for key, path in paths.items() if path is not None}


# One episode: a program that asks, and a policy that answers.


_SINGLE_CALL: Final = "The program takes one tool call a turn (parallel_tool_calls = false)."


class AgentEnvironment(ExternalAgent):
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


# What the episodes of one run share: the server that programs ask, and whoever starts them.


class ProgramFactory:
    """Owns the server that programs speak to and the process that runs them."""

    def __init__(self, config: ProgramConfig, launch: Callable[[], ProgramRunner]) -> None:
        """Raises ToolUnavailable where the server's packages are not there, and what ``launch`` raises."""
        try:
            from outrider.environments.agent.server import Gateway
        except ImportError as error:
            raise ToolUnavailable("agent programs need a server: pip install 'outrider[agent]'") from error
        self._config = config
        self._programs = launch()
        try:
            self._gateway = Gateway()
        except BaseException:
            self._programs.close()
            raise

    def __call__(self, task: Task) -> AgentEnvironment:
        """A fresh episode of the task."""
        return AgentEnvironment(
            gateway=self._gateway, programs=self._programs, config=self._config, task=task
        )

    def close(self) -> None:
        """End every program and the server; may be called twice."""
        self._programs.close()
        self._gateway.close()


# Agent programs that speak to an OpenAI endpoint: ``environment.type = "agent"``.


_MAX_EXPERT_TURNS: Final = 1000


class AgentFactory(ProgramFactory):
    """Episodes of the program that a recipe names."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ToolUnavailable where the agent cannot be loaded, or the server's packages are not there."""
        super().__init__(
            config,
            lambda: Programs(function=config.function, command=config.command, reward=config.reward),
        )


class AgentTaskSet:
    """The rows of your data sets, which programs work on."""

    Settings = AgentConfig
    name = "agent"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: AgentConfig) -> None:
        """Start nothing."""
        self.config = config
        self.stop: tuple[str, ...] = ()
        self._factory: AgentFactory | None = None
        self._answer: Callable[[Task, Sequence[Mapping[str, str]]], str] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order. Raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(
            split
        )
        if dataset is None:
            raise DataError(f"agent: no data set is configured for the split {split!r}")
        return load_tasks(dataset, setting=f"environment.{split}")

    def make(self) -> AgentFactory:
        """Load the agent and start the server. Raises ToolUnavailable."""
        return AgentFactory(self.config)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, played; None without one, or where they are no success. Raises
        EnvironmentFault where the function raises, or a program breaks.
        """
        if self.config.expert is None:
            return None
        if self._factory is None:
            self._factory = self.make()
        environment = self._factory(task)
        try:
            episode = ExternalEpisode(environment)
            episode.start(seed)
            while not episode.act(self._expert_answer(task, episode.request.messages)).done:
                if len(episode.actions) > _MAX_EXPERT_TURNS:
                    return None
            return episode.steps if episode.result().success else None
        finally:
            environment.close()

    def close(self) -> None:
        """End the programs that experts were asked for; may be called twice."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.close()

    def _expert_answer(self, task: Task, messages: Sequence[Message]) -> str:
        if self._answer is None:
            self._answer = load_function("expert", str(self.config.expert))
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._answer(task, conversation))
        except Exception as error:  # somebody else's code
            raise EnvironmentFault(f"{self.config.expert} raised {type(error).__name__}: {error}") from error
