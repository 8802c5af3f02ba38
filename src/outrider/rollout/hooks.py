"""Hooks that act inside the rollout loop, and the state that they receive."""

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
from outrider.suggestions import closest_match
from outrider.trace import Node, Trace
from outrider.types import Message, Origin, Step, Task

# The mode of a rollout: one word per method, joined by "+" if several methods act in one rollout.
ON_POLICY: Final = "on_policy"
HYBRID: Final = "hybrid"  # may retrieve steps (RAPO)


def join_modes(*parts: str) -> str:
    """Join modes with ``+``."""
    return "+".join(parts)


def has_part(mode: str, part: str) -> bool:
    """Whether ``part`` is one of the modes that ``mode`` joins."""
    return part in mode.split("+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Text that a hook puts into the context before the policy's next turn.

    A tip (origin ``memory``) is inserted at the end of the newest user message if that is the last message.
    Any other text continues the open assistant message.

    Attributes:
        origin: who wrote the text; recorded on the node.
        text: the text to insert.
        step: the step that the text represents, which is added to the history; None if it represents none.
        metadata: added to the node's metadata.
    """

    origin: Origin
    text: str
    step: Step | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An action that a hook executes in the live environment, with the step time limit and fault handling of
    the loop.

    ``then`` makes the splice from the environment's result; it may return None to insert no text. With
    ``as_turn``, the action is an assistant message of its own, as if the policy had written it, followed by
    the environment's messages; ``Splice.text`` is used only if the environment answers inside the assistant's
    message or not at all. An action that would be a message is not executed if it has more than
    ``max_splice_tokens`` tokens or no room. If the environment's answer has no room, the rollout ends.
    """

    action: str
    then: Callable[[StepResult], Splice | None]
    as_turn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A demonstrator's turn that the loop executes as if the policy had written it, without training on it.

    It counts towards the limits of turns and tokens. Rollouts of a group that begin with equal turns and
    observations share their nodes.
    """

    text: str


@dataclass(slots=True, kw_only=True)
class EpisodeState:
    """State of one running rollout.

    Attributes:
        task: the task of the group.
        trace: the tree of the group.
        episode: steps the environment and stores the actions and results.
        run_seed: the seed of the run.
        training_step: the current training step.
        rollout: the number of the rollout in its group.
        mode: the mode of the rollout.
        last_node: the newest node of the rollout.
        turn: number of finished turns, of the policy or a demonstrator.
        num_response_tokens: tokens after the prompt, without tips.
        num_splices_dropped: retrieved steps without room and retrieved turns over the limit since the last
            policy turn.
        num_tips_dropped: tips without room since the last policy turn.
        steps: the history.
        is_forked: whether the next turn is the first turn of a fork. The parent's hooks have already acted
            before it.
        branch_streak: number of consecutive newest turns at which rollouts forked.
        last_result: the environment's newest result.
        conversation: the messages so far, if they are rendered again before every turn.
        first_turn: number of finished policy turns before this episode, if the rollout has several.
        reflections: the policy's reflections on the earlier episodes; empty texts if there was no room.
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
    num_tips_dropped: int = 0
    steps: list[Step] = field(default_factory=list)
    is_forked: bool = False
    branch_streak: int = 0
    last_result: StepResult | None = None
    conversation: tuple[Message, ...] = ()
    first_turn: int = 0
    reflections: tuple[str, ...] = ()

    def snapshot(self) -> Self:
        """Copy the state, so that the copy does not change when this rollout continues."""
        return replace(self, episode=self.episode.history(), steps=list(self.steps))

    def stream(self, purpose: str) -> np.random.Generator:
        """Return the random stream of this purpose, training step, task, rollout and turn."""
        return stream(self.run_seed, purpose, self.training_step, self.task.key, self.rollout, self.turn)


class Hook:
    """Base class of hooks. Every method does nothing unless you override it.

    Hooks run in the order of the list. With rollout workers, each worker has copies of the hooks that are
    built from the same settings. To support them, override :meth:`snapshot`, :meth:`restore`,
    :meth:`gathered` and :meth:`absorb`, or derive from :class:`StatelessHook`. All values that they exchange
    are pickled.
    """

    max_reflection_tokens: int = 0
    """Maximum number of tokens of a reflection, see :meth:`closing_message`; 0: the hook requests none."""

    num_episodes: int = 1
    """Most episodes of a rollout. After one without success, the response to :meth:`closing_message` is a
    trained turn of the rollout, and the next episode begins with a new environment and a new context.
    """

    first_wave: int | None = None
    """Number of rollouts of a group that start at its prompt. The others are forks, or start at the prompt
    after these have ended. None: the hook does not branch.
    """

    streak_scope: Literal["lineage", "prompt"] = "lineage"
    """Whether ``branch_streak`` counts consecutive branched turns of a lineage, or of the whole group in the
    order of decisions.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = [name for name in vars(Hook) if not name.startswith("_")]
        for name in vars(cls):
            if name.startswith("_") or any(hasattr(base, name) for base in cls.__bases__):
                continue
            if meant := closest_match(name, known, cutoff=0.9):
                warnings.warn(
                    f"{cls.__name__}.{name} is no method of Hook; did you mean {meant}?", stacklevel=2
                )

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt | Demonstration]:
        """Called before every policy turn. Returns text to splice in, or actions and turns to execute."""
        return ()

    def after_turn(self, state: EpisodeState) -> None:
        """Called after the environment stepped; ``state`` contains the turn's entropies and the result."""

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Called when the episode has ended. Returns a message that requests a reflection, or None.

        The policy responds with at most ``max_reflection_tokens`` tokens. They are trained on only if another
        episode follows (``num_episodes``). No node contains the environment's last message;
        ``state.last_result`` does, truncated to the remaining room.
        If the returned message does not fit, the method is called again with a shorter ``state.last_result``.
        """
        return None

    def after_group(self, trace: Trace) -> None:
        """Called when all rollouts of a group have ended, group by group in order; may write to a memory."""

    def num_forks(self, state: EpisodeState) -> int | None:
        """Called after a policy turn and before the environment's step. Returns the number of rollouts that
        should fork here, or None if this turn is no branching point.

        The number may depend on the rollout's own history, its random streams and ``branch_streak``. It must
        not increase with ``branch_streak``, and must not depend on other rollouts or on the time or number of
        calls.
        """
        return None

    def budget(self, trace: Trace) -> int | None:
        """Called when the rollout of a first wave of size 1 has ended. Returns the number of rollouts that
        should start at the prompt, including this one, or None to leave the number open.
        """
        return None

    def snapshot(self) -> Any:
        """Return the state that a copy built from the same settings needs to act like this hook."""
        return None

    def restore(self, snapshot: Any) -> None:
        """Restore the snapshot and reset what :meth:`gathered` returns."""

    def gathered(self) -> Any:
        """Return what this copy has counted and collected since :meth:`restore`."""
        return None

    def absorb(self, gathered: Any) -> None:
        """Add the result of :meth:`gathered` of a copy to this hook.

        Update memories in :meth:`after_group` instead, which is only called on the original hook.
        """

    @property
    def is_portable(self) -> bool:
        """Whether copies in other processes can replace this hook."""
        return getattr(self.snapshot, "__func__", None) is not Hook.snapshot


class StatelessHook(Hook):
    """Base class of hooks without state: every copy acts alike."""

    def snapshot(self) -> None:
        return None


class _OldHook(Hook):
    """Adapter of an object that has a hook's methods but does not derive from :class:`Hook`."""

    def __init__(self, hook: object) -> None:
        names = [name for name in vars(Hook) if not name.startswith("_") and name != "is_portable"]
        for name in names:
            if hasattr(hook, name):
                setattr(self, name, getattr(hook, name))


def as_hooks(hooks: Sequence[object]) -> tuple[Hook, ...]:
    """Wrap objects that do not derive from :class:`Hook` (deprecated) in an adapter, with a warning."""
    adapted = []
    for hook in hooks:
        if not isinstance(hook, Hook):
            warnings.warn(
                f"{type(hook).__name__} must be a subclass of outrider.Hook or outrider.StatelessHook; "
                "an object that only has its methods works for one more version",
                FutureWarning,
                stacklevel=2,
            )
            # Give the adapter class the same name, because error messages contain it.
            hook = type(type(hook).__name__, (_OldHook,), {})(hook)
        adapted.append(hook)
    return tuple(adapted)


def format_retrieved(text: str) -> str:
    """Format steps that the policy did not write, as they appear in its context."""
    return f"<retrieve>{text.strip()}</retrieve>\n"


def join_observation(text: str, observation: str) -> str:
    """Join an action and its observation, on a new line unless whitespace separates them already."""
    separator = "" if not observation or observation[0].isspace() or text[-1:].isspace() else "\n"
    return text + separator + observation


def to_message(splice: Splice) -> Message:
    """Return the message of a splice, which continues the assistant's message."""
    return Message(role="inline", content=splice.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLocation:
    """``num_rollouts`` rollouts are in ``location``; ``longest`` entered first, ``seconds`` ago."""

    location: str
    num_rollouts: int
    longest: str
    seconds: float


class RolloutStatus:
    """Locations of all unfinished rollouts, read by the watchdog and the display. Thread-safe.

    ``changed`` is the time (of ``clock``) of the last change of any rollout.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._locations: dict[str, tuple[float, str]] = {}
        self.changed = clock()

    def set(self, rollout: str, location: str) -> None:
        """Record that a rollout entered ``location``, for example a call of its environment."""
        with self._lock:
            self.changed = self._clock()
            self._locations[rollout] = (self.changed, location)

    def remove(self, rollout: str) -> None:
        """Remove a finished rollout."""
        with self._lock:
            self.changed = self._clock()
            self._locations.pop(rollout, None)

    def snapshot(self) -> list[RolloutLocation]:
        """Return all locations, longest wait first."""
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
