"""Rollouts of a run by filter, and search in the text of their turns.

All rollouts are one table in memory of a few hundred bytes each, without texts and tokens.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outrider.errors import DataError
from outrider.files import json_value
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    StepFiles,
    evaluation_file,
    read_rollouts,
    step_file,
)

_READERS: Final = 2
_FEW: Final = (  # of few different texts
    "task_key", "outcome", "fault", "mode", "kind", "trace_id", "targets", "reward_parts", "reason",
)  # fmt: skip


class RolloutIndex:
    """Index of the rollouts of a run, which reads new files at every call. :meth:`table` has the columns of
    the rollout files, and ``where``, the name of the file without its extension.
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
        files = StepFiles(self._run / "traces")
        return [
            *(step_file(step).removesuffix(".parquet") for step in files.steps()),
            *(evaluation_file(number).removesuffix(".parquet") for number in files.evaluations()),
        ]

    def table(self, only: str = "") -> pa.Table:
        """The rollouts of all files; unreadable files are skipped and listed in ``notes``. With ``only``, the
        rollouts of that file; raises DataError if it cannot be read.
        """
        if only:
            is_known = only in self.stems()
            return _encode(read_rollouts(self._run, f"{only}.parquet"), only) if is_known else _EMPTY
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
            table = _encode(read_rollouts(self._run, f"{stem}.parquet"), stem)
        except DataError as error:
            self.notes[stem] = str(error)
            return _EMPTY
        self.notes.pop(stem, None)
        return table


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
    "num_splices", "num_tips", "forked_from", "targets", "answer", "reward_parts", "reason",
    "num_failed_calls",
)  # fmt: skip
_CHOICES: Final = ("where", "task_key", "kind", "mode", "outcome")
_FAILED: Final = {"any": pc.greater, "none": pc.equal}


def find(table: pa.Table, params: Mapping[str, str]) -> dict[str, Any]:
    """Rollouts by the parameters of an address.

    Args:
        table: The rollouts of a run.
        params: Exact values by the name of a column (``where``, ``task_key``, ``kind``, ``mode``,
            ``outcome``); ``low`` and ``high`` bound the return, both inclusive; ``training`` = 1 leaves
            evaluations out; ``failed`` = ``any`` or ``none`` selects rollouts with or without a failed tool
            call (older records, where this is unknown, match neither); ``sort`` names a column,
            ``descending`` = 1 reverses it; ``offset`` is the first row of the page.

    Returns:
        ``total`` rollouts, one page of them as ``rows``, a histogram of returns (without their bounds), and
        the ``counts`` of each kind, mode and outcome. Raises ValueError for a value that is no number and for
        an unknown column.
    """
    sort, offset = params.get("sort", "step"), max(0, int(params.get("offset", "0")))
    if sort not in COLUMNS:
        raise ValueError(f"no column {sort!r}")
    for name in _CHOICES:
        if value := params.get(name):
            table = table.filter(pc.equal(table[name], value))
    if params.get("training") == "1":
        table = table.filter(pc.starts_with(pc.cast(table["where"], pa.string()), "step-"))
    if failed := params.get("failed"):
        if failed not in _FAILED:
            raise ValueError(f"failed is any or none, not {failed!r}")
        table = table.filter(pc.fill_null(_FAILED[failed](table["num_failed_calls"], 0), False))
    bounded = table
    for name, compare in (("low", pc.greater_equal), ("high", pc.less_equal)):
        if value := params.get(name):
            bounded = bounded.filter(pc.fill_null(compare(bounded["episode_return"], float(value)), False))
    column = bounded[sort]
    column = pc.cast(column, pa.string()) if pa.types.is_dictionary(column.type) else column
    order = "descending" if params.get("descending") == "1" else "ascending"
    keys = pa.table({"by": column, "place": pa.array(np.arange(len(bounded)))})  # ties in the order of files
    indices = pc.sort_indices(keys, sort_keys=[("by", order), ("place", "ascending")])
    return {
        "total": len(bounded),
        "offset": offset,
        "rows": rows_of_table(bounded.take(indices[offset : offset + PAGE])),
        "histogram": histogram(table),
        "counts": {
            name: {
                str(entry["values"]): entry["counts"]
                for entry in pc.value_counts(bounded[name].combine_chunks()).to_pylist()
            }
            for name in ("kind", "mode", "outcome")
        },
    }


def rows_of_table(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as plain data, with ``targets`` as a list and ``reward_parts`` as an object; NaN and infinity
    become None.
    """
    rows = table.select(COLUMNS).to_pylist()
    for row in rows:
        for name in ("targets", "reward_parts"):
            row[name] = _parsed(row[name])
    return [json_value(row) for row in rows]


def _parsed(text: str | None) -> Any:
    """A JSON text as plain data; None if it is damaged."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


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


# Search in the text of all turns, file by file, newest step first, ignoring the case of ASCII letters. Texts
# are cached up to a size limit, because users often change one letter and search again. Arrow does the slow
# work (reading, lower-casing, matching) without the GIL.


MOST_HITS: Final = 200
_BATCH: Final = 32  # files; the search may end between two batches
_COLUMNS: Final = ("task_key", "trace_id", "node_id", "rollout", "origin", "text")
_MAX_CACHE_BYTES: Final = 160 * 2**20
# The file is gone or damaged since it was listed; the page of the step reports it.
_UNREADABLE: Final = (OSError, pa.ArrowException, KeyError)
_CONTEXT_CHARS: Final = 60  # on each side of a hit


class TextSearch:
    """The texts of one run."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "traces"
        self._lock = Lock()
        self._cache: dict[str, tuple[tuple[int, int], pa.ChunkedArray]] = {}  # with size and time of the file
        self._num_bytes = 0
        self._readers = ThreadPoolExecutor(_READERS)
        self._is_cancelled = False

    def find(self, words: str, stems: Sequence[str]) -> dict[str, Any]:
        """Up to :data:`MOST_HITS` nodes that contain ``words``, of the newest of ``stems`` first, and whether
        there may be more.
        """
        query = words.encode("utf-8", "replace").lower().decode("utf-8")
        hits: list[dict[str, Any]] = []
        newest_first = list(reversed(stems)) if query else []
        for start in range(0, len(newest_first), _BATCH):
            batch = newest_first[start : start + _BATCH]
            for file_hits in self._readers.map(lambda stem: self._hits(stem, query, words), batch):
                hits += file_hits
            if len(hits) >= MOST_HITS:
                return {"hits": hits[:MOST_HITS], "more": True}
        return {"hits": hits, "more": False}

    def warm(self, stems: Sequence[str]) -> None:
        """Fill the cache before the first search, newest files first."""
        for stem in reversed(stems):
            if self._is_cancelled or self._num_bytes > _MAX_CACHE_BYTES * 0.9:
                return
            with suppress(*_UNREADABLE):
                self._texts(stem)

    def leave(self) -> None:
        """Stop :meth:`warm`, because the user opened another run."""
        self._is_cancelled = True

    def _hits(self, stem: str, query: str, words: str) -> list[dict[str, Any]]:
        try:
            matches = pc.indices_nonzero(pc.match_substring(self._texts(stem), query))[:MOST_HITS]
            if not len(matches):
                return []
            rows = _read(self._folder / f"{stem}.parquet", _COLUMNS).take(matches).to_pylist()
        except _UNREADABLE:
            return []
        return [row | {"where": stem, "text": _excerpt(row["text"], words)} for row in rows]

    def _texts(self, stem: str) -> pa.ChunkedArray:
        """The texts of a file in lower case. A full cache accepts no further file: every search reads all
        files in the same order, so evicting the oldest would evict each file before its next use.
        """
        path = self._folder / f"{stem}.parquet"
        facts = path.stat().st_size, path.stat().st_mtime_ns
        cached = self._cache.get(stem)
        if cached is not None and cached[0] == facts:
            return cached[1]
        texts = pc.ascii_lower(_read(path, ["text"])["text"])
        with self._lock:
            replaced = self._cache.pop(stem, None)
            self._num_bytes -= 0 if replaced is None else replaced[1].nbytes
            if self._num_bytes + texts.nbytes <= _MAX_CACHE_BYTES:
                self._cache[stem] = facts, texts
                self._num_bytes += texts.nbytes
        return texts


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pq.ParquetFile(file).read(columns=list(columns), use_threads=False)


def _excerpt(text: str, words: str) -> str:
    position = max(0, text.lower().find(words.lower()))
    start, end = max(0, position - _CONTEXT_CHARS), position + len(words) + _CONTEXT_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
