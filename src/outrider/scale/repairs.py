"""How often processes of a run were replaced: counted for the metrics of a step, and allowed so often."""

from collections import Counter
from typing import Final

from outrider.errors import ClusterFault, ProcessLost
from outrider.train.cluster_restarts import Allowance

COUNTED: Final = ("cluster/worker_deaths", "cluster/engine_deaths", "cluster/engine_hangs",
                  "weights/num_failed", "rollout/num_groups_replayed")  # fmt: skip


class Repairs:
    """``allowance`` is the run's: what all begin anew for counts there too."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._number = 0  # of the newest repair, within the hour
        self._counts: Counter[str] = Counter()
        self.num_replaced: Counter[str] = Counter()  # by name, of the whole run
        self._notes: list[str] = []

    def allow(self, fault: ClusterFault, *, is_another: bool = False) -> None:
        """A process is to be replaced, because of this fault; ``is_another``: one more of those that are gone
        at once, which count once. Raises NoRepair where that is one too many.
        """
        is_free = isinstance(fault, ProcessLost) and not fault.is_charged
        if not is_another and not is_free:
            self._number = self._allowance.spend(fault)
        message = str(fault).partition("; ")[0]
        counted = f", repair {self._number} of {self._allowance.limit} within an hour"
        self._notes.append(f"{message}; replaced{'' if is_free else counted}")

    def refund(self, num: int) -> None:
        """The newest ``num`` repairs were the fault of a task: they do not count."""
        self._allowance.refund(num)

    def count_process(self, fault: ProcessLost) -> None:
        """An engine or a rollout worker that died or was silent."""
        self.num_replaced[fault.process] += 1
        if fault.process.startswith("rollout worker"):
            self._counts["cluster/worker_deaths"] += 1
        else:
            self._counts["cluster/engine_hangs" if fault.is_silent else "cluster/engine_deaths"] += 1

    def count(self, name: str, num: int = 1) -> None:
        """One of :data:`COUNTED`."""
        self._counts[name] += num

    def pop_counts(self) -> dict[str, float]:
        """Since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTED}

    def note(self, line: str) -> None:
        """One more line for the person who watches."""
        self._notes.append(line)

    def pop_notes(self) -> list[str]:
        """Since the last call: for the person who watches."""
        notes, self._notes = self._notes, []
        return notes
