"""The doctor of several processes: its rows on this machine and on a Ray, and what it reports as missing."""

from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.commands import cluster_doctor
from outrider.errors import ClusterFault
from outrider.files import file_checksum

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def rows(text: str) -> dict[str, tuple[str, str]]:
    """State and finding by part."""
    cells = [line.split("│") for line in text.splitlines()]
    return {
        row[1].strip(): (row[2].strip(), row[3].strip()) for row in cells if len(row) > 4 and row[1].strip()
    }


@pytest.mark.slow
def test_one_machine_needs_no_ray(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["doctor", "--cluster", "--folder", str(tmp_path / "runs")]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) == 3 and {state for state, _ in found.values()} == {"ok"}
    assert "GB free" in found["shared memory"][1] and "off by" in found["gradient of 2 ranks"][1]
    assert "nats off at most" in found["weights and log-probs of 2 engines"][1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_unreachable_ray_is_reported(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And so is everything that needs it; nothing is left in the folder."""
    pytest.importorskip("ray")
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(cluster_doctor, "_WAIT_S", 0.1)
    command = ["doctor", "--cluster", "--ray-address", "127.0.0.1:9", "--folder", str(tmp_path)]
    assert main(command) == 1
    found = rows(capsys.readouterr().out)
    assert found["ray"][0] == "MISSING" and "127.0.0.1:9" in found["ray"][1]
    assert found["nodes"][0] == found["weights and log-probs of 2 engines"][0] == "MISSING"
    assert list(tmp_path.iterdir()) == []


def test_missing_parts_of_a_node_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_doctor, "_PACKAGES", ("torch", "outrider"))
    checks = cluster_doctor._ClusterChecks("auto", tmp_path)
    own = cluster_doctor._versions(("torch", "outrider"))
    whole = {"host": "a", "versions": own, "seconds": 0.1}
    checks._nodes = [whole]
    assert "outrider" in checks.nodes() and "MB/s" in checks.shared_folder()
    for changed, check in (
        ({"versions": {**own, "torch": "0.1"}}, checks.nodes),
        ({"seconds": None}, checks.shared_folder),
    ):
        checks._nodes = [whole, {**whole, "host": "b", **changed}]
        with pytest.raises(ClusterFault, match=r"\bb\b"):
            check()


def test_a_file_is_the_same_on_a_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"sent")
    checksum = file_checksum(tmp_path / "file")
    assert cluster_doctor._inspect_node(str(tmp_path / "file"), checksum, ())["seconds"] is not None
    assert cluster_doctor._inspect_node(str(tmp_path / "file"), checksum + 1, ())["seconds"] is None
    assert cluster_doctor._inspect_node(str(tmp_path / "none"), checksum, ())["seconds"] is None
