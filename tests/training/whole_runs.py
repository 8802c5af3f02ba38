"""Tiny runs of every algorithm with a state of its own, and their comparison bit by bit without the clock."""

import json
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.viewer.records import TraceReader
from tests.training.tool_run import (
    write_demonstrations,
    write_house_model,
    write_python_model,
    write_tool_run,
)

_COMBINED = (
    "algorithm.type=combined",
    "algorithm.retrieval.num_hybrid=2",
    "algorithm.retrieval.probability=0.8",
    "algorithm.branch.first_wave=2",
    "algorithm.branch.base_probability=1.0",
    "algorithm.tips.memory_probability=0.6",
    "algorithm.tips.memory.embedder=hash",
    "algorithm.tips.memory.scope=all",
    "algorithm.tips.memory.min_similarity=0.1",
    "algorithm.tips.memory.max_shown_tokens=120",
    "algorithm.tips.memory.max_tip_tokens=24",
)
CASES: Mapping[str, tuple[str, ...]] = {
    "rapo": (),
    "evolve": ("buffer.evolve=true",),
    "grpo": ("algorithm.type=grpo",),
    "gigpo": ("algorithm.type=gigpo",),
    "dapo": (
        "algorithm.type=grpo",
        "algorithm.preset=dapo-paper",
        "algorithm.group_size=3",
        "algorithm.dynamic_sampling.max_extra_batches=1",
    ),
    "luffy": ("algorithm.type=luffy", "algorithm.demonstrations={root}/shown.jsonl"),
    "tree_grpo": ("algorithm.type=tree_grpo", "algorithm.group_size=6"),
    "rollout_replay": (
        "algorithm.type=rollout_replay",
        "algorithm.selection=difficulty",
        "train.tasks_per_step=4",
        "algorithm.buffer_size=5",
    ),
    "empo2": (
        "algorithm.type=empo2",
        "algorithm.memory_probability=0.6",
        "algorithm.memory.embedder=hash",
        "algorithm.memory.min_similarity=0.1",
        "algorithm.memory.max_shown_tokens=120",
        "algorithm.memory.max_tip_tokens=24",
    ),
    "rnd": (
        "algorithm.type=empo2",
        "algorithm.memory_probability=0",
        "algorithm.memory.embedder=hash",
        "algorithm.novelty=rnd",
    ),
    "arpo": (
        "algorithm.type=arpo",
        "algorithm.first_wave=2",
        "model.name={root}/model-python",
        'environment.tools=["search", "python"]',
        "environment.python.num_servers=1",
    ),
    "combined": _COMBINED,
    "combined_house": (
        "model.name={root}/model-house",
        'environment={{type = "house", num_train = 2, num_test = 1, max_moves = 4}}',
        "environment.house.num_rooms=2",
        "environment.house.num_things=2",
        'buffer={{embedder = "hash"}}',
        "rollout.max_turn_tokens=1",
        "rollout.max_response_tokens=1200",
        *_COMBINED,
        "algorithm.retrieval.mode=execute",
    ),
    "agent": (  # a program that keeps its conversations, forked by replay
        "algorithm.type=arpo",
        "algorithm.first_wave=2",
        'environment={{type = "agent", function = "tests.environments.agents.programs:chatty", '
        'is_repeatable = true, train = {{path = "{root}/tasks.jsonl"}}, '
        'test = {{path = "{root}/tasks.jsonl", limit = 3}}}}',
        'buffer={{embedder = "hash"}}',
        "rollout.max_turns=6",
        "rollout.max_response_tokens=400",
    ),
    "prefix": (
        "algorithm.type=grpo",
        "algorithm.prefix={{share = 1.0, start = 0.5}}",
        "model.name={root}/model-house",
        'environment={{type = "house", num_train = 2, num_test = 1, max_moves = 4}}',
        "environment.house.num_rooms=2",
        "environment.house.num_things=2",
        'buffer={{embedder = "hash"}}',
        "rollout.max_response_tokens=1200",
    ),
    "lamer": (
        "algorithm.type=lamer",
        "algorithm.num_episodes=2",
        "algorithm.max_reflection_tokens=12",
        "algorithm.group_size=4",
    ),
    "reference": ("algorithm.type=grpo", "algorithm.kl_weight=0.5"),
}
CLOCK = ("time/", "speed/", "memory/")


MODELS = {"model-python": write_python_model, "model-house": write_house_model}


def write_inputs(root: Path) -> None:
    """Model, tasks, corpus, buffer, recipe, demonstrations; :func:`command` writes other models."""
    write_tool_run(root)
    write_demonstrations(root / "shown.jsonl")


def write_data(root: Path) -> None:
    """The inputs with all models."""
    write_inputs(root)
    for name, write in MODELS.items():
        write(root / name)


def command(root: Path, run: Path, case: str) -> list[str | Path]:
    """``train`` with a buffer of the run's own: an evolving one is written to."""
    overrides = [override.format(root=root) for override in CASES[case]]
    for name, write in MODELS.items():
        if f"model.name={root / name}" in overrides and not (root / name).exists():
            write(root / name)
    recipe = root / "recipe.toml"
    if case not in ("rapo", "evolve"):
        recipe = root / "plain.toml"
        recipe.write_text((root / "recipe.toml").read_text().replace("num_hybrid = 2", ""))
    if case not in ("rapo", "evolve", "combined"):
        return ["train", recipe, *overrides, "--run", run, "--progress", "plain"]
    buffer = root / f"{run.name}.sqlite"
    shutil.copy(root / "buffer.sqlite", buffer)
    return ["train", recipe, *overrides, f"buffer.path={buffer}", "--run", run, "--progress", "plain"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Without what the clock decides."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if not name.startswith(CLOCK)} for record in records
    ]


def differences(one: Path, other: Path, *, num_steps: int) -> list[str]:
    """Names of different parts: weights, optimizer, state, memory, metrics, evaluations, traces, the buffer's
    rows, and files left over.
    """
    last = Path("checkpoints") / f"step-{num_steps:06d}"
    files = [
        last / name
        for name in ("masters.safetensors", "optimizer.safetensors", "state.json", "memory.safetensors")
    ]
    files += [Path("evaluations.jsonl"), Path("reference.safetensors")]
    found = [str(name) for name in files if _content(one / name) != _content(other / name)]
    mine, theirs = TraceReader(one / "traces"), TraceReader(other / "traces")
    if metrics(one) != metrics(other):
        found.append("metrics.jsonl")
    if not mine.steps() == theirs.steps() == tuple(range(1, num_steps + 1)):
        found.append("steps of the traces")
    found += [
        f"trace of step {step}"
        for step in mine.steps()
        if step in theirs.steps() and mine.read(step) != theirs.read(step)
    ]
    for number in range(len((one / "evaluations.jsonl").read_text().splitlines())):
        if mine.read_evaluation(number) != theirs.read_evaluation(number):
            found.append(f"trace of evaluation {number}")
    if _rows(one / "buffer.sqlite") != _rows(other / "buffer.sqlite"):
        found.append("buffer.sqlite")
    return found + [str(path) for pattern in ("*.partial", "*.tmp") for path in other.rglob(pattern)]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _rows(path: Path) -> list[Any]:
    """Revisions and generations count batches, which a rollback takes back and counts."""
    if not path.exists():
        return []
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as db:
        tables = ("trajectories", "steps", "vectors")
        found = [db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables]
    db.close()
    return found
