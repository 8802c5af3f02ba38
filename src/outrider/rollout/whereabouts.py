"""Where the open rollouts of a run are: for the person who watches one that stands still. Nothing reads it to
decide."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


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
