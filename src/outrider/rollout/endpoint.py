"""Episodes of an agent behind a chat endpoint: off-policy steps for the buffer, and evaluation; never
training (no ids).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, TypeVar

from outrider.engines.chat import ChatEndpoint, Refusal
from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    StepResult,
    episode_result,
    is_answer,
    prompt_tools,
    start_episode,
    take_step,
)
from outrider.environments.conversations import Refusal as ProgramRefusal
from outrider.environments.conversations import Refusing
from outrider.errors import EngineFault, EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.base import Limits, RolloutStatus
from outrider.rollout.episode import close_quietly, episode_outcome, to_step
from outrider.rollout.external_agent import endpoint_turn, pending_request
from outrider.rollout.faults import fault_outcome, locate_invalid_result, run_timed
from outrider.seeding import stream_seed
from outrider.types import Message, Outcome, Step, Task, Trajectory

ResultT = TypeVar("ResultT")
_BAD_REQUEST: Final = (400, 413, 422)
_MAX_REFUSALS: Final = 64  # of one program


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One owed rollout: its outcome, and its trajectory unless infrastructure broke (``detail`` then says
    what).

    ``num_retries`` counts the fresh tries after a fault of a tool or of the environment; ``metrics`` are the
    environment's.
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
    """Every owed rollout in order of task and number; ``num_skipped`` were named as done before."""

    collected: tuple[Collected, ...]
    num_skipped: int

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories for a buffer; faults are left out."""
        return [rollout.trajectory for rollout in self.collected if rollout.trajectory is not None]

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How the rollouts ended."""
        return Counter(rollout.outcome for rollout in self.collected)


@dataclass(slots=True, kw_only=True)
class Collector:
    """Lets an endpoint's agent play tasks.

    Turns, and tokens where the server counts them, are limited as in the rollout loop; observations are not
    cut. After ``max_faults_in_a_row`` rollouts that the endpoint failed, with none between that it served,
    collecting stops with :class:`EngineFault`: a dead server must not cost the back-off of every rollout.
    ``stop`` ends a turn.
    """

    endpoint: ChatEndpoint
    factory: EnvironmentFactory
    limits: Limits
    stop: tuple[str, ...]
    run_seed: int
    temperature: float = 1.0
    num_concurrent: int = 8
    max_retries: int = 2
    max_faults_in_a_row: int = 8
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)  # for the one who watches

    def collect(
        self, tasks: Sequence[Task], *, num_rollouts: int, done: Collection[str] = ()
    ) -> CollectReport:
        """Play every task ``num_rollouts`` times, except rollouts whose trajectory ids are in ``done``.
        Raises as :meth:`play`.
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
        """Play these rollouts of tasks; ``on_rollout_done`` gets each as soon as it has ended, in the thread
        that played it.

        Raises EngineFault (see above), ModelError (the server will never answer) and what ``on_rollout_done``
        raises, once running episodes have ended.
        """
        streak = _FaultStreak(self.max_faults_in_a_row)

        def run_rollout(task: Task, rollout: int) -> Collected:
            collected = self._play_with_retries(task, rollout, streak)
            on_rollout_done(task, rollout, collected)
            return collected

        with ThreadPoolExecutor(max_workers=self.num_concurrent) as pool:
            futures = [pool.submit(run_rollout, task, rollout) for task, rollout in rollouts]
            try:
                # In the order asked, whoever ended first.
                return tuple(future.result() for future in futures)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def trajectory_id(self, task: Task, rollout: int) -> str:
        """The id of a rollout: agent, task and number."""
        return f"{self.endpoint.settings.model}/{task.key}/{rollout}"

    def _play_with_retries(self, task: Task, rollout: int, streak: "_FaultStreak") -> Collected:
        """One rollout with fresh tries after a tool's or environment's fault; the endpoint has retried on its
        own.
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
                    trajectory_id=name,
                    outcome=fault_outcome(fault),
                    num_retries=attempt,
                    detail=str(fault),
                )
            streak.on_success()
            return collected
        raise AssertionError("unreachable: the last attempt returns")

    def _run_timed(self, call: Callable[..., ResultT], *arguments: object) -> ResultT:
        """A game that hangs is a fault of the environment here as in the rollout loop."""
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

    def _request(
        self, environment: Env, conversation: list[Message], room: int
    ) -> tuple[list[Message], int, tuple[str, ...]]:
        """What to send: where a program keeps the conversation, its own, with the end that it wants."""
        request = pending_request(environment)
        if request is None:
            return conversation, room, self.stop
        return list(request.messages), min(room, request.max_tokens or room), (*self.stop, *request.stop)

    def _episode(self, environment: Env, task: Task, rollout: int, num_retries: int) -> Collected:
        # By task alone: all rollouts of a task begin in the same state.
        seed = stream_seed(self.run_seed, "collect reset", task.key)
        prompt = self._run_timed(start_episode, environment, seed)
        conversation = list(prompt)
        steps: list[Step] = []
        num_tokens = num_tool_calls = num_refused = 0
        outcome = None
        while outcome is None:
            room = min(self.limits.max_turn_tokens, self.limits.max_response_tokens - num_tokens)
            conversation, room, stop = self._request(environment, conversation, room)
            if len(steps) >= self.limits.max_turns or room <= 0:
                outcome = Outcome.TRUNCATED_TURNS if room > 0 else Outcome.TRUNCATED_TOKENS
                break
            self.rollout_status.set(f"{task.key}/{rollout}", "the endpoint's answer")
            try:
                reply = self.endpoint.complete(
                    conversation, max_tokens=room, temperature=self.temperature, stop=stop,
                    seed=stream_seed(self.run_seed, "collect sample", task.key, rollout, len(steps)),
                    tools=prompt_tools(environment),
                )  # fmt: skip
            # an episode that outgrows the context is cut and scored, as in the rollout loop
            except EngineFault as fault:
                cause = fault.__cause__
                # before the first answer it may be the endpoint's settings that are wrong
                if not steps or not isinstance(cause, Refusal) or cause.status not in _BAD_REQUEST:
                    raise
                if not isinstance(environment, Refusing):
                    if not cause.is_too_long:
                        raise
                    outcome = Outcome.TRUNCATED_TOKENS
                    break
                num_refused += 1
                outcome = self._refuse(environment, cause, is_last=num_refused > _MAX_REFUSALS)
                continue
            num_tokens += reply.num_tokens
            turn = self._run_timed(endpoint_turn, reply, environment)
            answers = is_answer(environment, turn.response)  # a program that has ended asks nothing
            self.rollout_status.set(f"{task.key}/{rollout}", "an environment's step")
            result: StepResult = self._run_timed(take_step, environment, turn.response)
            steps.append(to_step(turn.text, result))
            num_tool_calls += result.num_tool_calls
            if result.done:
                outcome = episode_outcome(result, is_cut=reply.truncated, is_answer=answers)
            elif not result.observations:
                raise EnvironmentFault("the environment neither answered nor ended the episode")
            else:
                conversation += [turn.history_message, *result.observations]
        record = self._run_timed(episode_result, environment)
        name = self.trajectory_id(task, rollout)
        trajectory = Trajectory(
            trajectory_id=name, task_key=task.key, agent=self.endpoint.settings.model, prompt=prompt,
            steps=tuple(steps), reward=record.episode_return, num_tokens=num_tokens,
        )  # fmt: skip
        return Collected(
            trajectory_id=name, outcome=outcome, trajectory=trajectory, success=record.success,
            metrics=dict(record.metrics), num_tool_calls=num_tool_calls, num_retries=num_retries,
        )  # fmt: skip

    def _refuse(self, environment: Refusing, cause: Refusal, *, is_last: bool) -> Outcome | None:
        """Tell a program that the endpoint refuses its request; how the episode ends then, None where the
        program asks something else.
        """
        if is_last:
            if cause.is_too_long:
                return Outcome.TRUNCATED_TOKENS
            raise EnvironmentFault(f"the program was refused {_MAX_REFUSALS} times and asked again: {cause}")
        refusal = ProgramRefusal(reason=str(cause), is_too_long=cause.is_too_long)
        result: StepResult | None = self._run_timed(environment.refuse, refusal)
        if result is None:
            return Outcome.TRUNCATED_TOKENS
        return episode_outcome(result) if result.done else None


class _FaultStreak:
    """Rollouts in a row, in order of arrival, that the endpoint failed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_failed = 0
        self._last: EngineFault | None = None
        self._lock = Lock()

    def on_fault(self, fault: EngineFault) -> None:
        """Raises once there were too many; rollouts still under way then raise for the same fault, whoever is
        asked first.
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
        """A rollout got all its answers."""
        with self._lock:
            self._num_failed = 0
