"""Which rollouts a buffer build has paid for already: the buffer keeps only the best of them, so it cannot
tell.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.atomic_io import append
from outrider.json_lines import readable
from outrider.rollout.collect import Collected


class CollectionLog:
    """One JSON line per rollout that ended without a fault, beside the buffer file.

    A torn line is passed over: its rollout is played again and found in the buffer.
    """

    def __init__(self, buffer: Path) -> None:
        self.path = buffer.with_name(f"{buffer.name}.collected.jsonl")
        if not buffer.exists():  # a log without its buffer speaks of another one
            self.path.unlink(missing_ok=True)

    def done(self) -> frozenset[str]:
        """Trajectory ids of finished rollouts."""
        if not self.path.exists():
            return frozenset()
        names = (entry.get("trajectory_id") for _, entry in readable(self.path) if entry is not None)
        return frozenset(name for name in names if isinstance(name, str))

    def add(self, collected: Sequence[Collected]) -> None:
        """Record what has reached the buffer, and force it to disk."""
        lines = [
            json.dumps(
                {
                    "trajectory_id": rollout.trajectory_id,
                    "outcome": rollout.outcome.value,
                    "reward": rollout.trajectory.reward,
                }
            )
            for rollout in collected
            if rollout.trajectory is not None
        ]
        # on a line of its own whatever a kill left behind
        append(self.path, "".join(f"\n{line}\n" for line in lines).encode())
