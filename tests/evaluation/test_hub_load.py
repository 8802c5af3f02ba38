"""Models and task sets from a hub, with the real client libraries in a process of their own against a server
on 127.0.0.1.
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from outrider.evaluation.tasks import load_benchmark
from tests.hub_server import Repository, hub_server
from tests.tiny import tiny_model

pytestmark = pytest.mark.long

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
TEST = [
    {"question": "2 + 2?", "answer": "Count on. #### 4"},
    {"question": "1,000 + 234?", "answer": "Add. #### 1,234"},
]


def rows(values: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(values), out)
    return out.getvalue()


GSM8K = Repository(
    files={"README.md": CARD, "main/train-0.parquet": rows(TRAIN), "main/test-0.parquet": rows(TEST)}
)


def tiny_repository(folder: Path) -> Repository:
    tiny = tiny_model()
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return Repository(files={path.name: path.read_bytes() for path in folder.iterdir()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one command gave."""

    returncode: int
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The commands by name, what the hub was asked, and the folder of the run that worked."""

    done: dict[str, Done]
    asked: list[str]
    run: Path


COMMANDS = """
import contextlib, io, json, sys
from outrider.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as output:
        status = main(["eval", "--progress", "none", *arguments])
    print(json.dumps({"returncode": status, "stderr": output.getvalue()}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Every command in one process, as a user of that hub runs it: the libraries read its address when they
    are imported.
    """
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("hub")
    repositories = {
        "models/acme/tiny": tiny_repository(folder / "tiny"), "datasets/openai/gsm8k": GSM8K,
        "datasets/gaia-benchmark/GAIA": Repository(files={"README.md": b""}, gated=True),
    }  # fmt: skip
    commands = {
        "played": ["--tasks", "gsm8k", "--model", "acme/tiny", "rollout.max_turn_tokens=8", "num_threads=1"],
        "no model": ["--tasks", str(as_file(folder)), "--model", "acme/none"],
        "gaia": ["--tasks", "gaia", "--model", "acme/tiny"],
        "math500": ["--tasks", "math500", "--model", "acme/tiny"],
    }
    given = [[*arguments, "--run", str(folder / name)] for name, arguments in commands.items()]
    with hub_server(repositories) as server:
        address = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home")}
        environment = os.environ | address | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        process = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(given)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert process.returncode == 0, process.stderr
    answers = [
        Done(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith('{"returncode"')
    ]
    return Asked(done=dict(zip(commands, answers, strict=True)), asked=server.asked, run=folder / "played")


def test_a_hub_model_answers_a_hub_task_set(hub: Asked, tmp_path: Path) -> None:
    assert hub.done["played"].returncode == 0, hub.done["played"].stderr
    assert any(
        one.startswith("GET /acme/tiny/resolve/") and one.endswith("/model.safetensors") for one in hub.asked
    )
    results = [json.loads(line) for line in (hub.run / "results.jsonl").read_text().splitlines()][1:]
    panel = load_benchmark(f"gsm8k={as_file(tmp_path)}")
    assert (
        [one["task_key"] for one in results] == [task.key for task in panel.tasks] == ["gsm8k-0", "gsm8k-1"]
    )
    assert [one["num_tokens"] for one in results] == [8, 8]
    assert json.loads((hub.run / "summary.json").read_text())["panel_hash"] == panel.panel_hash


def as_file(folder: Path) -> Path:
    """The same questions as a file of the user's."""
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEST))
    return path


def test_an_unknown_model_is_one_line(hub: Asked) -> None:
    done = hub.done["no model"]
    assert done.returncode == 1
    assert "acme/none" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "advice"), [("gaia", "GAIA is gated"), ("math500", "math500=FILE")])
def test_an_unavailable_task_set_is_one_line_with_advice(hub: Asked, name: str, advice: str) -> None:
    done = hub.done[name]
    assert done.returncode == 1
    assert advice in done.stderr and ".." not in done.stderr and "Traceback" not in done.stderr
