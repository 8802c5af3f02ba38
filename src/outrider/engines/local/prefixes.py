"""Which stored token sequence begins most like a new one: two look-ups in a sorted list, however many are
stored.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

_KIND = "q"  # 8 bytes an id: sequences are compared as bytes, which is quick where thousands begin alike
_SIZE = array(_KIND).itemsize


class Prefixes:
    """Token sequences, each under a number of its own."""

    def __init__(self, sequences: Iterable[tuple[int, Sequence[int]]] = ()) -> None:
        self._entries = sorted((_packed(ids), number) for number, ids in sequences if ids)

    def add(self, number: int, ids: Sequence[int]) -> None:
        """Store a sequence; an empty one begins like nothing and is left out."""
        if ids:
            insort(self._entries, (_packed(ids), number))

    def replace(self, number: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Store ``new`` where ``old`` was stored under this number."""
        if old:
            entry = (_packed(old), number)
            index = bisect_left(self._entries, entry)
            assert self._entries[index] == entry
            del self._entries[index]
        self.add(number, new)

    def longest(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """Length of the longest beginning that a stored sequence shares with ``ids``, and its number; (0,
        None) without one.

        In sorted order it stands right before or right behind the place of ``ids``.
        """
        target = _packed(ids)
        # -1: in front of an equal sequence, whatever its number.
        index = bisect_left(self._entries, (target, -1))
        best: tuple[int, int | None] = (0, None)
        for stored, number in self._entries[max(0, index - 1) : index + 1]:
            if (length := _common(stored, target) // _SIZE) > best[0]:
                best = (length, number)
        return best


def _packed(ids: Sequence[int]) -> bytes:
    # Not in the order of the ids, but equal beginnings still lie side by side, which is all that is asked.
    return array(_KIND, ids).tobytes()


def _common(first: bytes, second: bytes) -> int:
    """Length of the common beginning, by halves: slices are compared at once."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
