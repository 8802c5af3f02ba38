"""The three ways into the rollout loop, and the state that they see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.episode import Episode
from outrider.seeding import stream
from outrider.trace import Node, Trace
from outrider.types import Message, Origin, Step, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Text that a hook puts into the context before the policy's next turn.

    A tip (origin ``memory``) stands at the end of the newest user message, where the policy answers one;
    everything else, inside the open assistant message. ``step`` is the step that the text stands for (it
    joins the history).
    """

    origin: Origin
    text: str
    step: Step | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An action that a hook wants done in the live environment; the loop does it with its own time limit and
    faults.

    ``then`` makes the splice from the environment's answer, or None when the episode goes on without one.
    """

    action: str
    then: Callable[[StepResult], Splice | None]


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    """One running rollout. ``turn`` counts the policy's turns; ``last_node`` is the newest; ``steps`` the
    history.

    ``episode`` steps the environment and keeps what it was given and answered. ``is_forked``: the next turn
    begins where another rollout's hooks have acted already. ``branch_streak`` counts the newest turns in a
    row at which rollouts left. ``conversation`` are the messages so far, if they are rendered again before
    every turn.
    """

    task: Task
    trace: Trace
    episode: Episode
    run_seed: int
    training_step: int
    rollout: int
    mode: str
    last_node: Node
    turn: int = 0
    num_response_tokens: int = 0
    num_splices_dropped: int = 0
    steps: list[Step] = field(default_factory=list)
    is_forked: bool = False
    branch_streak: int = 0
    last_result: StepResult | None = None
    conversation: tuple[Message, ...] = ()

    def snapshot(self) -> Self:
        """The rollout so far; it does not change when this one goes on."""
        return replace(self, episode=self.episode.history(), steps=list(self.steps))

    def stream(self, purpose: str) -> np.random.Generator:
        """The random stream of this purpose, step, task, rollout and turn."""
        return stream(self.run_seed, purpose, self.training_step, self.task.key, self.rollout, self.turn)


class Hook(Protocol):
    """A plug-in of the loop. Hooks run in the order given; all three methods are called for every rollout."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        """Called before every policy turn; may return what to splice in, or to do and then splice in."""
        ...

    def after_turn(self, state: EpisodeState) -> None:
        """Called after the environment answered; sees the newest policy node's entropies, and the result."""
        ...

    def after_group(self, trace: Trace) -> None:
        """Called once all rollouts of a group have ended, group by group in order; may write to a memory."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A hook that copies in other processes can stand in for; every hook of Outrider's own is one.

    A memory changes in :meth:`Hook.after_group` of the original alone. A copy becomes what the original is in
    front of a batch, acts in the copy's process, and hands back what it has gathered; the original absorbs
    that, copy by copy in a fixed order, and only then sees the groups. All values can be pickled.
    """

    def snapshot(self) -> Any:
        """All that a copy, made of the same settings, needs to act as this hook does now."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Become what was taken; what was gathered before is forgotten."""
        ...

    def gathered(self) -> Any:
        """What was counted and seen since :meth:`restore`."""
        ...

    def absorb(self, gathered: Any) -> None:
        """Take in what a copy has gathered, as if it had happened here."""
        ...


class Forgetful:
    """Base of a hook that neither remembers nor counts: any copy acts as it does."""

    __slots__ = ()

    def snapshot(self) -> None:
        """See :class:`Portable`."""

    def restore(self, snapshot: None) -> None:
        """See :class:`Portable`."""

    def gathered(self) -> None:
        """See :class:`Portable`."""

    def absorb(self, gathered: None) -> None:
        """See :class:`Portable`."""


@runtime_checkable
class Reflector(Protocol):
    """A hook that has the policy say something about an ended episode, in at most ``max_reflection_tokens``
    that nothing trains on.
    """

    max_reflection_tokens: int

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Called when the episode has ended: the message that the policy answers, or None.

        Where the environment ended it, its last message is in no node but in ``state.last_result``, cut to
        what there is room for. Called again with less of it where the message turns out too long.
        """
        ...


def format_retrieved(text: str) -> str:
    """The one form in which a context shows steps that the policy did not write."""
    return f"<retrieve>{text.strip()}</retrieve>\n"


def join_observation(text: str, observation: str) -> str:
    """Action and observation; a chat observation goes on a line of its own, an inline one as it is."""
    separator = "" if not observation or observation[0].isspace() or text[-1:].isspace() else "\n"
    return text + separator + observation


def to_message(splice: Splice) -> Message:
    """The message that renders a splice: it continues the assistant's message."""
    return Message(role="inline", content=splice.text)
