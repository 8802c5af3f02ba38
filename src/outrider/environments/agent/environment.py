"""Environments whose agent is a program that calls an OpenAI endpoint: ``environment.type = "agent"``."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from outrider.environments.agent.launcher import FunctionRole, load_function
from outrider.environments.agent.programs import ProgramRunner, Report, run_agent
from outrider.environments.agent.requests import IGNORABLE, RequestError, read_json, read_request
from outrider.environments.agent.responses import Answer, call_problems, read_answer, with_call_ids
from outrider.environments.agent.server import (
    Event,
    PendingRequest,
    ProgramFailure,
    Reward,
    Session,
    read_reward,
)
from outrider.environments.base import (
    EnvironmentSettings,
    EpisodeResult,
    ExternalEpisode,
    StepResult,
    unparsed_calls,
)
from outrider.environments.conversations import (
    Conversation,
    ExternalAgent,
    Refusal,
    SampledTurn,
    ServedTurn,
)
from outrider.environments.process_supervisor import STATUS_PREFIX
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
from outrider.tokens.call_formats import CallFormatName, find_call_error, get_call_format
from outrider.types import CallRecord, CallStatus, Message, Step, Task, ToolCall, ToolSchema

if TYPE_CHECKING:  # the server's packages are an extra
    from outrider.environments.agent.server import Gateway

_MAX_EXPERT_TURNS: Final = 1000


class ProgramConfig(EnvironmentSettings):
    """Limits of a program that calls the policy, and returns of episodes without a reward."""

    tool_calls: CallFormatName | None = None
    """Format of the policy's native tool calls. None: requests with tools are refused."""
    response_format: Literal["refuse", "ignore"] = "refuse"
    """Treatment of requests for JSON output (``response_format``, ``text.format``), which is not enforced.
    ``ignore``: they are answered and counted (``num_ignored_formats``).
    """
    ignored_fields: tuple[str, ...] = ()
    """Request fields that are refused by default, such as ``logit_bias``, and are ignored and counted instead
    (``num_ignored_fields``).
    """
    success_at: float = 1.0
    """An episode with at least this return is a success, unless the reward defines its success itself."""
    time_limit_s: Annotated[float, Field(gt=0)] = 300.0
    """Time limit of a program in seconds, without the time in which it waits for the policy."""
    failed_return: float | None = None
    """Return of a program that ends with an error or exceeds the time limit. None: this is a fault, and the
    rollout is repeated.
    """
    cut_return: float = 0.0
    """Return of an episode that ``rollout.max_turns`` or a full context ended."""
    is_repeatable: bool = False
    """Whether a program that gets the same answers always sends the same requests. Methods that fork by
    replay (ARPO, Tree-GRPO) require it.
    """
    max_programs: Annotated[int, Field(ge=1)] | None = None
    """Limit of programs that run at the same time, in all rollout workers together."""

    @field_validator("ignored_fields")
    @classmethod
    def _validate_ignored_fields(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in IGNORABLE:
                raise ValueError(f"{name!r} cannot be ignored; possible are {', '.join(sorted(IGNORABLE))}")
        return names

    @property
    def has_experts(self) -> bool:
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
        """A program must reach its own time limit before that of a step, which would be a fault."""
        return self.time_limit_s

    def replayed_differently(self) -> list[str]:
        return [] if self.is_repeatable else [self.type]


class AgentConfig(ProgramConfig):
    """A program of yours that calls an OpenAI endpoint. It has its own loop, prompts and tools; the policy
    is the endpoint in its variables ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
    """

    type: Literal["agent"] = "agent"
    function: str | None = None
    """Import path of a Python function, such as ``my_agent:run``. It is called with the task, in a separate
    process per episode. It returns the reward (a number, or an object with ``reward``, ``success`` and
    ``metrics``), or the result that ``reward`` scores.
    """
    command: tuple[str, ...] = ()
    """Or a program with its arguments, in which ``{question}`` stands for the question. Its standard input is
    the task as JSON, and its standard output is the result that ``reward`` scores.
    """
    reward: str | None = None
    """Import path of a function, such as ``my_agent:score``, that is called with the task and the program's
    result and returns the reward. None: ``function`` returns the reward, or the program posts it to
    ``/reward`` below the base URL.
    """
    expert: str | None = None
    """Import path of an expert for a cold start, such as ``my_agent:answer``. It is called with the task and
    the conversation (a list of objects with ``role`` and ``content``) and returns the text of the policy's
    turn. Episodes without success are not used.
    """
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None

    @model_validator(mode="after")
    def _validate(self) -> "AgentConfig":
        if (self.function is None) == (not self.command):
            raise ValueError("set exactly one of function and command")
        for key, path in self.imported().items():
            if not is_import_path(path):
                raise ValueError(f"{key} must be an import path such as my_agent:run, not {path!r}")
        return self

    @property
    def has_experts(self) -> bool:
        return self.expert is not None

    def imported(self) -> Mapping[str, str]:
        return {str(key): path for key, path in self._functions().items()}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        return {key: partial(load_function, key, path) for key, path in self._functions().items()}

    def _functions(self) -> Mapping[FunctionRole, str]:
        paths: dict[FunctionRole, str | None] = {
            "function": self.function, "reward": self.reward, "expert": self.expert
        }  # fmt: skip
        return {key: path for key, path in paths.items() if path is not None}


class AgentEnvironment(ExternalAgent):
    """One episode: a program sends requests, and the policy answers them in the order of their arrival."""

    def __init__(
        self, *, gateway: "Gateway", programs: ProgramRunner, config: ProgramConfig, task: Task
    ) -> None:
        self._gateway = gateway
        self._programs = programs
        self._config = config
        self._task = task
        self._session: Session | None = None
        self._program: int | None = None
        self._clear()

    def _clear(self) -> None:
        self._pending: PendingRequest | None = None
        self._turn: SampledTurn | ServedTurn | None = None
        self._answered_messages: tuple[Message, ...] = ()
        self._answer = Message(role="assistant", content="")
        self._tools: Sequence[ToolSchema] = ()
        self._reward: Reward | None = None
        self._has_failed = False
        self._num_turns = 0
        self._num_unfit_calls = 0
        self._left_s = self._config.time_limit_s

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the program, with ``seed`` as its variable ``OUTRIDER_SEED``, and wait for a request."""
        self.close()
        self._clear()
        read = partial(
            read_request,
            takes_tools=self._config.tool_calls is not None,
            ignores_formats=self._config.response_format == "ignore",
            ignored_fields=self._config.ignored_fields,
        )
        self._session = session = self._gateway.open(read)
        variables = {
            "OPENAI_BASE_URL": self._gateway.url,
            "OPENAI_API_BASE": self._gateway.url,
            "OPENAI_API_KEY": session.key,
            "OUTRIDER_SEED": str(seed),
        }
        self._program = self._programs.start(
            self._task, variables, lambda report: self._gateway.end(session, read_exit(report))
        )
        event = self._checked(self._next_event())
        if not isinstance(event, PendingRequest):
            reason = f": {event.problem}" if isinstance(event, ProgramFailure) else ""
            if session.num_refused:
                reason += (
                    f"; {session.num_refused} of its requests were refused, the last: {session.last_refusal}"
                )
            raise EnvironmentFault(f"the program ended without asking the policy anything{reason}")
        self._pending = event
        return self.request.messages

    @property
    def request(self) -> Conversation:
        """The conversation of the pending request. Raises EnvironmentFault if there is none."""
        return self._require_pending().request.conversation

    def _require_pending(self) -> PendingRequest:
        if self._pending is None:
            raise EnvironmentFault("the program has no pending request")
        return self._pending

    @property
    def call_format(self) -> str | None:
        return self._config.tool_calls

    def read(self, text: str) -> Message:
        """Parse a turn into the message that the program will receive.

        As behind a server, the program gets every call that can be parsed, whether or not it fits a tool. If
        a call cannot be parsed, the program gets the turn as plain text.
        """
        return read_answer(text, self.request, self._config.tool_calls, self._turn, number=self._num_turns)

    def _program_message(self, message: Message) -> Message:
        """The message that the program receives. Calls that another server parsed get our ids here."""
        form, problems = self._config.tool_calls, call_problems(message.tool_calls, self.request)
        if form is None or not problems:
            return replace(message, tool_calls=with_call_ids(message.tool_calls, self._num_turns))
        written = get_call_format(form).write(message.tool_calls)
        words = "\n".join(text for text in (message.content, written) if text)
        return replace(message, content=words, tool_calls=(), problems=(*message.problems, *problems))

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Store data about the turn for the next ``read`` and ``step``."""
        self._turn = turn

    def step(self, message: Message) -> StepResult:
        """Answer the pending request, and wait for the next one or the program's end."""
        pending, turn, self._turn = self._require_pending(), self._turn, None
        conversation = pending.request.conversation
        if pending.request.include_logprobs and (turn is None or turn.kind != "drawn"):
            raise EnvironmentFault("the program requests log-probs, which only turns sampled here have")
        message = self._program_message(message)
        self._num_turns += 1
        self._num_unfit_calls += sum(
            bool(call.problem or find_call_error(call, conversation.tools)) for call in message.tool_calls
        )
        invalid = bool(message.problems)
        if not pending.add_answer(Answer(message=message, turn=turn)):
            return StepResult(
                messages=conversation.messages[-1:],
                invalid=invalid,
                tool_calls=unparsed_calls(message.problems),
            )
        self._pending = None
        self._answered_messages = conversation.messages
        self._answer, self._tools = message, conversation.tools
        return self._step_result(self._checked(self._next_event()), invalid=invalid)

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Answer the pending request with status 400 and wait for the next request or the program's end.

        Returns None if the conversation is too long and the program ends without a reward. Raises
        EnvironmentFault for other ends without a reward, unless ``failed_return`` is set.
        """
        pending, session, self._turn = self._require_pending(), self._session, None
        assert session is not None
        code = "context_length_exceeded" if refusal.is_too_long else "invalid_request_error"
        session.refuse(pending, RequestError(refusal.reason, code=code, param="messages"))
        self._pending = None
        event = self._next_event()
        if refusal.is_too_long and isinstance(event, ProgramFailure) and not event.is_fault:
            return None
        return self._step_result(self._checked(event), invalid=False)

    def _next_event(self) -> Event:
        """Wait for the next event; exceeding the time limit is a failure."""
        if self._session is None:
            raise EnvironmentFault("the episode was never reset, or is closed")
        start = time.monotonic()
        try:
            return self._session.next(max(0.0, self._left_s))
        except queue.Empty:
            problem = f"it took longer than {self._config.time_limit_s:g} s"
            return ProgramFailure(problem=problem, cause=problem)
        finally:
            self._left_s -= time.monotonic() - start

    def _checked(self, event: Event) -> Event:
        """Return the event. Raises EnvironmentFault for a failure without a return."""
        if isinstance(event, ProgramFailure):
            if event.unusable is not None:
                raise event.unusable
            if event.is_fault:
                raise EnvironmentFault(event.problem)
            if self._config.failed_return is None:
                raise EnvironmentFault(f"the agent program: {event.problem}")
        return event

    def _step_result(self, event: Event, *, invalid: bool) -> StepResult:
        if not isinstance(event, PendingRequest):
            if isinstance(event, ProgramFailure):
                assert self._config.failed_return is not None  # see _checked
                grade = {"reason": f"the program failed: {event.cause}"}
                event = Reward(value=self._config.failed_return, success=False, grade=grade)
                self._has_failed = True
            self._reward = event
            status: CallStatus = "error" if self._has_failed else "ok"
            records = [_call_record(call, self._tools, status) for call in self._answer.tool_calls]
            return StepResult(
                reward=event.value,
                done=True,
                invalid=False,
                tool_calls=(*records, *unparsed_calls(self._answer.problems)),
            )
        self._pending = event
        messages, before = event.request.conversation.messages, self._answered_messages
        new = messages[len(before) + 1 :] if before and messages[: len(before)] == before else messages
        results = [message for message in new if message.role == "tool"] if before else []
        return StepResult(
            messages=new or messages[-1:],
            invalid=invalid,
            num_tool_calls=len(results),
            tools=tuple(message.tool_name for message in results if message.tool_name),
            tool_calls=(
                *_program_calls(event.request.conversation, results),
                *unparsed_calls(self._answer.problems),
            ),
        )

    def result(self) -> EpisodeResult:
        """The program's reward; ``cut_return`` before it has one."""
        reward = self._reward or Reward(value=self._config.cut_return)
        success = reward.value >= self._config.success_at if reward.success is None else reward.success
        session = self._session
        counts = {
            "num_requests": session.num_requests - session.num_unanswerable if session else 0,
            "num_refused_requests": session.num_refused if session else 0,
            "num_ignored_fields": session.num_ignored_fields if session else 0,
            "num_unfit_calls": self._num_unfit_calls,
            "num_failed": self._has_failed,
        }
        if self._config.response_format == "ignore":
            counts["num_ignored_formats"] = session.num_ignored_formats if session else 0
        return EpisodeResult(
            episode_return=reward.value,
            success=success and self._reward is not None,
            metrics={**{name: float(count) for name, count in counts.items()}, **reward.metrics},
            **({"reason": "the program had not ended"} if self._reward is None else reward.grade),
        )

    def close(self) -> None:
        """Kill the program and close its session; may be called twice."""
        session, self._session, self._pending = self._session, None, None
        program, self._program = self._program, None
        if session is not None:
            self._gateway.close_session(session)
        if program is not None:
            self._programs.kill(program)


def _program_calls(conversation: Conversation, results: Sequence[Message]) -> tuple[CallRecord, ...]:
    """Records of calls whose results a program sent. Only the program knows how long they took and whether
    they failed.
    """
    calls = {call.call_id: call for message in conversation.messages for call in message.tool_calls}
    records = []
    for result in results:
        status: CallStatus = "ok" if result.content.strip() else "empty"
        call = calls.get(result.tool_call_id)
        records.append(
            _call_record(call, conversation.tools, status)
            if call
            else CallRecord(name=result.tool_name, status=status)
        )
    return tuple(records)


def _call_record(call: ToolCall, tools: Sequence[ToolSchema], status: CallStatus) -> CallRecord:
    """The record of a call. One that does not fit its tool is an error."""
    if call.problem or (tools and find_call_error(call, tools)):
        status = "error"
    return CallRecord(name=call.name, arguments=call.arguments_text, status=status)


def read_exit(report: Report) -> Reward | ProgramFailure:
    """The outcome of a program that has ended."""
    tail = report.tail.strip().rpartition("\n")[2][-300:]
    try:
        result = read_json(report.result)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):  # the program itself has written to the pipe
        result = None
    if result is not None and "fault" in result:
        return ProgramFailure(problem=str(result["fault"])[:300], is_fault=True)
    if report.status < 0:
        cause = f"it was ended by signal {-report.status}"
        return ProgramFailure(problem=f"{cause} ({tail or 'no output'})", cause=cause)
    cause = f"it ended with status {report.status}"
    if result is None:
        return ProgramFailure(problem=f"{cause} ({tail or 'no output'})", cause=cause)
    if "failed" in result:
        problem = str(result["failed"])[:300]
        _, _, status = problem.rpartition(STATUS_PREFIX)  # of the command; that of our process is always 1
        cause = f"it {STATUS_PREFIX}{status}" if status.lstrip("-").isdecimal() else "its command failed"
        return ProgramFailure(problem=": ".join([problem, *([tail] if tail else ())]), cause=cause)
    if "error" in result:
        problem = str(result["error"])[:300]
        return ProgramFailure(problem=problem, cause=problem.partition(":")[0])  # the exception's class
    try:
        if "unusable" in result:
            raise InvalidResult(str(result["unusable"])[:300])
        if result.get("value") is None:
            problem = "it ended without a reward"
            return ProgramFailure(problem=problem, cause=problem)
        return read_reward(result["value"])
    except NonFiniteResult as error:
        return ProgramFailure(problem=str(error), unusable=NonFiniteResult(f"the agent program: {error}"))
    except InvalidResult as error:
        return ProgramFailure(problem=str(error), unusable=UnusableReward(str(error)))


class ProgramFactory:
    """Makes episodes. Owns the server that programs call and the process that runs them."""

    def __init__(self, config: ProgramConfig, launch: Callable[[], ProgramRunner]) -> None:
        """Raises ToolUnavailable if the server's packages are missing, and what ``launch`` raises."""
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
        return AgentEnvironment(
            gateway=self._gateway, programs=self._programs, config=self._config, task=task
        )

    def close(self) -> None:
        """End all programs and the server; may be called twice."""
        self._programs.close()
        self._gateway.close()


class AgentTaskSet:
    """The rows of your data sets as tasks."""

    Settings = AgentConfig
    name = "agent"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True
    stop: tuple[str, ...] = ()

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._expert_factory: ProgramFactory | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order. Raises DataError if none is configured or the data are bad."""
        datasets = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}
        dataset = datasets.get(split)
        if dataset is None:
            raise DataError(f"agent: no data set is configured for the split {split!r}")
        tasks = load_tasks(dataset, setting=f"environment.{split}", keeps_columns=True)
        # Without further columns, tasks are the same as those of versions that passed none.
        # An answer that is no text and no number is left out of the accepted answers, so it stays a column.
        own, answers = (dataset.question, dataset.key), (dataset.answer, "answers")
        return [
            replace(task, metadata={
                key: value
                for key, value in task.metadata.items()
                if key not in own and (key not in answers or not (task.answers or value is None))
            })
            for task in tasks
        ]  # fmt: skip

    def make(self) -> ProgramFactory:
        """Load the agent and start the server. Raises ToolUnavailable."""
        config = self.config
        return ProgramFactory(
            config,
            lambda: run_agent(function=config.function, command=config.command, reward=config.reward),
        )

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, executed; None without an expert or without success. Raises
        EnvironmentFault if the expert raises an exception, or a program fails.
        """
        if self.config.expert is None:
            return None
        answer = load_function("expert", self.config.expert)
        if self._expert_factory is None:
            self._expert_factory = self.make()
        with closing(self._expert_factory(task)) as environment:
            episode = ExternalEpisode(environment)
            episode.start(seed)
            is_done = False
            while not is_done:
                if len(episode.actions) > _MAX_EXPERT_TURNS:
                    return None
                conversation = [
                    {"role": message.role, "content": message.content} for message in episode.request.messages
                ]
                try:
                    text = str(answer(task, conversation))
                except Exception as error:  # of the user's code
                    raise EnvironmentFault(
                        f"{self.config.expert} raised {type(error).__name__}: {error}"
                    ) from error
                is_done = episode.act(text).done
            return episode.steps if episode.result().success else None

    def close(self) -> None:
        """End the programs of :meth:`expert`; may be called twice."""
        factory, self._expert_factory = self._expert_factory, None
        if factory is not None:
            factory.close()
