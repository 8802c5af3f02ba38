"""Where the seconds of a training step go."""

import resource
import time
from dataclasses import dataclass, field

from outrider.train.components import Elsewhere


@dataclass(slots=True, kw_only=True)
class StepClock:
    """Marks are set as the step goes on, in the order of the methods; without ``elsewhere`` there are no
    processes that could be idle.
    """

    elsewhere: Elsewhere | None
    began: float = field(default_factory=time.perf_counter)
    _busy_s: float = field(init=False)
    _rollout_s: float = field(init=False)
    _rolled: float = field(init=False)
    _update_began: float = field(init=False)
    _update_ended: float = field(init=False)
    _waited_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._busy_s = 0.0 if self.elsewhere is None else self.elsewhere.busy_s()

    def rolled(self, *, ahead_s: float | None) -> None:
        """The rollouts are here; ``ahead_s`` is what they took where the step before played them."""
        self._rolled = time.perf_counter()
        self._rollout_s = self._rolled - self.began if ahead_s is None else ahead_s

    def updating(self) -> None:
        """The update begins."""
        self._update_began = time.perf_counter()

    def updated(self) -> None:
        """The update has ended; rollouts of the next step may be waited for now."""
        self._update_ended = time.perf_counter()

    def waited(self) -> None:
        """Nothing is under way any more."""
        self._waited_s = time.perf_counter() - self._update_ended

    def ended(self, *, num_policy_tokens: float, num_computed_tokens: int) -> dict[str, float]:
        """Seconds, shares in which processes stood idle, tokens per second, and the largest resident memory
        so far; called once the engines have the new weights.
        """
        now = time.perf_counter()
        step_s, update_s = now - self.began, now - self._rolled - self._waited_s
        values = {
            "time/rollout": self._rollout_s,
            "time/update": update_s,
            "time/step": step_s,
            "speed/rollout_tokens": num_policy_tokens / self._rollout_s,
            "speed/update_tokens": num_computed_tokens / update_s,
            "memory/peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if self.elsewhere is None:
            return values
        busy = {
            "time/idle_trainers": (self._update_ended - self._update_began) / step_s,
            "time/idle_engines": (self.elsewhere.busy_s() - self._busy_s) / step_s,
        }
        return values | {name: min(1.0, max(0.0, 1.0 - share)) for name, share in busy.items()}
