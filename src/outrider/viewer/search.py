"""All rollouts of a run as one table in memory, a few hundred bytes each; no text and no token is in it."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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

from outrider.errors import DataError
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    TraceReader,
    evaluation_file,
    read_rollouts,
    step_file,
)

_READERS: Final = 2
_FEW: Final = ("task_key", "outcome", "fault", "mode", "kind", "trace_id")  # of few different texts


class RolloutIndex:
    """Reads what is new whenever it is asked. :meth:`table` has the columns of the rollouts' files, and
    ``where``: the name of the file without its ending.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = Lock()
        self._known_facts: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, pa.Table] = {}
        self._table: pa.Table | None = None
        self.notes: dict[str, str] = {}  # what is wrong with a file, by its place

    def stems(self) -> list[str]:
        """Steps in order, then evaluations."""
        files = TraceReader(self._run / "traces").files
        return [
            *(step_file(step).removesuffix(".parquet") for step in files.steps()),
            *(evaluation_file(number).removesuffix(".parquet") for number in files.evaluations()),
        ]

    def table(self, only: str = "") -> pa.Table:
        """Of all that is on file now, without those that cannot be read: they are in ``notes``. Of one file
        alone: raises DataError.
        """
        if only:
            return self._read_table(only) if only in self.stems() else _EMPTY
        with self._lock:
            stems = self.stems()
            facts = {stem: self._facts(stem) for stem in stems}
            changed = [stem for stem in stems if self._known_facts.get(stem) != facts[stem]]
            if changed or self._table is None or facts.keys() != self._known_facts.keys():
                with ThreadPoolExecutor(_READERS) as readers:
                    for stem, part in zip(changed, readers.map(self._read, changed), strict=True):
                        self._parts[stem] = part
                self.notes = {stem: problem for stem, problem in self.notes.items() if stem in facts}
                self._parts = {stem: self._parts[stem] for stem in stems}
                self._known_facts = facts
                self._table = pa.concat_tables([_EMPTY, *self._parts.values()]).unify_dictionaries()
                self._table = self._table.combine_chunks()
            return self._table

    def _facts(self, stem: str) -> tuple[int, int]:
        for folder in (ROLLOUTS, "traces"):
            path = self._run / folder / f"{stem}.parquet"
            if path.is_file():
                facts = path.stat()
                return facts.st_size, facts.st_mtime_ns
        return -1, -1

    def _read(self, stem: str) -> pa.Table:
        try:
            table = self._read_table(stem)
        except DataError as error:
            self.notes[stem] = str(error)
            return _EMPTY
        self.notes.pop(stem, None)
        return table

    def _read_table(self, stem: str) -> pa.Table:
        return _encode(read_rollouts(self._run, f"{stem}.parquet"), stem)


def _encode(table: pa.Table, stem: str) -> pa.Table:
    columns = [
        pc.dictionary_encode(table[name]) if name in _FEW else table[name] for name in ROLLOUT_SCHEMA.names
    ]
    return pa.table(
        [*columns, pc.dictionary_encode(pa.array([stem] * len(table), pa.string()))],
        names=[*ROLLOUT_SCHEMA.names, "where"],
    )


_EMPTY: Final = _encode(ROLLOUT_SCHEMA.empty_table(), "")


# Rollouts by filter, sorted, a page at a time, with the histogram of returns that the filter leaves.


PAGE: Final = 100
NUM_BINS: Final = 20
COLUMNS: Final = (
    "where", "step", "task_key", "trace_id", "rollout", "node_id", "outcome", "fault", "episode_return",
    "success", "advantage", "mode", "kind", "num_turns", "num_tokens", "num_calls", "mean_entropy",
    "num_splices", "num_tips", "forked_from",
)  # fmt: skip
_CHOICES: Final = ("where", "task_key", "kind", "mode", "outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """``choices`` are exact values by column. ``low`` and ``high`` bound the return, both inclusive;
    ``training`` leaves evaluations out.
    """

    choices: Mapping[str, str]
    low: float | None = None
    high: float | None = None
    training: bool = False
    sort: str = "step"
    descending: bool = False
    offset: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> "Query":
        """Of an address. Raises ValueError for what is no number or no column."""
        sort = params.get("sort", "step")
        if sort not in COLUMNS:
            raise ValueError(f"no column {sort!r}")
        low, high = (_number(params.get(name)) for name in ("low", "high"))
        return cls(
            choices={name: params[name] for name in _CHOICES if params.get(name)},
            low=low,
            high=high,
            training=params.get("training") == "1",
            sort=sort,
            descending=params.get("descending") == "1",
            offset=max(0, int(params.get("offset", "0"))),
        )


def find(table: pa.Table, query: Query) -> dict[str, Any]:
    """``total`` rollouts, one page of them as ``rows``, a histogram (of all choices but the return's bounds),
    and how often each kind, mode and outcome occurs.
    """
    chosen = table.filter(_mask(table, query)) if query.choices or query.training else table
    bounded = _filter_returns(chosen, query)
    order = "descending" if query.descending else "ascending"
    sort_column = bounded[query.sort]
    sort_column = (
        pc.cast(sort_column, pa.string()) if pa.types.is_dictionary(sort_column.type) else sort_column
    )
    keys = pa.table(
        {"by": sort_column, "place": pa.array(np.arange(len(bounded)))}
    )  # equal ones in the order of files
    indices = pc.sort_indices(keys, sort_keys=[("by", order), ("place", "ascending")])
    page = bounded.take(indices[query.offset : query.offset + PAGE])
    return {
        "total": len(bounded),
        "offset": query.offset,
        "rows": rows_of_table(page),
        "histogram": histogram(chosen),
        "counts": {name: _counts(bounded, name) for name in ("kind", "mode", "outcome")},
    }


def rows_of_table(table: pa.Table) -> list[dict[str, Any]]:
    """Plain data; numbers that JSON has not become null."""
    return [{name: _plain(value) for name, value in row.items()} for row in table.select(COLUMNS).to_pylist()]


def histogram(table: pa.Table) -> dict[str, Any]:
    """``edges`` (one more than ``numbers``) over the finite returns, and how many rollouts have none."""
    values = table["episode_return"].to_numpy(zero_copy_only=False).astype(float)
    finite = values[np.isfinite(values)]
    missing = int(len(values) - len(finite))
    if not len(finite):
        return {"edges": [], "numbers": [], "missing": missing}
    different = np.unique(finite)
    if len(different) == 1:
        edges = np.array([different[0] - 0.5, different[0] + 0.5])
    else:
        edges = np.linspace(different[0], different[-1], NUM_BINS + 1)
    numbers, edges = np.histogram(finite, bins=edges)
    return {"edges": edges.tolist(), "numbers": numbers.tolist(), "missing": missing}


def _mask(table: pa.Table, query: Query) -> pa.Array:
    masks = [pc.equal(table[name], value) for name, value in query.choices.items()]
    if query.training:
        masks.append(pc.starts_with(pc.cast(table["where"], pa.string()), "step-"))
    whole = masks[0]
    for mask in masks[1:]:
        whole = pc.and_(whole, mask)
    return whole


def _filter_returns(table: pa.Table, query: Query) -> pa.Table:
    for bound, compare in ((query.low, pc.greater_equal), (query.high, pc.less_equal)):
        if bound is not None:
            table = table.filter(pc.fill_null(compare(table["episode_return"], bound), False))
    return table


def _counts(table: pa.Table, name: str) -> dict[str, int]:
    counts = pc.value_counts(table[name].combine_chunks() if len(table) else table[name])
    return {str(entry["values"]): entry["counts"] for entry in counts.to_pylist()}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(text: str | None) -> float | None:
    return float(text) if text else None


# Search in the text of all turns, file by file, newest step first, without loading a run into memory.
#
# A file's texts are one piece of bytes for the search; ASCII letters are found in either case. What was read
# is kept compressed within a bound, since people change one letter and search again. What takes the time
# (reading, lower case, compression) is Arrow's and lets other threads run.


MOST_HITS: Final = 200
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
