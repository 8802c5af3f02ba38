"""Models and task sets from a hub, with the real client libraries against a server on 127.0.0.1, each in a process of its own."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from outrider.evals.task_sets import load_task_set
from tests.hub_server import Repository, hub_server
from tests.tiny import tiny_model

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""
TRAIN = [{"question": "Not to be played", "answer": "It trains. #### 0"}]
TEST = [{"question": "2 + 2?", "answer": "Count on. #### 4"}, {"question": "1,000 + 234?", "answer": "Add. #### 1,234"}]


def rows(values: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(values), out)
    return out.getvalue()


GSM8K = Repository(files={"README.md": CARD, "main/train-0.parquet": rows(TRAIN), "main/test-0.parquet": rows(TEST)})


def tiny_repository(folder: Path) -> Repository:
    tiny = tiny_model()
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return Repository(files={path.name: path.read_bytes() for path in folder.iterdir()})


def outrider(url: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user of that hub runs it: the libraries read its address when they are imported."""
    hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "outrider", "eval", "--progress", "none", *arguments]
    return subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, check=False, timeout=300)


def test_a_hub_model_answers_a_hub_task_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    repositories = {"models/acme/tiny": tiny_repository(tmp_path / "tiny"), "datasets/openai/gsm8k": GSM8K}
    run = tmp_path / "run"
    with hub_server(repositories) as hub:
        arguments = ["--tasks", "gsm8k", "--model", "acme/tiny", "--run", str(run), "rollout.max_turn_tokens=8", "num_threads=1"]
        done = outrider(hub.url, tmp_path / "home", *arguments)
        assert done.returncode == 0, done.stderr
        assert any(one.startswith("GET /acme/tiny/resolve/") and one.endswith("/model.safetensors") for one in hub.asked)
    results = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()][1:]
    panel = load_task_set(f"gsm8k={as_file(tmp_path)}")
    assert [one["task_key"] for one in results] == [task.key for task in panel.tasks] == ["gsm8k-0", "gsm8k-1"]
    assert [one["num_tokens"] for one in results] == [8, 8]
    assert json.loads((run / "summary.json").read_text())["panel_hash"] == panel.panel_hash


def as_file(folder: Path) -> Path:
    """The same questions as a file of the user's."""
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEST))
    return path


def test_a_model_that_the_hub_lacks_is_said_in_a_line(tmp_path: Path) -> None:
    with hub_server({}) as hub:
        done = outrider(
            hub.url, tmp_path / "home", "--tasks", str(as_file(tmp_path)), "--model", "acme/none", "--run", str(tmp_path / "run")
        )
    assert done.returncode == 1
    assert "acme/none" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "advice"), [("gaia", "GAIA is gated"), ("math500", "math500=FILE")])
def test_a_set_that_the_hub_does_not_give_says_what_to_do(tmp_path: Path, name: str, advice: str) -> None:
    pytest.importorskip("datasets")
    with hub_server({"datasets/gaia-benchmark/GAIA": Repository(files={"README.md": b""}, gated=True)}) as hub:
        done = outrider(hub.url, tmp_path / "home", "--tasks", name, "--model", "acme/tiny", "--run", str(tmp_path / "run"))
    assert done.returncode == 1
    assert advice in done.stderr and ".." not in done.stderr and "Traceback" not in done.stderr
