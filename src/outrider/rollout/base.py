"""The budgets of one rollout."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final

from pydantic import Field

from outrider.config import Settings


class Limits(Settings):
    """Budgets of one rollout; none is ever exceeded. Observations and retrieved steps count as response
    tokens too.

    A longer observation or retrieved step loses its middle. What still leaves the policy no room for a token
    is not appended: the rollout ends there as truncated after an observation. A splice must leave room for a
    whole turn, or the rollout goes on without it.
    """

    max_turns: int = Field(8, ge=1)
    max_turn_tokens: int = Field(256, ge=1)
    max_response_tokens: int = Field(2048, ge=1)
    max_observation_tokens: int = Field(1024, ge=1)
    max_splice_tokens: int = Field(512, ge=1)
    step_timeout_s: float = Field(60.0, gt=0)


# The mode of a rollout: one word a method, joined by "+" where several methods act in one rollout.


ON_POLICY: Final = "on_policy"
HYBRID: Final = "hybrid"  # may retrieve steps (RAPO)


def join_modes(*parts: str) -> str:
    """One mode that says what every method does."""
    return "+".join(parts)


def has_part(mode: str, part: str) -> bool:
    """Whether one of the methods has a rollout of this mode do ``part``."""
    return part in mode.split("+")


# Where the open rollouts of a run are: for the person who watches one that stands still. Nothing reads it to
# decide.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLocation:
    """``num_rollouts`` are in ``location``; ``longest`` is the one that came first, ``seconds`` ago."""

    location: str
    num_rollouts: int
    longest: str
    seconds: float


class RolloutStatus:
    """Written by the threads that play, read by the one that watches. ``changed`` is when (of ``clock``) a
    rollout last moved on."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._locations: dict[str, tuple[float, str]] = {}
        self.changed = clock()

    def set(self, rollout: str, location: str) -> None:
        """A rollout goes on to ``location``: a call of its environment, or the engine."""
        with self._lock:
            self.changed = self._clock()
            self._locations[rollout] = (self.changed, location)

    def remove(self, rollout: str) -> None:
        """A rollout is no longer open."""
        with self._lock:
            self.changed = self._clock()
            self._locations.pop(rollout, None)

    def snapshot(self) -> list[RolloutLocation]:
        """Every place where rollouts are, the one that holds one for longest first."""
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
