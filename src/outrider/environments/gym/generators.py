"""Python's and NumPy's global generators, with a state of its own for every episode.

Games that draw from them (GEM seeds them in ``reset`` and draws in ``step``) would take each other's numbers
where several episodes are played in one process: the same seed would be another game from run to run.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import EnvironmentFault

_INSIDE = threading.Lock()


@dataclass(frozen=True, slots=True)
class RandomState:
    """A state of both generators."""

    python: Any
    numpy: Any

    @classmethod
    def from_seed(cls, seed: int) -> "RandomState":
        """The state that ``random.seed`` and ``numpy.random.seed`` would give; nothing is set."""
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @classmethod
    def current(cls) -> "RandomState":
        """The state that the process has."""
        return cls(random.getstate(), np.random.get_state())

    def set(self) -> None:
        """Make it the process's."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class IsolatedRandom:
    """One episode's state. ``timeout_s`` bounds the wait for other episodes: one that hangs inside its
    environment must not stop all others for ever.
    """

    def __init__(self, state: RandomState, timeout_s: float) -> None:
        self._state = state
        self._timeout_s = timeout_s

    def twin(self) -> "IsolatedRandom":
        """The same state, for a copy of the episode."""
        return IsolatedRandom(self._state, self._timeout_s)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This state is the process's, and nobody else is in an environment. Raises
        :class:`EnvironmentFault` where the wait was too long.
        """
        if not _INSIDE.acquire(timeout=self._timeout_s):
            raise EnvironmentFault(f"another environment has not returned for {self._timeout_s:g} s")
        outside = RandomState.current()
        try:
            self._state.set()
            yield
        finally:
            self._state = RandomState.current()
            outside.set()
            _INSIDE.release()
