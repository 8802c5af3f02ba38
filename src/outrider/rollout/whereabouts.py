"""Where the open rollouts of a run are: for the person who watches one that stands still. Nothing reads it to
decide."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabout:
    """``num_rollouts`` are in ``place``; ``longest`` is the one that came first, ``seconds`` ago."""

    place: str
    num_rollouts: int
    longest: str
    seconds: float


class Whereabouts:
    """Written by the threads that play, read by the one that watches. ``changed`` is when (of ``clock``) a
    rollout last moved on."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._places: dict[str, tuple[float, str]] = {}
        self.changed = clock()

    def at(self, rollout: str, place: str) -> None:
        """A rollout goes on to ``place``: a call of its environment, or the engine."""
        with self._lock:
            self.changed = self._clock()
            self._places[rollout] = (self.changed, place)

    def ended(self, rollout: str) -> None:
        """A rollout is no longer open."""
        with self._lock:
            self.changed = self._clock()
            self._places.pop(rollout, None)

    def told(self) -> list[Whereabout]:
        """Every place where rollouts are, the one that holds one for longest first."""
        with self._lock:
            entries = sorted((since, place, rollout) for rollout, (since, place) in self._places.items())
            now = self._clock()
        by_place: dict[str, list[tuple[float, str]]] = {}
        for since, place, rollout in entries:
            by_place.setdefault(place, []).append((since, rollout))
        return [
            Whereabout(place=place, num_rollouts=len(held), longest=held[0][1], seconds=now - held[0][0])
            for place, held in by_place.items()
        ]
