"""The processes that compute one update together, as the update sees them; here there is one.

Every rank has all rollouts of a step and computes some. What one of them decides, all decide, because a rank
that goes on alone waits for the others for ever: decisions are made of what :meth:`Ranks.gather` gives.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from outrider.train.update.pack import PackedBatch, RolloutPath, pack

ValueT = TypeVar("ValueT")


class Ranks(Protocol):
    """``rank`` 0 of ``size`` is the one that counts what all of them know."""

    rank: int
    size: int

    def gather(self, value: ValueT) -> list[ValueT]:
        """The value of every rank, in the order of the ranks: the same list on all of them."""
        ...

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        """Those of ``paths``, which are the same on all ranks, that this one computes; each is somewhere."""
        ...


class SingleRank:
    """One process, which computes everything."""

    rank = 0
    size = 1

    def gather(self, value: ValueT) -> list[ValueT]:
        """See :class:`Ranks`."""
        return [value]

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        """See :class:`Ranks`."""
        return list(paths)


def pack_for_rank(paths: Sequence[RolloutPath], ranks: Ranks, *, max_tokens: int) -> list[PackedBatch]:
    """The micro-batches of this rank's rollouts. Beside others the largest come first, so that passes of like
    size meet.
    """
    batches = list(pack(paths, max_tokens=max_tokens))
    return batches if ranks.size == 1 else sorted(batches, key=lambda batch: -batch.num_tokens)


def padded_micro_batches(batches: Sequence[PackedBatch], ranks: Ranks) -> Iterator[PackedBatch | None]:
    """The micro-batches, and None as often as another rank has more: a forward needs every rank.

    For None a rank calls :meth:`outrider.train.update.policy.Scorer.dummy_forward` where the others score.
    """
    max_batches = max(
        ranks.gather(len(batches))
    )  # before the first: the ranks are at one place now, and not later
    yield from batches
    yield from [None] * (max_batches - len(batches))
