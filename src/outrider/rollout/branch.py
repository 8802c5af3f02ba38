"""Rollouts that leave another one in mid-episode: where they begin, how their environment gets there, and how
many may.

A fork shares the parent's nodes; the engine shares the keys and values of its context; nothing of it is
computed again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, Protocol, runtime_checkable

from outrider.environments.base import (
    CopyableEnvironment,
    Environment,
    EnvironmentFactory,
    StepResult,
    start_episode,
    take_refusal,
    take_step,
    turn_message,
)
from outrider.environments.conversing import Conversation, OwnConversations, Refusal, Refusing
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.blocking import run_guarded
from outrider.rollout.conversing import Exchange, pending_request
from outrider.rollout.hooks import EpisodeState
from outrider.trace import Node, Trace
from outrider.types import Message, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A running rollout in front of a policy turn. ``environment`` is a copy that nobody plays; None: replay
    ``actions``.

    ``actions`` are the texts that the environment was given, with its answers in ``results``. ``request`` is
    what a program wants to know of the fork's first turn.
    """

    last_node: Node
    parent: int
    prompt: str
    turn: int
    num_response_tokens: int
    steps: tuple[Step, ...]
    actions: tuple[str, ...]
    results: tuple[StepResult, ...]
    last_result: StepResult | None
    branch_streak: int
    environment: CopyableEnvironment | None
    conversation: tuple[Message, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    refusals: tuple[tuple[int, Refusal], ...] = ()
    request: Conversation | None = None

    async def restore(self, environment: Environment, *, reset_seed: int, timeout_s: float) -> None:
        """Bring a fresh environment to this point by replaying; a copy is there already.

        Raises EnvironmentFault when the replay is answered differently.
        """
        if self.environment is not None:
            return
        messages = await run_guarded(start_episode, environment, reset_seed, timeout_s=timeout_s)
        messages = await self._refuse_again(environment, 0, timeout_s=timeout_s) or messages
        if prompt_text(messages) != self.prompt:
            raise EnvironmentFault("the environment opened differently: it cannot fork by replay")
        for number, (action, expected) in enumerate(zip(self.actions, self.results, strict=True)):
            if isinstance(environment, OwnConversations):
                _require_same_request(environment, self.exchanges[number].request)
                environment.sampled(self.exchanges[number].sampled)
            response = turn_message(environment, action)
            result = await run_guarded(take_step, environment, response, timeout_s=timeout_s)
            if differences := _differing_fields(result, expected):
                raise EnvironmentFault(
                    f"a replayed prefix was answered differently ({differences}): "
                    "this environment cannot fork by replay"
                )
            await self._refuse_again(environment, number + 1, timeout_s=timeout_s)
        _require_same_request(environment, self.request)

    async def _refuse_again(
        self, environment: Environment, turn: int, *, timeout_s: float
    ) -> tuple[Message, ...]:
        """Refuse what a program was refused in front of a turn; what it asks then, empty if there was
        nothing.
        """
        refusals = [refusal for number, refusal in self.refusals if number == turn]
        if not refusals or not isinstance(environment, Refusing):
            return ()
        for refusal in refusals:
            result = await run_guarded(take_refusal, environment, refusal, timeout_s=timeout_s)
            if result is None or result.done:
                raise EnvironmentFault("a program ended where it went on: it cannot fork by replay")
        request = pending_request(environment)
        return () if request is None else request.messages

    def apply_to(self, state: EpisodeState) -> None:
        """Give a new rollout's state the history up to here."""
        state.turn, state.num_response_tokens, state.last_result = (
            self.turn,
            self.num_response_tokens,
            self.last_result,
        )
        state.steps, state.actions, state.results = list(self.steps), list(self.actions), list(self.results)
        state.branch_streak, state.is_forked = self.branch_streak, True
        state.conversation = self.conversation
        state.exchanges, state.refusals = list(self.exchanges), list(self.refusals)


def prompt_text(messages: Sequence[Message]) -> str:
    """The prompt as its node's message holds it."""
    return "\n".join(message.content for message in messages)


def _require_same_request(environment: Environment, expected: Conversation | None) -> None:
    """Raises EnvironmentFault where a program asks something else: its new messages alone do not tell."""
    if pending_request(environment) != expected:
        raise EnvironmentFault("a program asked something else the second time: it cannot fork by replay")


def _differing_fields(actual: StepResult, expected: StepResult) -> str:
    """The names of the fields in which two answers differ: one with the same text may pay or end
    otherwise.
    """
    actual_fields = asdict(actual)
    return ", ".join(name for name, value in asdict(expected).items() if actual_fields[name] != value)


async def make_fork(state: EpisodeState, last_node: Node, *, timeout_s: float) -> Fork:
    """The rollout as it is in front of the turn that it has just written. A copy that fails is replaced by
    replaying.
    """
    environment = state.environment
    copy = None
    if isinstance(environment, CopyableEnvironment):
        with suppress(ToolFault, EnvironmentFault):
            copy = await run_guarded(environment.copy, timeout_s=timeout_s)
    return Fork(
        last_node=last_node,
        parent=state.rollout,
        prompt=state.trace.path(last_node.node_id)[0].message.content,
        turn=state.turn,
        # Without the turn that was just written: the fork writes one of its own.
        num_response_tokens=state.num_response_tokens - len(state.last_node.token_ids),
        steps=tuple(state.steps),
        actions=tuple(state.actions),
        results=tuple(state.results),
        last_result=state.last_result,
        branch_streak=state.branch_streak,
        environment=copy,
        conversation=state.conversation,
        exchanges=tuple(state.exchanges),
        refusals=tuple(state.refusals),
        request=pending_request(environment),
    )


async def fork_environment(
    fork: Fork | None, factory: EnvironmentFactory, trace: Trace, *, timeout_s: float
) -> Environment:
    """An environment for one try: a copy of the fork's, or a fresh one."""
    if fork is not None and fork.environment is not None:
        # A copy of the copy: other forks and retries begin from the same one.
        return await run_guarded(fork.environment.copy, timeout_s=timeout_s)
    return await run_guarded(factory, trace.task, timeout_s=timeout_s)


class Copies:
    """Environments that forks begin from. Each is closed once no rollout can begin there any more."""

    def __init__(self, close: Callable[[CopyableEnvironment], object]) -> None:
        self._close = close
        # By identity: a fork holds nodes, which cannot be hashed.
        self._open: dict[int, Fork] = {}

    def add(self, fork: Fork) -> None:
        """A fork was taken, maybe with a copy."""
        if fork.environment is not None:
            self._open[id(fork)] = fork

    def drop(self, fork: Fork) -> None:
        """Nobody will begin at this fork any more."""
        if self._open.pop(id(fork), None) is not None and fork.environment is not None:
            self._close(fork.environment)

    @property
    def open(self) -> list[CopyableEnvironment]:
        """Those that are still kept, for the end of a run that broke."""
        return [fork.environment for fork in self._open.values() if fork.environment is not None]


@runtime_checkable
class Brancher(Protocol):
    """A hook that forks. ``first_wave`` rollouts of a group begin at its prompt; the rest are forks, or
    follow at its end.

    ``streak_scope``: whether ``branch_streak`` counts the branched turns in a row of a lineage, or of the
    whole group in the order of its decisions.
    """

    first_wave: int
    streak_scope: Literal["lineage", "prompt"]

    def num_forks(self, state: EpisodeState) -> int | None:
        """Called when the policy has written a turn and before the environment acts: how many rollouts should
        leave here.

        None: there is nothing to decide here. The number depends on the rollout's own history, on its streams
        and on ``branch_streak``, with which it does not grow; never on other rollouts, or on when or how
        often it is asked.
        """
        ...

    def budget(self, trace: Trace) -> int | None:
        """Called when the only rollout of a first wave of one has ended: how many should begin at the prompt,
        it included.

        None: it decides nothing.
        """
        ...


class GroupScheduler(Protocol):
    """Who begins when in the groups of one run, and from where; it is told of every turn that was written.

    ``first`` rollouts of every group begin at its prompt.
    """

    first: Sequence[int]

    def on_turn_start(self, state: EpisodeState, *, is_known: bool) -> bool:
        """The policy has written a turn; whether a fork in front of it should be taken.

        ``is_known``: this rollout left another one here, which has come by already.
        """
        ...

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """The same turn, now with the fork if one was asked for; the environment acts next."""
        ...

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """A rollout has its outcome."""
        ...


# to be played: group, number, where it begins (None: the prompt)
Enqueue = Callable[[Trace, int, Fork | None], None]
