"""A cap on the tool calls of a whole training batch, which does not depend on how fast tools answer."""

import threading


class CallBudget:
    """Counts the calls that all episodes of a batch execute. Once ``limit`` are spent, the next round is
    refused its calls.

    Whether there are calls left is decided when a round begins and holds for the whole round: decided call by
    call, the fastest tools would choose who is refused, and one seed would not give one batch. So the last
    round may go over the limit by its own calls. Outside a limited batch nothing is refused.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._whole = limit  # of the batch, where several processes play it
        self.num_executed = 0
        self._limited = False
        self._open = True
        self._lock = threading.Lock()

    def set_share(self, begin: int, end: int, num_groups: int) -> None:
        """See :class:`outrider.environments.base.CallCapped`."""
        if self._whole is not None:
            self.limit = self._whole * end // num_groups - self._whole * begin // num_groups

    def num_spent(self) -> int:
        """See :class:`outrider.environments.base.CallCapped`."""
        return self.num_executed

    def resume_batch(self, num_spent: int) -> None:
        """See :class:`outrider.environments.base.CallCapped`."""
        self._limited = self.limit is not None
        self.num_executed = num_spent
        self.begin_round()

    def begin_batch(self, *, limited: bool) -> None:
        """A new batch has all its calls."""
        self._limited = limited and self.limit is not None
        self.num_executed = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Nobody executes anything now: decide about the next round."""
        self._open = not self._limited or self.limit is None or self.num_executed < self.limit

    @property
    def is_open(self) -> bool:
        """Whether calls of this round are executed."""
        return self._open

    def count(self) -> None:
        """One call was executed."""
        with self._lock:
            self.num_executed += 1
