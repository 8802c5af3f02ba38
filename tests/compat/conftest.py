"""Every test here works in a copy of what an earlier version left; its recipes name all by relative paths."""

import shutil
from pathlib import Path

import pytest

from tests.compat.commands import LEFT


@pytest.fixture(autouse=True)
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(LEFT, tmp_path / "old")
    shutil.copy(folder / "rapo" / "buffer.sqlite", folder / "buffer.sqlite")
    monkeypatch.chdir(folder)
    return folder
