"""The memory of tips (EMPO², arXiv 2602.23008, Listing 1), written after earlier episodes and shown in later
ones.

There is one buffer per task key. A record has the key of a state, the text of the tip, and the score of the
episode that wrote it. Shape letters: N records of a buffer, D dimensions of a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.seeding import stream

# Changes of a run's memories, for the step records: added and removed tips, revisions of the step buffer.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """One change. ``memory`` is ``tips`` or ``steps`` (the step-trace buffer, for which only the revision is
    recorded, because its own file stores the steps by revision).

    ``version`` is the version of the memory after the change: for tips the number ever added to the buffer
    ``key``, for steps the revision. ``item_id``, ``text``, ``score``, ``writer`` (the rollout that wrote it)
    and ``written_at`` (its training step, from 0) are set for tips.
    """

    memory: Literal["tips", "steps"]
    change: Literal["added", "removed", "revision"]
    version: int
    key: str = ""
    item_id: int = -1
    text: str = ""
    score: float = 0.0
    writer: str = ""
    written_at: int = -1


Key: TypeAlias = NDArray[np.float32]
Rank = Literal["score", "similarity"]
Eviction = Literal["fifo", "lowest_score", "reservoir"]
SIMILARITY_DIGITS: Final = 6  # digits of a cosine that single-precision keys preserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """One record. ``tip_id`` is its number among all records ever added to its buffer.

    ``rollout_id`` and ``policy_version`` (the training step) identify the writer.
    """

    tip_id: int
    text: str
    score: float
    policy_version: int = 0
    rollout_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TipHit:
    """A record returned by a query, with the cosine between its key and the query."""

    tip: Tip
    similarity: float


@dataclass(slots=True)
class _Buffer:
    tips: list[Tip] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    num_added: int = 0
    matrix_ND: NDArray[np.float64] | None = None  # unit rows; None after a write


class TipMemory:
    """Tips by task key. ``capacity`` bounds every buffer; a full buffer evicts by ``eviction``.

    ``fifo`` evicts the oldest record (the paper); ``lowest_score`` the worst and among equals the oldest (a
    new record that is worse than all others is not stored); ``reservoir`` keeps a uniform sample of all
    records ever added (seeded). A text that is already in its buffer is not added again; with ``by_state``
    only if its key is the same too. An evicted text can be added again.
    """

    def __init__(
        self, *, capacity: int = 1000, eviction: Eviction = "fifo", per_state: bool = False, seed: int = 0
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, must be at least 1")
        self.capacity = capacity
        self.eviction: Eviction = eviction
        self._per_state = per_state
        self._seed = seed
        self._buffers: dict[str, _Buffer] = {}
        self._changes: list[MemoryChange] = []

    def __len__(self) -> int:
        return sum(len(buffer.tips) for buffer in self._buffers.values())

    def tips(self, task_key: str) -> tuple[Tip, ...]:
        """Return the records of one buffer, in the order in which they were added."""
        return tuple(self._buffers[task_key].tips) if task_key in self._buffers else ()

    def num_added(self, task_key: str) -> int:
        """Return the number of records ever added to one buffer."""
        return self._buffers[task_key].num_added if task_key in self._buffers else 0

    def add(
        self,
        task_key: str,
        state_key: Key,
        text: str,
        score: float,
        *,
        policy_version: int = 0,
        rollout_id: str = "",
    ) -> bool:
        """Store a record.

        Returns False if its text is already stored, it is worse than all stored records, or it was not drawn
        for the reservoir. Raises ValueError for a zero vector as key or a score that is not finite.
        """
        if not np.isfinite(score) or not np.isfinite(state_key).all() or not np.any(state_key):
            raise ValueError("a tip needs a finite score and a finite key that is not all zeros")
        buffer = self._buffers.setdefault(task_key, _Buffer())
        key = np.asarray(state_key, np.float32)
        same = (
            stored_key for tip, stored_key in zip(buffer.tips, buffer.keys, strict=True) if tip.text == text
        )
        if any(not self._per_state or np.array_equal(stored_key, key) for stored_key in same):
            return False
        tip = Tip(
            tip_id=buffer.num_added,
            text=text,
            score=score,
            policy_version=policy_version,
            rollout_id=rollout_id,
        )
        buffer.num_added += 1
        if len(buffer.tips) >= self.capacity:
            position = self._evicted(task_key, buffer, score)
            if position is None:
                return False
            self._note("removed", task_key, buffer.tips[position])
            del buffer.tips[position], buffer.keys[position]
        self._note("added", task_key, tip)
        buffer.tips.append(tip)
        buffer.keys.append(key)
        # Rebuilt at the next query, because many records are added between two queries.
        buffer.matrix_ND = None
        return True

    def pop_changes(self) -> list[MemoryChange]:
        """Return additions and evictions since the last call, in order, for the record of a step."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, change: Literal["added", "removed"], task_key: str, tip: Tip) -> None:
        self._changes.append(
            MemoryChange(
                memory="tips",
                change=change,
                version=self._buffers[task_key].num_added,
                key=task_key,
                item_id=tip.tip_id,
                text=tip.text,
                score=tip.score,
                writer=tip.rollout_id,
                written_at=tip.policy_version,
            )
        )

    def _evicted(self, task_key: str, buffer: _Buffer, score: float) -> int | None:
        """Return the position of the record to evict; None if the new record is not stored."""
        if self.eviction == "fifo":
            return 0
        if self.eviction == "lowest_score":
            worst = min(range(len(buffer.tips)), key=lambda i: (buffer.tips[i].score, buffer.tips[i].tip_id))
            return None if score < buffer.tips[worst].score else worst
        drawn = int(
            # The stream depends on the number of records ever added, so a resumed run draws the same.
            stream(self._seed, "tip reservoir", task_key, buffer.num_added).integers(buffer.num_added)
        )
        return drawn if drawn < len(buffer.tips) else None

    def query(
        self, task_key: str, state_key: Key, *, k: int = 10, min_similarity: float = 0.5, rank: Rank = "score"
    ) -> list[TipHit]:
        """Return up to ``k`` records whose cosine is strictly above ``min_similarity``, best first.

        ``rank`` orders by score (the paper's listing, in which similarity only filters) or by similarity; the
        older record wins ties. Cosines that agree to ``SIMILARITY_DIGITS`` digits are equal, because keys are
        stored in single precision.
        """
        buffer = self._buffers.get(task_key)
        if buffer is None or not buffer.tips:
            return []
        if buffer.matrix_ND is None:
            buffer.matrix_ND = np.stack([_unit(key) for key in buffer.keys])
        # no BLAS product, so that results are bit-identical on all machines
        similarities = (buffer.matrix_ND * _unit(state_key)).sum(axis=1)
        candidates = [
            i for i in range(len(buffer.tips)) if similarities[i] > min_similarity + 10**-SIMILARITY_DIGITS
        ]
        values = (
            similarities.round(SIMILARITY_DIGITS)
            if rank == "similarity"
            else [tip.score for tip in buffer.tips]
        )
        candidates.sort(key=lambda i: (-values[i], buffer.tips[i].tip_id))
        return [TipHit(tip=buffer.tips[i], similarity=float(similarities[i])) for i in candidates[:k]]

    def snapshot(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """Return plain data and arrays for :meth:`restore`; for checkpoints."""
        keys = list(self._buffers)
        state = {
            key: {
                "num_added": self._buffers[key].num_added,
                "tips": [asdict(tip) for tip in self._buffers[key].tips],
            }
            for key in keys
        }
        arrays = {
            f"tips/{number}": np.stack(self._buffers[key].keys)
            for number, key in enumerate(keys)
            if self._buffers[key].keys
        }
        # changes by rollouts that were sampled during an update and that no step has recorded yet
        changes = {"changes": [asdict(change) for change in self._changes]} if self._changes else {}
        return {"order": keys, "buffers": state, **changes}, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Restore a snapshot."""
        self._changes = [MemoryChange(**change) for change in state.get("changes", ())]
        self._buffers = {}
        for number, key in enumerate(state["order"]):
            saved = state["buffers"][key]
            tips = [Tip(**tip) for tip in saved["tips"]]
            vectors: Sequence[Key] = list(arrays[f"tips/{number}"]) if tips else []
            self._buffers[key] = _Buffer(tips=tips, keys=list(vectors), num_added=int(saved["num_added"]))


def _unit(key: Key) -> NDArray[np.float64]:
    values = np.asarray(key, np.float64)
    unit: NDArray[np.float64] = values / np.sqrt((values * values).sum())
    return unit
