"""Search in the text of all turns, file by file, newest step first, without loading a run into memory.

A file's texts are one piece of bytes for the search; ASCII letters are found in either case. What was read is
kept compressed within a bound, since people change one letter and search again.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

MOST_HITS: Final = 200
_READERS: Final = 2
_BATCH: Final = 32  # files; between two the search may end early
_KEPT_BYTES: Final = 96 * 2**20
_AROUND: Final = 60  # letters of a hit's surroundings


@dataclass(frozen=True, slots=True)
class _Texts:
    """``packed`` are all texts of a file one behind the other in lower case, LZ4; ``ends_N`` where each of
    its N nodes ends.
    """

    packed: Any
    size: int
    ends_N: NDArray[np.int64]


class TextSearch:
    """The texts of one run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "traces"
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, int, int], _Texts] = OrderedDict()
        self._num_bytes = 0
        self._reading: dict[tuple[str, int, int], Future[_Texts]] = {}
        self._readers = ThreadPoolExecutor(_READERS)

    def find(self, words: str, places: Sequence[str]) -> dict[str, Any]:
        """Up to :data:`MOST_HITS` nodes that hold ``words``, of the newest of ``places`` first, and whether
        there may be more.
        """
        wanted = words.encode("utf-8", "replace").lower()
        hits: list[dict[str, Any]] = []
        newest_first = list(reversed(places))
        for start in range(0, len(newest_first), _BATCH):
            batch = newest_first[start : start + _BATCH]
            found = self._readers.map(lambda place: self._nodes(place, wanted), batch)
            for place, nodes in zip(batch, found, strict=True):
                if nodes:
                    hits += self._told(place, nodes[: MOST_HITS - len(hits)], words)
                if len(hits) >= MOST_HITS:
                    return {"hits": hits, "more": True}
        return {"hits": hits, "more": False}

    def warm(self, places: Sequence[str]) -> None:
        """Read what fits into the bound, newest first: a first search need not."""
        for place in reversed(places):
            if self._num_bytes > _KEPT_BYTES * 0.9:
                return
            self._nodes(place, b"\x00 nobody writes this \x00")

    def _nodes(self, place: str, wanted: bytes) -> list[int]:
        try:
            texts = self._texts(place)
        except (OSError, pa.ArrowException, KeyError):
            return []  # gone or damaged since it was listed; the page of the step says so
        whole = pa.decompress(texts.packed, texts.size, codec="lz4", asbytes=True)
        return list(dict.fromkeys(_places(whole, wanted, texts.ends_N)))

    def _texts(self, place: str) -> _Texts:
        path = self._folder / f"{place}.parquet"
        facts = path.stat()
        key = place, facts.st_size, facts.st_mtime_ns
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
            is_mine = key not in self._reading
            reading = self._reading.setdefault(key, Future())
        if not is_mine:
            return reading.result()  # another thread is at it
        try:
            made = _read(path)
            self._keep(key, made)
            reading.set_result(made)
            return made
        except BaseException as error:
            reading.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._reading[key]

    def _keep(self, key: tuple[str, int, int], texts: _Texts) -> None:
        with self._lock:
            self._kept[key] = texts
            self._num_bytes += texts.packed.size + texts.ends_N.nbytes
            while self._num_bytes > _KEPT_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= gone.packed.size + gone.ends_N.nbytes

    def _told(self, place: str, nodes: Sequence[int], words: str) -> list[dict[str, Any]]:
        columns = ["task_key", "trace_id", "node_id", "rollout", "origin", "text"]
        with (self._folder / f"{place}.parquet").open("rb") as stream:
            rows = pq.ParquetFile(stream).read(columns=columns, use_threads=False).take(nodes).to_pylist()
        return [
            {name: row[name] for name in columns[:-1]} | {"where": place, "text": _around(row["text"], words)}
            for row in rows
        ]


def _read(path: Path) -> _Texts:
    with path.open("rb") as stream:
        column = pq.ParquetFile(stream).read(columns=["text"], use_threads=False)["text"].combine_chunks()
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    whole = (b"" if data is None else data.to_pybytes())[offsets[0] : offsets[-1]].lower()
    ends_N = (offsets[1:] - offsets[0]).astype(np.int64)
    return _Texts(pa.compress(whole, codec="lz4"), len(whole), ends_N)


def _places(whole: bytes, wanted: bytes, ends_N: NDArray[np.int64]) -> Iterator[int]:
    """Nodes in which the bytes are, without those that begin in one and end in the next."""
    at = whole.find(wanted) if wanted else -1
    while at != -1:
        node = int(np.searchsorted(ends_N, at, side="right"))
        end = int(ends_N[node])
        if at + len(wanted) <= end:
            yield node
            at = whole.find(wanted, end)  # one hit a node is enough
        else:
            at = whole.find(wanted, at + 1)


def _around(text: str, words: str) -> str:
    at = max(0, text.lower().find(words.lower()))
    start, end = max(0, at - _AROUND), at + len(words) + _AROUND
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
