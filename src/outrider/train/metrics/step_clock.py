"""Where the seconds of a training step go."""

import resource
import time
from dataclasses import dataclass, field

from outrider.train.components import RemoteRollouts


@dataclass(slots=True, kw_only=True)
class StepClock:
    """Marks are set as the step goes on, in the order of the methods; without ``remote`` there are no
    processes that could be idle.
    """

    remote: RemoteRollouts | None
    start: float = field(default_factory=time.perf_counter)
    _busy_s: float = field(init=False)
    _rollout_s: float = field(init=False)
    _rollout_end: float = field(init=False)
    _update_start: float = field(init=False)
    _update_end: float = field(init=False)
    _waited_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._busy_s = 0.0 if self.remote is None else self.remote.busy_s()

    def mark_rollouts(self, *, prefetch_s: float | None) -> None:
        """The rollouts are here; ``prefetch_s`` is what they took where the step before played them."""
        self._rollout_end = time.perf_counter()
        self._rollout_s = self._rollout_end - self.start if prefetch_s is None else prefetch_s

    def mark_update_start(self) -> None:
        """The update begins."""
        self._update_start = time.perf_counter()

    def mark_update_end(self) -> None:
        """The update has ended; rollouts of the next step may be waited for now."""
        self._update_end = time.perf_counter()

    def mark_wait_end(self) -> None:
        """Nothing is under way any more."""
        self._waited_s = time.perf_counter() - self._update_end

    def metrics(self, *, num_policy_tokens: float, num_computed_tokens: int) -> dict[str, float]:
        """Seconds, shares in which processes stood idle, tokens per second, and the largest resident memory
        so far; called once the engines have the new weights.
        """
        now = time.perf_counter()
        step_s, update_s = now - self.start, now - self._rollout_end - self._waited_s
        values = {
            "time/rollout": self._rollout_s,
            "time/update": update_s,
            "time/step": step_s,
            "speed/rollout_tokens": num_policy_tokens / self._rollout_s,
            "speed/update_tokens": num_computed_tokens / update_s,
            "memory/peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if self.remote is None:
            return values
        busy = {
            "time/idle_trainers": (self._update_end - self._update_start) / step_s,
            "time/idle_engines": (self.remote.busy_s() - self._busy_s) / step_s,
        }
        return values | {name: min(1.0, max(0.0, 1.0 - share)) for name, share in busy.items()}
