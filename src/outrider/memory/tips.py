"""The memory of tips (EMPO², arXiv 2602.23008, Listing 1): what earlier episodes say to the next ones.

One buffer per task key. A record has the key of a state, the text that is shown, and the score of the episode
that wrote it. Shape letters: N records of a buffer, D dimensions of a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.seeding import stream

# What changed in a run's memories, for the record: tips that came and went, and the steps' revision.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """One change. ``memory`` is ``tips`` or ``steps`` (the step-trace buffer, which only tells its revision:
    its own file holds the steps with theirs).

    ``version`` is the memory's after the change: of tips the number ever added to the buffer ``key``, of
    steps the revision. ``item_id``, ``text``, ``score``, ``writer`` (the rollout that wrote it) and
    ``written_at`` (its training step, from 0) belong to a tip.
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
SIMILARITY_DIGITS: Final = 6  # of a cosine that single precision keeps: what differs behind them is equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """One record. ``tip_id`` counts the records ever added to its buffer.

    ``rollout_id`` and ``policy_version`` (the training step) say whose it is.
    """

    tip_id: int
    text: str
    score: float
    policy_version: int = 0
    rollout_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TipHit:
    """A record that a query found, with the cosine of its key and the query's."""

    tip: Tip
    similarity: float


@dataclass(slots=True)
class _Buffer:
    tips: list[Tip] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    num_added: int = 0
    matrix_ND: NDArray[np.float64] | None = None  # unit rows; None after a write


class TipMemory:
    """Tips by task key. ``capacity`` bounds every buffer; a full one evicts by ``eviction``.

    ``fifo`` the oldest (the paper), ``lowest_score`` the worst, of equals the oldest (a new one that is worse
    than all is not kept), ``reservoir`` keeps a uniform sample of all that were ever added (seeded). A text
    that its buffer holds already is not added again, with ``by_state`` only if its key is the same too; an
    evicted one may come back.
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
        """The records of one buffer, in the order in which they were added."""
        return tuple(self._buffers[task_key].tips) if task_key in self._buffers else ()

    def num_added(self, task_key: str) -> int:
        """Records ever added to one buffer."""
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
        """Store a record; False when its text is there already, it is worse than all that are kept, or it
        lost the reservoir's draw.

        Raises ValueError for a key without length or a score that is not finite.
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
        # Made again at the next query: many records are added between two.
        buffer.matrix_ND = None
        return True

    def pop_changes(self) -> list[MemoryChange]:
        """What was added and evicted since this was last asked, in order; for the record of a step."""
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
        """Position of the record that makes room; None: the new one is not kept."""
        if self.eviction == "fifo":
            return 0
        if self.eviction == "lowest_score":
            worst = min(range(len(buffer.tips)), key=lambda i: (buffer.tips[i].score, buffer.tips[i].tip_id))
            return None if score < buffer.tips[worst].score else worst
        drawn = int(
            # Named by the number of records ever added: a resumed run goes on with the same draws.
            stream(self._seed, "tip reservoir", task_key, buffer.num_added).integers(buffer.num_added)
        )
        return drawn if drawn < len(buffer.tips) else None

    def query(
        self, task_key: str, state_key: Key, *, k: int = 10, min_similarity: float = 0.5, rank: Rank = "score"
    ) -> list[TipHit]:
        """Up to ``k`` records whose cosine is strictly above ``min_similarity``, best first.

        ``rank`` by score (the paper's listing: similarity only filters) or by similarity; ties go to the
        older record. Cosines that agree to ``SIMILARITY_DIGITS`` digits are equal: keys are kept in single
        precision.
        """
        buffer = self._buffers.get(task_key)
        if buffer is None or not buffer.tips:
            return []
        if buffer.matrix_ND is None:
            buffer.matrix_ND = np.stack([_unit(key) for key in buffer.keys])
        # not a BLAS product: the same bits everywhere
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
        """Plain data and arrays that :meth:`restore` takes; for checkpoints."""
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
        # of rollouts that no step has recorded yet: those that were played beside an update
        changes = {"changes": [asdict(change) for change in self._changes]} if self._changes else {}
        return {"order": keys, "buffers": state, **changes}, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Become what was saved."""
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
