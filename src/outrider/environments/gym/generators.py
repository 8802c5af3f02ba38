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
class Drawn:
    """A state of both generators."""

    python: Any
    numpy: Any

    @classmethod
    def of_seed(cls, seed: int) -> "Drawn":
        """The state that ``random.seed`` and ``numpy.random.seed`` would give; nothing is set."""
        return cls(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @classmethod
    def now(cls) -> "Drawn":
        """The state that the process has."""
        return cls(random.getstate(), np.random.get_state())

    def set(self) -> None:
        """Make it the process's."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class OwnDraws:
    """One episode's state. ``timeout_s`` bounds the wait for other episodes: one that hangs inside its
    environment must not stop all others for ever.
    """

    def __init__(self, state: Drawn, timeout_s: float) -> None:
        self._state = state
        self._timeout_s = timeout_s

    def twin(self) -> "OwnDraws":
        """The same state, for a copy of the episode."""
        return OwnDraws(self._state, self._timeout_s)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This state is the process's, and nobody else is in an environment. Raises
        :class:`EnvironmentFault` where the wait was too long.
        """
        if not _INSIDE.acquire(timeout=self._timeout_s):
            raise EnvironmentFault(f"another environment has not returned for {self._timeout_s:g} s")
        outside = Drawn.now()
        try:
            self._state.set()
            yield
        finally:
            self._state = Drawn.now()
            outside.set()
            _INSIDE.release()
