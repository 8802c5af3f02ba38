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
