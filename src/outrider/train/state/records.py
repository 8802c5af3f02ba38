"""A run's records beside its checkpoints, counted and with checksums in each of them: what vanishes later is
noticed.

It lies beside ``state.json`` and not in it, because metrics hold times: two runs of the same bits differ in
them.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.errors import CheckpointError
from outrider.json_lines import whole_lines
from outrider.train.state.checkpoint_state import (
    file_checksum,
    has_checksum,
    read_checksummed,
    write_checksummed,
)

RECORDS: Final = "records.json"
_EVALUATION: Final = re.compile(r"evaluation-(\d+)\.parquet")
_METRICS, _EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
_MAX_NAMES: Final = 3
_FOLDERS: Final = ("traces", "rollouts", "memory")


class Records:
    """Metrics, evaluations and traces of one run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._known: dict[str, tuple[int, int, int]] = {}  # these files never change: size, time, checksum

    def checksums(self) -> dict[str, Any]:
        """Counts and checksums of what is there now, as a checkpoint holds them. Raises OSError."""
        lines = {name: self._lines(name) for name in (_METRICS, _EVALUATIONS)}
        counted = {
            name: {"num_lines": len(content), "checksum": _lines_checksum(content)}
            for name, content in lines.items()
        }
        num = len(lines[_EVALUATIONS])
        return counted | {folder: self._files(folder, num) for folder in _FOLDERS}

    def _files(self, folder: str, num_evaluations: int) -> dict[str, int]:
        names = sorted(path.name for path in (self._run / folder).glob("*.parquet"))
        return {name: self._checksum(folder, name) for name in names if _belongs(name, num_evaluations)}

    def write_checksums(self, checkpoint: Path) -> None:
        """Write it anew into a checkpoint: what came after it (the last evaluation) belongs to it too."""
        write_checksummed(checkpoint / RECORDS, self.checksums())

    def problems(self, checkpoint: Path) -> list[str]:
        """Names what is gone or is not what was written, one phrase each; empty where the checkpoint does not
        know.
        """
        try:
            known = read_checksummed(checkpoint / RECORDS)
            if not has_checksum(checkpoint / RECORDS):
                raise ValueError("its checksum is gone")
            problems = [
                text for name in (_METRICS, _EVALUATIONS) for text in self._file_problems(name, known[name])
            ]
            # the last two are not of an earlier Outrider
            files = [(folder, known.get(folder, {})) for folder in _FOLDERS]
            return problems + [
                text for folder, names in files for text in self._folder_problems(folder, names)
            ]
        except FileNotFoundError:
            return []  # of an earlier Outrider
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [
                (
                    f"{RECORDS} of {checkpoint.name} cannot be read ({error}), "
                    "so nobody knows whether records are gone"
                )
            ]

    def require_lines(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where lines are gone that the checkpoint of this state counts: none can be
        made again.
        """
        for name, key in ((_METRICS, "num_metric_records"), (_EVALUATIONS, "num_evaluations")):
            num_lines, num = len(self._lines(name)), int(state[key])
            if num_lines < num:
                raise CheckpointError(
                    f"{name} has {num_lines} lines, its checkpoint was saved at {num}: put the file back, "
                    "or begin a new run with model.initial_checkpoint"
                )

    def _lines(self, name: str) -> list[bytes]:
        return whole_lines(self._run / name)

    def _file_problems(self, name: str, known: Mapping[str, int]) -> list[str]:
        lines, num = self._lines(name), known["num_lines"]
        if len(lines) < num:
            return [f"{name} has {len(lines)} of {num} lines"]
        return (
            []
            if _lines_checksum(lines[:num]) == known["checksum"]
            else [f"the first {num} lines of {name} are not what was written"]
        )

    def _folder_problems(self, folder: str, known: Mapping[str, int]) -> list[str]:
        missing = [name for name in known if not (self._run / folder / name).is_file()]
        changed = [
            name for name in known if name not in missing and self._checksum(folder, name) != known[name]
        ]
        problems = (("missing", missing), ("not what was written", changed))
        return [f"{_join_names(names)} of the {folder}: {problem}" for problem, names in problems if names]

    def _checksum(self, folder: str, name: str) -> int:
        path = self._run / folder / name
        facts, key = path.stat(), f"{folder}/{name}"
        size, time, checksum = self._known.get(key, (-1, -1, 0))
        if (size, time) != (facts.st_size, facts.st_mtime_ns):
            checksum = file_checksum(path)
            self._known[key] = facts.st_size, facts.st_mtime_ns, checksum
        return checksum


def _belongs(name: str, num_evaluations: int) -> bool:
    """A run that went back may have files of evaluations that it will make again."""
    match = _EVALUATION.fullmatch(name)
    return match is None or int(match[1]) < num_evaluations


def _lines_checksum(lines: Sequence[bytes]) -> int:
    return zlib.crc32(b"\n".join(lines))


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (
        f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    )
