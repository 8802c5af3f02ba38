"""The record of the GPUs that were measured, and the page that shows it."""

import datetime
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.figure_records import render_all
from benchmarks.figures import rewritten
from benchmarks.gpu_rows import Row
from outrider.files import replace_file

COLUMNS: Final = ["device", "date", "what", "measured", "beside"]
_PACKAGES: Final = ("outrider", "torch", "transformers", "peft", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What was measured, when, and with which versions."""

    name: str
    date: str
    versions: str


def described_device(device: str) -> Device:
    """The device's own name and driver, and the packages that are installed."""
    import torch

    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
        more = f", CUDA {torch.version.cuda}"
    else:
        from outrider.doctor import processor

        name, more = processor(), ""
    found = [f"{package} {version}" for package in _PACKAGES if (version := _version(package))]
    return Device(name=name, date=datetime.date.today().isoformat(), versions=", ".join(found) + more)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_record(path: Path, device: Device, rows: Sequence[Row]) -> None:
    """Add the rows, replacing those of the same device and day."""
    record: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.exists()
        else {"kind": "cells", "source": "", "command": "make gpu", "columns": COLUMNS, "rows": []}
    )
    key = [device.name, device.date]
    kept = [row for row in record["rows"] if row[:2] != key]
    new = [
        [*key, "versions", device.versions, ""],
        *([*key, row.what, row.measured, row.beside] for row in rows),
    ]
    record["rows"] = kept + new
    record["source"] = f"written by the command; newest rows of {device.date}"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def write_page(page: Path, record: Path) -> None:
    """Write the figures of the record between the marks of the page. Raises DataError without marks."""
    text = page.read_text(encoding="utf-8")
    new = rewritten(text, render_all(record.parent), document=str(page))
    replace_file(page, new.encode())
