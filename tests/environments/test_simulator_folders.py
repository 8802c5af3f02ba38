"""The temporary folders of killed runs are removed at the next start."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outrider.environments.scienceworld.simulator import SimulatorFolder, remove_abandoned

OWNER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from pathlib import Path
from outrider.environments.scienceworld.simulator import SimulatorFolder
folder = SimulatorFolder()
Path(folder.name, "object_type_ids.tsv").write_text("written by the simulator")
print(folder.name, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_removes_the_folder_of_a_killed_run(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(temporary)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        mine = SimulatorFolder()
        assert left.is_dir() and Path(mine.name).is_dir()  # its owner lives
        owner.send_signal(signal.SIGKILL)
    assert left.is_dir()
    another = SimulatorFolder()
    assert not left.exists() and Path(mine.name).is_dir()
    for folder in (mine, another, mine):
        folder.cleanup()
    assert list(temporary.iterdir()) == []


def test_other_folders_are_not_removed(temporary: Path) -> None:
    (temporary / "scienceworld-being-made").mkdir()
    (temporary / "scienceworld-link").symlink_to(temporary)
    (temporary / "scienceworld-notes").write_text("a file")
    assert remove_abandoned(temporary) == 0
    assert len(list(temporary.iterdir())) == 3
