"""Rollouts that leave another one in mid-episode: where they begin, how their environment gets there, and how many may.

A fork shares the parent's nodes; the engine shares the keys and values of its context; nothing of it is computed again.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.environments.base import CopyableEnvironment, Environment, EnvironmentFactory, StepResult
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.blocking import guarded
from outrider.rollout.hooks import EpisodeState
from outrider.trace import Node, Trace
from outrider.types import Message, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A running rollout in front of a policy turn. ``environment`` is a copy that nobody plays; None: replay ``actions``.

    ``actions`` are the texts that the environment was given, with its answers in ``observations``.
    """

    tip: Node
    parent: int
    prompt: str
    turn: int
    num_response_tokens: int
    steps: tuple[Step, ...]
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    last_result: StepResult | None
    branch_streak: int
    environment: CopyableEnvironment | None

    async def restore(self, environment: Environment, *, reset_seed: int, timeout_s: float) -> None:
        """Bring a fresh environment to this point by replaying; a copy is there already.

        Raises EnvironmentFault when the replay is answered differently.
        """
        if self.environment is not None:
            return
        messages = await guarded(environment.reset, reset_seed, timeout_s=timeout_s)
        if prompt_text(messages) != self.prompt:
            raise EnvironmentFault("the environment opened differently: it cannot fork by replay")
        for action, expected in zip(self.actions, self.observations, strict=True):
            result = await guarded(environment.step, Message(role="assistant", content=action), timeout_s=timeout_s)
            if observation_of(result) != expected:
                raise EnvironmentFault("a replayed prefix was answered differently: this environment cannot fork by replay")

    def continue_in(self, state: EpisodeState) -> None:
        """Give a new rollout's state the history up to here."""
        state.turn, state.num_response_tokens, state.last_result = self.turn, self.num_response_tokens, self.last_result
        state.steps, state.actions, state.observations = list(self.steps), list(self.actions), list(self.observations)
        state.branch_streak, state.is_forked = self.branch_streak, True


def prompt_text(messages: Sequence[Message]) -> str:
    """The prompt as its node's message holds it."""
    return "\n".join(message.content for message in messages)


def observation_of(result: StepResult) -> str:
    """The text of an answer."""
    return result.message.content if result.message else ""


async def take_fork(state: EpisodeState, tip: Node, *, timeout_s: float) -> Fork:
    """The rollout as it is in front of the turn that it has just written. A copy that fails is replaced by replaying."""
    environment = state.environment
    copy = None
    if isinstance(environment, CopyableEnvironment):
        with suppress(ToolFault, EnvironmentFault):
            copy = await guarded(environment.copy, timeout_s=timeout_s)
    return Fork(
        tip=tip,
        parent=state.rollout,
        prompt=state.trace.path(tip.node_id)[0].message.content,
        turn=state.turn,
        num_response_tokens=state.num_response_tokens - len(state.tip.token_ids),
        steps=tuple(state.steps),
        actions=tuple(state.actions),
        observations=tuple(state.observations),
        last_result=state.last_result,
        branch_streak=state.branch_streak,
        environment=copy,
    )


async def fork_environment(fork: Fork | None, factory: EnvironmentFactory, trace: Trace, *, timeout_s: float) -> Environment:
    """An environment for one try: a copy of the fork's, or a fresh one."""
    if fork is not None and fork.environment is not None:
        return await guarded(fork.environment.copy, timeout_s=timeout_s)
    return await guarded(factory, trace.task, timeout_s=timeout_s)


@runtime_checkable
class Brancher(Protocol):
    """A hook that forks. ``first_wave`` rollouts of a group begin at its prompt; the rest are forks, or follow at its end."""

    first_wave: int

    def num_forks(self, state: EpisodeState) -> int:
        """Called when the policy has written a turn and before the environment acts: how many rollouts should leave here."""
        ...

    def budget(self, trace: Trace) -> int | None:
        """Called when the only rollout of a first wave of one has ended: how many should begin at the prompt, it included.

        None: it decides nothing.
        """
        ...


class GroupBook:
    """How many rollouts of every group have begun and ended. Numbers are given in the order of begin."""

    def __init__(self, traces: Sequence[Trace], *, size: int, brancher: Brancher | None) -> None:
        first_wave = size if brancher is None else brancher.first_wave
        self._budget = brancher.budget if brancher is not None and first_wave == 1 < size else None
        self._size = size
        self.first: Sequence[int] = range(min(first_wave, size))
        self._begun = {trace.task.key: min(first_wave, size) for trace in traces}
        self._ended = dict.fromkeys(self._begun, 0)
        self._decided: set[tuple[str, int, int]] = set()

    def claim(self, trace: Trace, point: tuple[int, int], wanted: int) -> range:
        """Numbers for up to ``wanted`` forks at ``point`` (rollout, turn); a retry that comes there again gets none."""
        decision = (trace.task.key, *point)
        if decision in self._decided:
            return range(0)
        self._decided.add(decision)
        return self._take(trace, wanted)

    def _take(self, trace: Trace, wanted: int) -> range:
        begun = self._begun[trace.task.key]
        granted = min(wanted, self._size - begun)
        self._begun[trace.task.key] += granted
        return range(begun, begun + granted)

    def ended(self, trace: Trace, rollout: int) -> list[tuple[int, Fork | None]]:
        """A rollout has its outcome: numbers of fresh ones, for a wave that waited for it or to fill the group up at its end."""
        return [(number, None) for number in self._following(trace)]

    def _following(self, trace: Trace) -> range:
        key = trace.task.key
        self._ended[key] += 1
        if self._budget is not None and self._ended[key] == self._begun[key] == 1:
            wave = self._budget(trace)
            if wave is not None and wave > 1:
                return self._take(trace, wave - 1)
        return self._take(trace, self._size - self._begun[key]) if self._ended[key] == self._begun[key] else range(0)
