"""Every plug-in that is built in passes the contract checks that anybody's has to: a new one is tested by
being registered."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.base import AlgorithmContext
from outrider.algorithms.retrospex import CriticSettings
from outrider.algorithms.retrospex_critic import Critic, Networks
from outrider.engines.base import EngineContext
from outrider.errors import ToolUnavailable
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.plugins.registry import BUILT_IN, build, build_by_name, read_settings
from outrider.testing import check_algorithm, check_engine, check_environment, check_tool
from outrider.tools.base import ToolContext, ToolGroup
from outrider.tools.http_search import HttpSearchSettings
from tests.environments.verifiers_fake.make import write_fake
from tests.retrieval_server import passages, retrieval_server
from tests.tiny import tiny_model
from tests.tools.mcp.servers import fake

# What the defaults leave out; every other plug-in is made of its defaults.
SECTIONS: dict[str, dict[str, Any]] = {"empo2": {"memory": {"embedder": "hash"}}, "rapo": {"num_hybrid": 0}}
OF_ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "factbook": {"hops": [1], "passages": "facts", "num_train": 2},  # quick to make
    "openenv": {"command": ("{python}", "-m", "tests.environments.openenv_worlds", "{port}")},
}


def _data(folder: Path) -> dict[str, Any]:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(
            json.dumps({"id": split, "question": "Where?", "answer": "here"}) + "\n"
        )
    (folder / "corpus.jsonl").write_text('{"id": "1", "title": "here", "text": "is there"}\n')
    return {"tools": ["search"], "corpus": folder / "corpus.jsonl", "train": {"path": folder / "train.jsonl"}}


def _program(folder: Path) -> dict[str, Any]:
    programs = "tests.environments.agents.programs"
    return {"function": f"{programs}:words", "reward": f"{programs}:score", "train": _data(folder)["train"]}


def _taskset(folder: Path) -> dict[str, Any]:
    write_fake(folder)
    rows = {"num_train": 2, "num_valid": 1, "num_test": 1}
    return {"id": "fake_taskset", "options": {"taskset": {"rows": ["a", "b", "c", "d"]}}, **rows}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "scienceworld" else [])
        for name in BUILT_IN["environments"]
    ],
)
def test_environments(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "verifiers":
        monkeypatch.chdir(tmp_path)  # where the fake package is found
    of_files = {"tools": _data, "agent": _program, "verifiers": _taskset}
    given = of_files[name](tmp_path) if name in of_files else OF_ENVIRONMENTS.get(name, {})
    family = build("environments", read_settings("environments", {"type": name, **given}), None)
    try:
        check_environment(family)
    except ToolUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", BUILT_IN["tools"])
def test_tools(name: str, tmp_path: Path) -> None:
    environment = read_settings("environments", {"type": "tools", **_data(tmp_path)})
    settings: Any = None
    if name == "mcp":
        pytest.importorskip("mcp", reason="needs the extra mcp")
        settings = fake(only=["add"])
    with retrieval_server(passages("here it is")) as (url, _):
        if name == "http-search":
            settings = HttpSearchSettings(base_url=url)
        built = build_by_name("tools", name, settings, ToolContext(environment=environment))
        for tool in built.tools if isinstance(built, ToolGroup) else (built,):
            check_tool(tool, texts=("here", "print(6 * 7)", '{"a": 1, "b": 2}'))


def context() -> AlgorithmContext:
    return AlgorithmContext(
        seed=1, num_training_steps=4, groups_per_step=5, max_response_tokens=64, vocabulary_size=9,
        is_stateful=False, count_tokens=len, train_tasks=(), buffer=None, load_embedder=load_embedder,
        read_demonstrations=lambda path, tasks: {},
    )  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN["algorithms"])
def test_algorithms(name: str) -> None:
    settings = read_settings("algorithms", {"type": name, **SECTIONS.get(name, {})})
    check_algorithm(lambda: build("algorithms", copy.deepcopy(settings), context()))


@pytest.mark.parametrize("name", BUILT_IN["engines"])
def test_engines(name: str, tmp_path: Path) -> None:
    if name == "vllm":
        pytest.importorskip("vllm")
    model = tiny_model()
    chosen = EngineContext(
        language_model=model, export=lambda folder: None, folder=tmp_path, context_length=None,
        precision="float32", device="cpu", seed=0, on_tokens=lambda num: None,
    )  # fmt: skip
    section = {"type": name} | ({"critic": _critic(tmp_path)} if name == "retrospex" else {})
    check_engine(build("engines", read_settings("engines", section), chosen))


def _critic(folder: Path) -> Path:
    settings = CriticSettings(embedder="hash", hidden=4)
    Critic(Networks(256, 4, seed=0), HashEmbedder(), settings).save(folder / "critic.safetensors")
    return folder / "critic.safetensors"


@pytest.mark.parametrize("name", BUILT_IN["embedders"])
def test_embedders(name: str) -> None:
    if name == "minilm":
        pytest.importorskip("onnxruntime")
    vectors = load_embedder(name).embed(["a b", "a b", "c"])
    assert (vectors[0] == vectors[1]).all() and vectors.shape == (3, load_embedder(name).dim)
