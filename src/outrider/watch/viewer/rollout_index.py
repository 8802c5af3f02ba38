"""All rollouts of a run as one table in memory, a few hundred bytes each; no text and no token is in it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from outrider.errors import DataError
from outrider.watch.rollout_rows import ROLLOUT_SCHEMA, ROLLOUTS, read_rollouts
from outrider.watch.step_files import evaluation_file, step_file
from outrider.watch.traces import TraceReader

_READERS: Final = 2
_FEW: Final = ("task_key", "outcome", "fault", "mode", "kind", "trace_id")  # of few different texts


class RolloutIndex:
    """Reads what is new whenever it is asked. :meth:`table` has the columns of the rollouts' files, and
    ``where``: the name of the file without its ending.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = Lock()
        self._seen: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, pa.Table] = {}
        self._table: pa.Table | None = None
        self.notes: list[str] = []

    def places(self) -> list[str]:
        """Steps in order, then evaluations."""
        files = TraceReader(self._run / "traces").files
        return [
            *(step_file(step).removesuffix(".parquet") for step in files.steps()),
            *(evaluation_file(number).removesuffix(".parquet") for number in files.evaluations()),
        ]

    def table(self, where: str = "") -> pa.Table:
        """Of all that is on file now, or of one file alone; one that cannot be read is a note."""
        if where:
            return self._read(where) if where in self.places() else _EMPTY
        with self._lock:
            places = self.places()
            found = {place: self._facts(place) for place in places}
            news = [place for place in places if self._seen.get(place) != found[place]]
            if news or self._table is None or found.keys() != self._seen.keys():
                with ThreadPoolExecutor(_READERS) as readers:
                    for place, part in zip(news, readers.map(self._read, news), strict=True):
                        self._parts[place] = part
                self._parts = {place: self._parts[place] for place in places}
                self._seen = found
                self._table = pa.concat_tables([_EMPTY, *self._parts.values()]).unify_dictionaries()
                self._table = self._table.combine_chunks()
            return self._table

    def _facts(self, place: str) -> tuple[int, int]:
        for folder in (ROLLOUTS, "traces"):
            path = self._run / folder / f"{place}.parquet"
            if path.is_file():
                facts = path.stat()
                return facts.st_size, facts.st_mtime_ns
        return -1, -1

    def _read(self, place: str) -> pa.Table:
        try:
            found = read_rollouts(self._run, f"{place}.parquet")
        except DataError as error:
            self.notes.append(str(error))
            return _EMPTY
        return _encoded(found, place)


def _encoded(found: pa.Table, place: str) -> pa.Table:
    columns = [
        pc.dictionary_encode(found[name]) if name in _FEW else found[name] for name in ROLLOUT_SCHEMA.names
    ]
    return pa.table(
        [*columns, pc.dictionary_encode(pa.array([place] * len(found), pa.string()))],
        names=[*ROLLOUT_SCHEMA.names, "where"],
    )


_EMPTY: Final = _encoded(ROLLOUT_SCHEMA.empty_table(), "")
