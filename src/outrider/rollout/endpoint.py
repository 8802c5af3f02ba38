"""Episodes of an agent behind a chat endpoint, for evaluation and as off-policy steps for the buffer.

They cannot be trained on, because the endpoint returns no token ids.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, TypeVar

from outrider.engines.chat import ChatEndpoint, ChatReply, Refusal
from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    Episode,
    ExternalEpisode,
    StepResult,
    open_episode,
)
from outrider.environments.conversations import Refusal as ProgramRefusal
from outrider.environments.conversations import ServedTurn, before_stop
from outrider.errors import EngineFault, EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.episode import close_quietly, episode_outcome
from outrider.rollout.external_agent import MAX_REFUSALS, require_shorter
from outrider.rollout.faults import fault_outcome, locate_invalid_result, run_timed
from outrider.rollout.hooks import RolloutStatus
from outrider.rollout.settings import Limits
from outrider.seeding import stream_seed
from outrider.tokens.call_formats import get_call_format, read_turn, read_turn_unchecked
from outrider.tokens.tool_calls import THINKING_END, CallFormat, split_thinking
from outrider.types import Message, Outcome, Task, Trajectory

ResultT = TypeVar("ResultT")
_BAD_REQUEST: Final = (400, 413, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One finished rollout.

    Attributes:
        trajectory_id: agent, task and number.
        outcome: how the rollout ended.
        trajectory: the trajectory; None after a fault.
        success: whether the task was solved.
        metrics: the environment's metrics of the episode.
        num_tool_calls: number of executed tool calls.
        num_retries: number of retries after faults of tools or the environment.
        detail: the error message after a fault.
    """

    trajectory_id: str
    outcome: Outcome
    trajectory: Trajectory | None = None
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    num_retries: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """All rollouts in the order of task and number. ``num_skipped`` rollouts were done before."""

    collected: tuple[Collected, ...]
    num_skipped: int

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories for a buffer, without faulted rollouts."""
        return [rollout.trajectory for rollout in self.collected if rollout.trajectory is not None]

    @property
    def outcomes(self) -> Counter[Outcome]:
        """Number of rollouts per outcome."""
        return Counter(rollout.outcome for rollout in self.collected)


@dataclass(slots=True, kw_only=True)
class Collector:
    """Runs episodes of tasks with an agent behind an endpoint.

    Turns are limited as in the rollout loop, and so are tokens if the server counts them. Observations are
    not truncated. After ``max_faults_in_a_row`` consecutive rollouts with an endpoint failure, collecting
    stops with :class:`EngineFault`, so that a dead server does not cost the back-off time of every rollout.
    ``stop`` are the stop strings of a turn, and ``truncation`` its ``top_p`` and ``top_k``, if any.
    """

    endpoint: ChatEndpoint
    factory: EnvironmentFactory
    limits: Limits
    stop: tuple[str, ...]
    run_seed: int
    temperature: float = 1.0
    truncation: Mapping[str, Any] = field(default_factory=dict)
    num_concurrent: int = 8
    max_retries: int = 2
    max_faults_in_a_row: int = 8
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)  # read by watchdog and display

    def collect(
        self, tasks: Sequence[Task], *, num_rollouts: int, done: Collection[str] = ()
    ) -> CollectReport:
        """Run every task ``num_rollouts`` times, except rollouts whose trajectory ids are in ``done``.

        Raises the errors of :meth:`play`.
        """
        rollouts = [(task, rollout) for task in tasks for rollout in range(num_rollouts)]
        fresh = [
            (task, rollout) for task, rollout in rollouts if self.trajectory_id(task, rollout) not in done
        ]
        return CollectReport(collected=self.play(fresh), num_skipped=len(rollouts) - len(fresh))

    def play(
        self,
        rollouts: Sequence[tuple[Task, int]],
        *,
        on_rollout_done: Callable[[Task, int, Collected], None] = lambda task, rollout, collected: None,
    ) -> tuple[Collected, ...]:
        """Run rollouts, given as tasks and rollout numbers.

        ``on_rollout_done`` is called as soon as a rollout has ended, in the thread that ran it.

        Raises:
            EngineFault: after too many consecutive failures of the endpoint.
            ModelError: if the server can never answer, for example because it does not have the model.

        Errors, including those of ``on_rollout_done``, are raised after the running episodes have ended.
        """
        streak = _FaultStreak(self.max_faults_in_a_row)

        def run_rollout(task: Task, rollout: int) -> Collected:
            collected = self._play_with_retries(task, rollout, streak)
            on_rollout_done(task, rollout, collected)
            return collected

        with ThreadPoolExecutor(max_workers=self.num_concurrent) as pool:
            futures = [pool.submit(run_rollout, task, rollout) for task, rollout in rollouts]
            try:
                # In the order of the request, not of completion.
                return tuple(future.result() for future in futures)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def trajectory_id(self, task: Task, rollout: int) -> str:
        """Return the id of a rollout: agent, task and number."""
        return f"{self.endpoint.settings.model}/{task.key}/{rollout}"

    def _play_with_retries(self, task: Task, rollout: int, streak: "_FaultStreak") -> Collected:
        """Run one rollout and retry it after faults of tools or the environment.

        Endpoint failures are not retried here: :class:`ChatEndpoint` has already retried the request.
        """
        name = self.trajectory_id(task, rollout)
        for attempt in range(self.max_retries + 1):
            try:
                collected = self._play(task, rollout, num_retries=attempt)
            except (ToolFault, EnvironmentFault, EngineFault) as fault:
                if isinstance(fault, EngineFault):
                    streak.on_fault(fault)
                elif attempt < self.max_retries:
                    continue
                return Collected(
                    trajectory_id=name, outcome=fault_outcome(fault), num_retries=attempt, detail=str(fault)
                )
            streak.on_success()
            return collected
        raise AssertionError("unreachable: the last attempt returns")

    def _run_timed(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call with the step time limit. As in the rollout loop, a timeout is a fault of the environment."""
        return run_timed(call, *arguments, timeout_s=self.limits.step_timeout_s)

    def _play(self, task: Task, rollout: int, *, num_retries: int) -> Collected:
        name = f"{task.key}/{rollout}"
        self.rollout_status.set(name, "a new environment")
        environment = self._run_timed(self.factory, task)
        try:
            return self._episode(environment, task, rollout, num_retries)
        except InvalidResult as error:
            raise locate_invalid_result(environment, task.key, error) from error
        finally:
            self.rollout_status.set(name, "closing its environment")
            close_quietly(environment, timeout_s=self.limits.step_timeout_s)
            self.rollout_status.remove(name)

    def _episode(self, environment: Env, task: Task, rollout: int, num_retries: int) -> Collected:
        episode = open_episode(environment)
        # The seed depends on the task alone, so that all rollouts of a task start in the same state.
        self._run_timed(episode.start, stream_seed(self.run_seed, "collect reset", task.key))
        prompt = episode.prompt
        conversation = list(prompt)
        num_tokens = num_tool_calls = num_refused = 0
        outcome = None
        while outcome is None:
            request = episode.request
            # The budget is that of a context, and a prompt with a limit begins a new one.
            used = 0 if request is not None and request.prompt_limit is not None else num_tokens
            room = min(self.limits.max_turn_tokens, self.limits.max_response_tokens - used)
            num_turns, stop = len(episode.actions), self.stop
            if request is not None:
                conversation, stop = list(request.messages), (*stop, *request.stop)
                room = min(room, request.max_tokens or room)
            if num_turns >= self.limits.max_turns or room <= 0:
                outcome = Outcome.TRUNCATED_TURNS if room > 0 else Outcome.TRUNCATED_TOKENS
                break
            self.rollout_status.set(f"{task.key}/{rollout}", "the endpoint's answer")
            try:
                reply = self.endpoint.complete(
                    conversation, max_tokens=room, temperature=self.temperature, stop=stop,
                    seed=stream_seed(self.run_seed, "collect sample", task.key, rollout, num_turns),
                    tools=episode.tools, **self.truncation,
                )  # fmt: skip
            # An episode that exceeds the context is truncated and scored, as in the rollout loop.
            except EngineFault as fault:
                cause = fault.__cause__
                # Before the first response, the cause may also be wrong settings of the endpoint.
                if not num_turns or not isinstance(cause, Refusal) or cause.status not in _BAD_REQUEST:
                    raise
                if isinstance(episode, ExternalEpisode):
                    num_refused += 1
                    outcome = self._refuse(episode, cause, is_last=num_refused > MAX_REFUSALS)
                    continue
                if not cause.is_too_long:
                    raise
                outcome = Outcome.TRUNCATED_TOKENS
                break
            num_tokens += reply.num_tokens
            turn = self._run_timed(endpoint_turn, reply, episode)
            self.rollout_status.set(f"{task.key}/{rollout}", "an environment's step")
            result: StepResult = self._run_timed(episode.act, turn.text, turn.response)
            num_tool_calls += result.num_tool_calls
            if result.done:
                answers = episode.ends_with_answer
                outcome = episode_outcome(result, is_cut=reply.truncated, is_answer=answers)
            elif not result.observations:
                raise EnvironmentFault("the environment neither answered nor ended the episode")
            else:
                conversation += [turn.history_message, *result.observations]
        record = self._run_timed(episode.result)
        name = self.trajectory_id(task, rollout)
        trajectory = Trajectory(
            trajectory_id=name, task_key=task.key, agent=self.endpoint.settings.model, prompt=prompt,
            steps=episode.steps, reward=record.episode_return, num_tokens=num_tokens,
        )  # fmt: skip
        return Collected(
            trajectory_id=name, outcome=outcome, trajectory=trajectory, success=record.success,
            metrics=dict(record.metrics), num_tool_calls=num_tool_calls, num_retries=num_retries,
        )  # fmt: skip

    def _refuse(self, episode: ExternalEpisode, cause: Refusal, *, is_last: bool) -> Outcome | None:
        """Refuse the program's request, as the endpoint did.

        Returns the outcome if that ends the episode, or None if the program sends another request.
        """
        if is_last:
            if cause.is_too_long:
                return Outcome.TRUNCATED_TOKENS
            raise EnvironmentFault(
                f"the program sent more than {MAX_REFUSALS} requests that were refused; the last: {cause}"
            )
        refusal = ProgramRefusal(reason=str(cause), is_too_long=cause.is_too_long)
        require_shorter(episode.request, refusal)
        result: StepResult | None = self._run_timed(episode.refuse, refusal)
        if result is None:
            return Outcome.TRUNCATED_TOKENS
        return episode_outcome(result) if result.done else None


class _FaultStreak:
    """Counts consecutive rollouts, in order of completion, with an endpoint failure. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_failed = 0
        self._last: EngineFault | None = None
        self._lock = Lock()

    def on_fault(self, fault: EngineFault) -> None:
        """Count a failure. Raises EngineFault at the limit.

        Rollouts that fail later raise for the same fault, so that the reported cause does not depend on
        timing.
        """
        with self._lock:
            self._num_failed += 1
            if self._num_failed >= self._limit:
                self._last = self._last or fault
            if self._last is not None:
                raise EngineFault(
                    f"{self._limit} rollouts in a row failed; the last: {self._last}"
                ) from self._last

    def on_success(self) -> None:
        """Reset the count after a rollout without endpoint failures."""
        with self._lock:
            self._num_failed = 0


# Conversion of the endpoint's replies.

_TAG: Final = re.compile(r"<(/?\w+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTurn:
    """A turn of an agent behind an endpoint.

    Attributes:
        response: the message for the environment.
        history_message: the message that later requests contain.
        text: the turn in the environment's format, as trajectories store it.
    """

    response: Message
    history_message: Message
    text: str


def endpoint_turn(reply: ChatReply, episode: Episode) -> EndpointTurn:
    """Convert a reply into a turn.

    If the server does not parse tool calls, they are parsed here from the text. If a call cannot be parsed,
    later requests contain the turn as its whole text, so that the environment's error message refers to
    something.
    """
    if isinstance(episode, ExternalEpisode):
        return _program_turn(reply, episode)
    name = episode.call_format
    if name is None:
        if reply.reasoning:
            # Some servers leave the thinking in the text, too. Tags in it are no actions, but who reads the
            # whole text (an environment, a replay) cannot know that.
            text = split_thinking(reply.text)[1] if THINKING_END in reply.text else reply.text
            reply = replace(reply, text=text, reasoning=_TAG.sub(r"\1", reply.reasoning))
        plain = Message(role="assistant", content=reply.text, reasoning=reply.reasoning)
        return EndpointTurn(response=plain, history_message=plain, text=_text(reply, reply.text))
    form, tools, served = get_call_format(name), episode.tools, reply.served
    has_read = bool(served.calls or served.problems)
    turn = read_turn(reply.text, None if has_read else form, tools)
    calls = served.calls if has_read else turn.tool_calls
    problems = (*turn.problems, *served.problems)
    inside, written = _written_parts(reply, form)
    response = Message(
        role="assistant", content=turn.content, reasoning=reply.reasoning or turn.reasoning,
        tool_calls=calls, problems=problems,
    )  # fmt: skip
    sent = Message(
        role="assistant", content=inside + (written if problems else turn.content),
        reasoning=reply.reasoning, tool_calls=() if problems else calls,
    )  # fmt: skip
    return EndpointTurn(response=response, history_message=sent, text=_text(reply, inside + written))


def _program_turn(reply: ChatReply, episode: ExternalEpisode) -> EndpointTurn:
    """Convert a reply into a turn for an external program.

    The program receives the calls that the server or this function parsed. If a call cannot be parsed, it
    receives the turn as text, without the stop strings of its request.
    """
    sampled = ServedTurn(
        finish=reply.finish,
        num_tokens=reply.num_tokens or None,
        num_context_tokens=reply.num_context_tokens or None,
    )
    episode.set_sampled(sampled)
    if episode.call_format is None:
        response = episode.read(reply.text)
        return EndpointTurn(
            response=replace(response, reasoning=reply.reasoning or response.reasoning),
            history_message=Message(role="assistant", content=reply.text, reasoning=reply.reasoning),
            text=_text(reply, reply.text),
        )
    form, request = get_call_format(episode.call_format), episode.request
    reply = replace(reply, text=before_stop(reply.text, request.stop))
    served = reply.served
    has_read = bool(served.calls or served.problems)
    turn = read_turn_unchecked(reply.text, None if has_read else form, request.tools)
    calls = served.forwarded if has_read else turn.tool_calls
    is_whole = len(served.forwarded) == len(served.calls) + len(served.problems)
    problems = turn.problems if not has_read else () if is_whole else served.problems
    inside, written = _written_parts(reply, form)
    response = Message(
        role="assistant", content=written if problems else turn.content,
        reasoning=reply.reasoning or turn.reasoning, tool_calls=() if problems else calls, problems=problems,
    )  # fmt: skip
    return EndpointTurn(response=response, history_message=response, text=_text(reply, inside + written))


def _written_parts(reply: ChatReply, form: CallFormat) -> tuple[str, str]:
    """Split a reply's text into its thinking and the rest, with the calls that the server parsed."""
    served = reply.served
    has_read = bool(served.calls or served.problems)
    inside = reply.text.removesuffix(split_thinking(reply.text, None if has_read else form)[1])
    written = reply.text.removeprefix(inside)
    if has_read:
        parts = (written, form.write(served.calls) if served.calls else "", *served.unread)
        written = "\n".join(part for part in parts if part)
    return inside, written


def _text(reply: ChatReply, text: str) -> str:
    """Return the text of the whole turn, without lone surrogates."""
    apart = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return Message(role="assistant", content=apart + text).content
