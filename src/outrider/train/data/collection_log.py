"""Which rollouts a buffer build has paid for already: the buffer keeps only the best of them, so it cannot
tell.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.atomic_io import append
from outrider.rollout.collect import Collected


class CollectionLog:
    """One JSON line a rollout that ended without a fault, beside the buffer file.

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
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return frozenset(name for line in lines if (name := _name(line)) is not None)

    def add(self, collected: Sequence[Collected]) -> None:
        """Record what has reached the buffer, and force it to disk."""
        lines = [
            json.dumps(
                {
                    "trajectory_id": one.trajectory_id,
                    "outcome": one.outcome.value,
                    "reward": one.trajectory.reward,
                }
            )
            for one in collected
            if one.trajectory is not None
        ]
        # on a line of its own whatever a kill left behind
        append(self.path, "".join(f"\n{line}\n" for line in lines).encode())


def _name(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return (
        entry["trajectory_id"]
        if isinstance(entry, dict) and isinstance(entry.get("trajectory_id"), str)
        else None
    )
