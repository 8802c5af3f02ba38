"""The results of a panel on disk: append-only, so that a stopped evaluation continues where it was.

A JSONL file. The first line says what was evaluated, each further one is a
:class:`~outrider.evals.benchmark.scores.SampleResult`. A line counts once it is whole and on disk; a finished
sample is never played again, a fault is, and its later result takes its place. An answer that only its judge
failed is not played again either: it is judged again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, Final

from outrider.atomic_io import append_bytes
from outrider.errors import ConfigError, DataError
from outrider.evals.benchmark.scores import SampleResult
from outrider.file_lock import FileLock
from outrider.json_lines import parsed, read_lines
from outrider.types import Json, Outcome, Task

RESULTS: Final = "results.jsonl"  # of an evaluation's folder, and what it comes to:
SUMMARY: Final = "summary.json"
SETTINGS: Final = "evaluation.toml"  # as of the last command
FORMAT: Final = "outrider panel 1"
_HEADER_PREFIX: Final = f'{{"format": "{FORMAT}"'.encode()  # of the first line, keys being sorted


class EvalTasksStore:
    """One panel's results. Open it with :meth:`open`; adding is safe from several threads, the file belongs
    to one process.
    """

    def __init__(self, path: Path, file: FileLock, results: dict[tuple[str, int], SampleResult]) -> None:
        self.path = path
        self._file = file
        self._results = results
        self._lock = Lock()

    @classmethod
    def open(cls, path: Path, *, identity: Mapping[str, Json]) -> "EvalTasksStore":
        """Continue the file or start it. ``identity`` is all that results depend on: panel hash, model,
        sampling, rules.

        A line torn by a kill is cut off. Raises ConfigError when the file is of another identity or in use,
        DataError naming the line when it is damaged.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = FileLock(path, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except BlockingIOError as error:
            raise ConfigError(f"{path} is in use by another process") from error
        try:
            lines, torn = read_lines(path)
            if not lines and not (torn.startswith(_HEADER_PREFIX) or _HEADER_PREFIX.startswith(torn)):
                raise DataError(f"{path}:1: no results of a panel ({FORMAT})")
            results = _read(path, lines, identity) if lines else {}
            os.ftruncate(file.descriptor, sum(len(line) + 1 for line in lines))
            store = cls(path, file, results)
            if not lines:
                store._append({"format": FORMAT, "identity": dict(identity)})
        except BaseException:
            file.release()
            raise
        return store

    @property
    def results(self) -> list[SampleResult]:
        """The latest result of every sample, by task key and sample number; faults too."""
        with self._lock:
            return [self._results[key] for key in sorted(self._results)]

    @property
    def unjudged(self) -> list[SampleResult]:
        """Answers whose judge failed, by task key and sample number."""
        return [result for result in self.results if result.answered is not None]

    def pending(self, tasks: Sequence[Task], *, num_samples: int) -> list[tuple[Task, int]]:
        """Samples that are missing or ended in a fault other than the judge's, in the panel's order."""
        with self._lock:
            return [
                (task, sample)
                for task in tasks
                for sample in range(num_samples)
                if self._is_pending(task.key, sample)
            ]

    def has(self, task_key: str, sample: int) -> bool:
        """Whether there is any result of the sample, a fault included."""
        with self._lock:
            return (task_key, sample) in self._results

    def add(self, result: SampleResult) -> None:
        """Append one result and force it to disk; a failed write leaves the file as it was.

        Raises ValueError for a sample that is finished.
        """
        with self._lock:
            if self._is_finished(result.task_key, result.sample):
                raise ValueError(f"{result.task_key}, sample {result.sample} is finished")
            self._append(asdict(result))
            self._results[result.task_key, result.sample] = result

    def close(self) -> None:
        """Give the file back; may be called twice."""
        with self._lock:
            self._file.release()

    def _is_pending(self, key: str, sample: int) -> bool:
        result = self._results.get((key, sample))
        return result is None or (result.outcome.is_fault and result.answered is None)

    def _is_finished(self, key: str, sample: int) -> bool:
        result = self._results.get((key, sample))
        return result is not None and not result.outcome.is_fault

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        append_bytes(self._file.descriptor, line)


def read_results(path: Path) -> tuple[dict[str, Json], list[SampleResult]]:
    """Identity of a closed file, and its results by task key and sample number. Raises DataError naming the
    line.
    """
    lines = read_lines(path)[0] or [b""]
    recorded = _parse_line(path, 1, lines[0]).get("identity")
    identity = recorded if isinstance(recorded, dict) else {}
    results = _read(path, lines, identity)
    return identity, [results[key] for key in sorted(results)]


def write_results(path: Path, identity: Mapping[str, Json], results: Sequence[SampleResult]) -> None:
    """The same as a new file that :meth:`EvalTasksStore.open` continues."""
    store = EvalTasksStore.open(path, identity=identity)
    try:
        for result in results:
            store.add(result)
    finally:
        store.close()


def _read(
    path: Path, lines: Sequence[bytes], identity: Mapping[str, Json]
) -> dict[tuple[str, int], SampleResult]:
    _check_identity(path, _parse_line(path, 1, lines[0]), identity)
    results: dict[tuple[str, int], SampleResult] = {}
    for number, line in enumerate(lines[1:], start=2):
        record = _parse_line(path, number, line)
        try:
            result = SampleResult(**{**record, **_outcomes(record), **_reply(record)})
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: no result of a sample: {error}") from error
        previous = results.get((result.task_key, result.sample))
        if previous is None or previous.outcome.is_fault:
            results[result.task_key, result.sample] = result
    return results


def _outcomes(record: Mapping[str, Any]) -> dict[str, Outcome | None]:
    answered = record.get("answered")
    return {
        "outcome": Outcome(str(record.get("outcome"))),
        "answered": None if answered is None else Outcome(str(answered)),
    }


def _reply(record: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | None]:
    """Raises TypeError for what is no text per turn, and no list of ids per turn."""
    turns, ids = record.get("turns"), record.get("token_ids")
    texts = turns is None or (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns))
    if not texts or not (ids is None or (isinstance(ids, list) and all(_are_ids(turn) for turn in ids))):
        raise TypeError("the reply is malformed")
    return {
        "turns": None if turns is None else tuple(turns),
        "token_ids": None if ids is None else tuple(map(tuple, ids)),
    }


def _are_ids(turn: Any) -> bool:
    return isinstance(turn, list) and all(type(token) is int for token in turn)


def _check_identity(path: Path, header: Mapping[str, Any], identity: Mapping[str, Json]) -> None:
    recorded = header.get("identity")
    if header.get("format") != FORMAT or not isinstance(recorded, dict):
        raise DataError(f"{path}:1: no results of a panel ({FORMAT})")
    expected = json.loads(json.dumps(dict(identity)))
    different = sorted(key for key in {*recorded, *expected} if recorded.get(key) != expected.get(key))
    if different:
        changes = "; ".join(
            f"{key} was {recorded.get(key)!r} and is {expected.get(key)!r}" for key in different
        )
        raise ConfigError(f"{path} holds the results of another evaluation: {changes}; give a new --run")


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return parsed(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: malformed JSON: {error}") from error
