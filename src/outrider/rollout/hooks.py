"""Hooks: what acts inside the rollout loop, and the state that it sees."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Final, Literal, Self

import numpy as np

from outrider import deprecated
from outrider.environments.base import Episode, EpisodeResult, StepResult
from outrider.seeding import stream
from outrider.trace import Node, Trace
from outrider.types import Message, Origin, Step, Task

# The mode of a rollout: one word per method, joined by "+" if several methods act in one rollout.
ON_POLICY: Final = "on_policy"
HYBRID: Final = "hybrid"  # may retrieve steps (RAPO)


def join_modes(*parts: str) -> str:
    """Join the modes of several methods."""
    return "+".join(parts)


def has_part(mode: str, part: str) -> bool:
    """Whether ``part`` is one of the modes that ``mode`` joins."""
    return part in mode.split("+")


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

    ``episode`` steps the environment and stores the actions and results. ``is_forked``: the next turn begins
    where another rollout's hooks have acted already. ``branch_streak`` counts the newest turns in a row at
    which rollouts left. ``conversation`` are the messages so far, if they are rendered again before every
    turn.
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
        """The rollout so far; it does not change when this one continues."""
        return replace(self, episode=self.episode.history(), steps=list(self.steps))

    def stream(self, purpose: str) -> np.random.Generator:
        """The random stream of this purpose, step, task, rollout and turn."""
        return stream(self.run_seed, purpose, self.training_step, self.task.key, self.rollout, self.turn)


class Hook:
    """Base class of what acts inside the rollout loop. Every method does nothing unless you override it.

    Hooks run in the order given. With rollout workers, each worker has copies of the hooks, made of the same
    settings: override :meth:`snapshot`, :meth:`restore`, :meth:`gathered` and :meth:`absorb`, or derive from
    :class:`StatelessHook`. All values that they exchange are pickled.
    """

    max_reflection_tokens: int = 0
    """Limit of the answer to :meth:`closing_message`; 0: the hook requests none."""

    first_wave: int | None = None
    """How many rollouts of a group begin at its prompt; the rest are forks, or follow at its end. None: the
    hook does not branch.
    """

    streak_scope: Literal["lineage", "prompt"] = "lineage"
    """Whether ``branch_streak`` counts the branched turns in a row of a lineage, or of the whole group in the
    order of its decisions.
    """

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        """Called before every policy turn. Returns text to splice in, or actions to execute first."""
        return ()

    def after_turn(self, state: EpisodeState) -> None:
        """Called after the environment answered; ``state`` has the turn's entropies and the result."""

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Called when the episode has ended. Returns a message that the policy answers in at most
        ``max_reflection_tokens`` tokens, which nothing trains on, or None.

        The environment's last message is in no node but in ``state.last_result``, truncated to the room that
        is left. If the returned message is too long, the method is called again with a shorter one.
        """
        return None

    def after_group(self, trace: Trace) -> None:
        """Called when all rollouts of a group have ended, group by group in order; may write to a memory."""

    def num_forks(self, state: EpisodeState) -> int | None:
        """Called after a policy turn and before the environment's step. Returns how many rollouts should fork
        here, or None if there is nothing to decide.

        The number may depend on the rollout's own history, on its streams and on ``branch_streak``, with
        which it must not grow; never on other rollouts or on when or how often the method is called.
        """
        return None

    def budget(self, trace: Trace) -> int | None:
        """Called when the only rollout of a first wave of one has ended. Returns how many rollouts should
        begin at the prompt, including this one, or None to leave that open.
        """
        return None

    def snapshot(self) -> Any:
        """Everything that a copy, made of the same settings, needs to act as this hook does now."""
        return None

    def restore(self, snapshot: Any) -> None:
        """Restore the snapshot and reset what :meth:`gathered` returns."""

    def gathered(self) -> Any:
        """What this copy counted and saw since :meth:`restore`."""
        return None

    def absorb(self, gathered: Any) -> None:
        """Add what a copy has gathered, as if it had happened here. Memories change in :meth:`after_group`,
        which only the original hook receives.
        """

    @property
    def is_portable(self) -> bool:
        """Whether copies in other processes can stand in for this hook."""
        return getattr(self.snapshot, "__func__", None) is not Hook.snapshot


class StatelessHook(Hook):
    """Base class of hooks that neither remember nor count: every copy acts alike."""

    def snapshot(self) -> None:
        return None


class _OldHook(Hook):
    """Adapter of an object that has methods of a hook without being a :class:`Hook`."""

    def __init__(self, hook: object) -> None:
        names = [name for name in vars(Hook) if not name.startswith("_") and name != "is_portable"]
        for name in names:
            if hasattr(hook, name):
                setattr(self, name, getattr(hook, name))


def as_hooks(hooks: Sequence[object]) -> tuple[Hook, ...]:
    """The hooks, with an adapter for each object that only has the methods; that form is deprecated."""
    adapted = []
    for hook in hooks:
        if not isinstance(hook, Hook):
            warnings.warn(
                f"{type(hook).__name__} must be a subclass of outrider.Hook or outrider.StatelessHook; "
                "an object that only has its methods works for one more version",
                FutureWarning,
                stacklevel=2,
            )
            # a class of the same name, so that messages name the object's class
            hook = type(type(hook).__name__, (_OldHook,), {})(hook)
        adapted.append(hook)
    return tuple(adapted)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLocation:
    """``num_rollouts`` rollouts are in ``location``; ``longest`` entered first, ``seconds`` ago."""

    location: str
    num_rollouts: int
    longest: str
    seconds: float


class RolloutStatus:
    """Where the unfinished rollouts are; the watchdog and the display read it.

    ``changed`` is the time (of ``clock``) at which a rollout last moved on.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._locations: dict[str, tuple[float, str]] = {}
        self.changed = clock()

    def set(self, rollout: str, location: str) -> None:
        """Record that a rollout entered ``location``: a call of its environment, or the engine."""
        with self._lock:
            self.changed = self._clock()
            self._locations[rollout] = (self.changed, location)

    def remove(self, rollout: str) -> None:
        """Remove a finished rollout."""
        with self._lock:
            self.changed = self._clock()
            self._locations.pop(rollout, None)

    def snapshot(self) -> list[RolloutLocation]:
        """Return all locations, the one with the longest wait first."""
        with self._lock:
            entries = sorted(
                (since, location, rollout) for rollout, (since, location) in self._locations.items()
            )
            now = self._clock()
        by_location: dict[str, list[tuple[float, str]]] = {}
        for since, location, rollout in entries:
            by_location.setdefault(location, []).append((since, rollout))
        return [
            RolloutLocation(
                location=location,
                num_rollouts=len(waiting),
                longest=waiting[0][1],
                seconds=now - waiting[0][0],
            )
            for location, waiting in by_location.items()
        ]


deprecated.keep_old_names(__name__)
