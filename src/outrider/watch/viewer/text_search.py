"""Search in the text of all turns, file by file, newest step first, without loading a run into memory.

A file's texts are one piece of bytes for the search; ASCII letters are found in either case. What was read is
kept compressed within a bound, since people change one letter and search again. What takes the time (reading,
lower case, compression) is Arrow's and lets other threads run.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

MOST_HITS: Final = 200
_READERS: Final = 2
_BATCH: Final = 32  # files; between two the search may end early
_WARM_BATCH: Final = 4  # files that are read before anybody searches; one who does waits for no more
_COLUMNS: Final = ("task_key", "trace_id", "node_id", "rollout", "origin", "text")
_MAX_CACHE_BYTES: Final = 96 * 2**20
# Gone or damaged since it was listed; the page of the step says so.
_UNREADABLE: Final = (OSError, pa.ArrowException, KeyError)
_CONTEXT_CHARS: Final = 60  # letters of a hit's surroundings


@dataclass(frozen=True, slots=True)
class _Texts:
    """``packed`` are all texts of a file one behind the other in lower case, LZ4; ``ends_N`` where each of
    its N nodes ends.
    """

    packed: Any
    size: int
    ends_N: NDArray[np.int64]

    @classmethod
    def from_bytes(cls, whole: bytes, ends_N: NDArray[np.int64]) -> "_Texts":
        return cls(pa.compress(whole, codec="lz4"), len(whole), ends_N)

    def whole(self) -> bytes:
        content: bytes = pa.decompress(self.packed, self.size, codec="lz4", asbytes=True)
        return content


class TextSearch:
    """The texts of one run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "traces"
        self._lock = Lock()
        self._cache: OrderedDict[tuple[str, int, int], _Texts] = OrderedDict()
        self._num_bytes = 0
        self._reading: dict[tuple[str, int, int], Future[tuple[bytes, NDArray[np.int64]]]] = {}
        self._readers = ThreadPoolExecutor(_READERS)
        self._is_cancelled = False

    def find(self, words: str, stems: Sequence[str]) -> dict[str, Any]:
        """Up to :data:`MOST_HITS` nodes that hold ``words``, of the newest of ``stems`` first, and whether
        there may be more.
        """
        query = words.encode("utf-8", "replace").lower()
        hits: list[dict[str, Any]] = []
        newest_first = list(reversed(stems))
        for start in range(0, len(newest_first), _BATCH):
            batch = newest_first[start : start + _BATCH]
            for file_hits in self._readers.map(lambda place: self._hits(place, query, words), batch):
                hits += file_hits
            if len(hits) >= MOST_HITS:
                return {"hits": hits[:MOST_HITS], "more": True}
        return {"hits": hits, "more": False}

    def warm(self, stems: Sequence[str]) -> None:
        """Read what fits into the bound, newest first: a first search need not."""
        newest_first = list(reversed(stems))
        for start in range(0, len(newest_first), _WARM_BATCH):
            if self._is_cancelled or self._num_bytes > _MAX_CACHE_BYTES * 0.9:
                return
            for _ in self._readers.map(self._prefetch, newest_first[start : start + _WARM_BATCH]):
                pass

    def leave(self) -> None:
        """Another run is looked at: read no more ahead."""
        self._is_cancelled = True

    def _hits(self, stem: str, query: bytes, words: str) -> list[dict[str, Any]]:
        try:
            whole, ends_N = self._texts(stem)
            nodes = list(islice(_matching_nodes(whole, query, ends_N), MOST_HITS))
            return self._to_hits(stem, nodes, words) if nodes else []
        except _UNREADABLE:
            return []

    def _prefetch(self, stem: str) -> None:
        with suppress(*_UNREADABLE):
            self._texts(stem)

    def _texts(self, stem: str) -> tuple[bytes, NDArray[np.int64]]:
        path = self._folder / f"{stem}.parquet"
        facts = path.stat()
        key = stem, facts.st_size, facts.st_mtime_ns
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
            is_owner = cached is None and key not in self._reading
            reading = None if cached is not None else self._reading.setdefault(key, Future())
        if cached is not None:
            return cached.whole(), cached.ends_N
        assert reading is not None
        if not is_owner:
            return reading.result()  # another thread is at it
        try:
            texts = _read(path)
            reading.set_result(texts)
            self._store(key, _Texts.from_bytes(*texts))
            return texts
        except BaseException as error:
            if not reading.done():
                reading.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._reading[key]

    def _store(self, key: tuple[str, int, int], texts: _Texts) -> None:
        with self._lock:
            self._cache[key] = texts
            self._num_bytes += texts.packed.size + texts.ends_N.nbytes
            while self._num_bytes > _MAX_CACHE_BYTES:
                _, evicted = self._cache.popitem(last=False)
                self._num_bytes -= evicted.packed.size + evicted.ends_N.nbytes

    def _to_hits(self, stem: str, nodes: Sequence[int], words: str) -> list[dict[str, Any]]:
        rows = _column_table(self._folder / f"{stem}.parquet", _COLUMNS).take(nodes).to_pylist()
        return [
            {name: row[name] for name in _COLUMNS[:-1]}
            | {"where": stem, "text": _excerpt(row["text"], words)}
            for row in rows
        ]


def _column_table(path: Path, columns: Sequence[str]) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pq.ParquetFile(file).read(columns=list(columns), use_threads=False)


def _read(path: Path) -> tuple[bytes, NDArray[np.int64]]:
    """All texts one behind the other, and where each ends; a file's texts may be several arrays."""
    pieces: list[bytes] = []
    ends: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    size = 0
    for chunk in pc.ascii_lower(_column_table(path, ["text"])["text"]).chunks:
        if len(chunk):
            offsets = np.frombuffer(chunk.buffers()[1], np.int32)[
                chunk.offset : chunk.offset + len(chunk) + 1
            ]
            first, last = int(offsets[0]), int(offsets[-1])
            pieces.append(chunk.buffers()[2].slice(first, last - first).to_pybytes() if last > first else b"")
            ends.append(offsets[1:].astype(np.int64) - first + size)
            size += last - first
    return b"".join(pieces), np.concatenate(ends)


def _matching_nodes(whole: bytes, query: bytes, ends_N: NDArray[np.int64]) -> Iterator[int]:
    """Nodes in which the bytes are, without those that begin in one and end in the next."""
    position = whole.find(query) if query else -1
    while position != -1:
        node = int(np.searchsorted(ends_N, position, side="right"))
        end = int(ends_N[node])
        if position + len(query) <= end:
            yield node
            position = whole.find(query, end)  # one hit a node is enough
        else:
            position = whole.find(query, position + 1)


def _excerpt(text: str, words: str) -> str:
    position = max(0, text.lower().find(words.lower()))
    start, end = max(0, position - _CONTEXT_CHARS), position + len(words) + _CONTEXT_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
