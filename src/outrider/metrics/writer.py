"""Writer of ``metrics.jsonl``: one JSON object per line, synced line by line, truncated exactly on resume."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Final, Literal, SupportsFloat, TypeAlias

from outrider.errors import CheckpointError, DataError
from outrider.files import append_bytes, parsed, read_lines, replace_lines, whole_lines
from outrider.metrics.registry import declared_metric

Kind: TypeAlias = Literal["sft", "train", "eval"]

_STAGES: Final = ("sft", "train")  # evaluations may occur before, between and within these
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON object per line and syncs it to disk before it returns.

    A record is ``{"step", "kind", name: value, ...}`` with declared names only. A NaN or infinite value is
    written as null and counted under ``record/num_non_finite``; None means "not defined at this step".
    Within ``train`` and ``sft`` the step must increase. If the last line of an existing file was cut off by a
    kill, opening the file drops that line and warns. Any other damaged line is a
    :class:`~outrider.errors.DataError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._records = self._recover()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)

    def write(self, step: int, kind: Kind, values: Mapping[str, SupportsFloat | None]) -> None:
        """Append one record.

        Raises ``UndeclaredMetric``, ``TypeError`` (not a number) or ``ValueError`` (invalid step).
        """
        last = max((line_step for line_step, line_kind in self._records if line_kind == kind), default=-1)
        if step < 0 or (kind in _STAGES and step <= last):
            raise ValueError(f"{kind} step {step} does not follow {kind} step {last}")
        record: dict[str, str | int | float | None] = {"step": step, "kind": kind}
        num_non_finite = 0
        for name, value in values.items():
            declared_metric(name)
            number = _number(name, value)
            if number is not None and not math.isfinite(number):
                number, num_non_finite = None, num_non_finite + 1
            record[name] = number
        record["record/num_non_finite"] = num_non_finite
        append_bytes(self._fd, (json.dumps(record, allow_nan=False) + "\n").encode())
        self._records.append((step, kind))

    @property
    def num_records(self) -> int:
        """Number of complete lines. A checkpoint stores it, and resuming passes it to :meth:`cut`."""
        return len(self._records)

    @property
    def kinds(self) -> list[tuple[int, str]]:
        """Return step and kind of every complete line."""
        return list(self._records)

    def cut(self, num_records: int) -> int:
        """Truncate the file to the first ``num_records`` lines, atomically; return the number of cut lines.

        Raises :class:`~outrider.errors.CheckpointError` if the file has fewer lines: it does not belong to
        the checkpoint then.
        """
        num_cut = len(self._records) - num_records
        if num_cut < 0:
            raise CheckpointError(
                f"{self.path.name} has {len(self._records)} lines, its checkpoint was saved at {num_records}"
            )
        if num_cut:
            replace_lines(self.path, whole_lines(self.path)[:num_records])
            self.close()  # the old file; not earlier, because on a full disk it must stay in use
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            del self._records[num_records:]
        return num_cut

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _recover(self) -> list[tuple[int, str]]:
        """Return (step, kind) of every complete line, after removing an incomplete last line."""
        if not self.path.exists():
            return []
        lines, torn = read_lines(self.path)
        if torn:
            _log.warning("%s: dropped a torn last line of %d bytes", self.path.name, len(torn))
            replace_lines(self.path, lines)
        return _parse(self.path, lines)


def _number(name: str, value: SupportsFloat | None) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"metric {name!r} must be a number, not {type(value).__name__}")
    return int(value) if isinstance(value, Integral) else float(value)


def _parse(path: Path, lines: Sequence[bytes]) -> list[tuple[int, str]]:
    records: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parsed(line)
            step, kind = record["step"], record["kind"]
            if not isinstance(step, int) or kind not in ("sft", "train", "eval"):
                raise ValueError("step or kind is malformed")
        except (ValueError, KeyError) as error:
            raise DataError(f"{path.name} line {number} is damaged: {error}") from error
        records.append((step, kind))
    return records
