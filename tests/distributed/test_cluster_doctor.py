"""The doctor of several processes: what it finds here, and what it says where something is wrong."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
pytest.importorskip("ray", reason="several processes need the extra 'cluster'")

from outrider.cli import main  # noqa: E402
from outrider.commands import cluster_doctor  # noqa: E402
from outrider.errors import ClusterFault  # noqa: E402


def rows(text: str) -> dict[str, tuple[str, str]]:
    """State and finding by part."""
    cells = [line.split("│") for line in text.splitlines()]
    return {
        one[1].strip(): (one[2].strip(), one[3].strip()) for one in cells if len(one) > 4 and one[1].strip()
    }


@pytest.mark.slow
def test_a_full_examination(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["doctor", "--cluster", "--folder", str(tmp_path / "runs")]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) == 7 and {state for state, _ in found.values()} == {"ok"}
    assert "off by" in found["gradient of 2 ranks"][1]
    assert "nats off at most" in found["weights and log-probs of 2 engines"][1]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_an_unreachable_ray_is_reported(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And so is everything that needs it; nothing is left in the folder."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(cluster_doctor, "_WAIT_S", 0.2)
    command = ["doctor", "--cluster", "--ray-address", "127.0.0.1:9", "--folder", str(tmp_path)]
    assert main(command) == 1
    found = rows(capsys.readouterr().out)
    assert found["ray"][0] == "MISSING" and "127.0.0.1:9" in found["ray"][1]
    assert found["nodes"][0] == found["weights and log-probs of 2 engines"][0] == "MISSING"
    assert list(tmp_path.iterdir()) == []


def test_missing_parts_of_a_node_are_named(tmp_path: Path) -> None:
    tried = cluster_doctor._ClusterChecks("local", tmp_path)
    whole = {"host": "a", "versions": cluster_doctor._versions(), "sees": True, "shm": 10**10, "seconds": 0.1}
    tried._node_reports = [whole]
    assert "ray" in tried.nodes() and "10.0 GB" in tried.shared_memory() and "MB/s" in tried.object_store()
    assert tried.shared_folder() == str(tmp_path.resolve())
    for changed, check in (
        ({"versions": {**whole["versions"], "torch": "0.1"}}, tried.nodes),  # type: ignore[dict-item]
        ({"sees": False}, tried.shared_folder),
        ({"shm": 1}, tried.shared_memory),
    ):
        tried._node_reports = [whole, {**whole, "host": "b", **changed}]
        with pytest.raises(ClusterFault, match=r"\bb\b"):
            check()
