"""An evaluation changes nothing that later steps depend on, for every algorithm."""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from outrider.config import validate
from outrider.plugins.registry import BUILT_IN
from outrider.training.checkpoint import read_checksummed
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.training.trainer import Trainer
from outrider.viewer.progress import make_progress
from outrider.viewer.trackers import make_trackers
from tests.golden import parts
from tests.golden.cases import recipe
from tests.golden.record import scripted, write_inputs

CASES = {
    "grpo": "grpo", "reinforce++": "reinforce++-baseline-official", "rejection": "rejection",
    "rapo": "rapo, evolve", "arpo": "arpo", "gigpo": "gigpo", "empo2": "empo2", "combined": "combined",
    "luffy": "luffy-paper", "rollout_replay": "rollout-replay-official", "tree_grpo": "tree-grpo-official",
    "lamer": "lamer",
}  # fmt: skip
COUNTS = ("num_evaluations", "num_metric_records")  # of the evaluation's own records


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Digests of everything that is saved, of the buffer, and of the global generators."""
    trainer.state.save()
    checkpoint = trainer.run.checkpoints / f"step-{trainer.state.step:06d}"
    saved = read_checksummed(checkpoint / "state.json")
    buffer = trainer.run.path / "buffer.sqlite"
    return {
        "checkpoint": {key: value for key, value in saved.items() if key not in COUNTS},
        "files": {
            path.name: parts.digest(path.read_bytes().hex())
            for path in checkpoint.iterdir()
            if path.name != "state.json"
        },
        "memory": parts.digest(str(trainer.parts.algorithm.state())),
        "buffer": parts.buffer_rows(buffer) if buffer.exists() else None,
        "generators": parts.digest(
            [str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()]
        ),
    }


def test_every_algorithm_has_a_case() -> None:
    assert CASES.keys() == BUILT_IN["algorithms"].keys()


@pytest.mark.parametrize(
    "name",
    # the fast ones have every kind of state: tips, novelty, steps, stored rollouts
    [
        pytest.param(name, marks=[] if name in ("combined", "rollout_replay") else [pytest.mark.long])
        for name in CASES
    ],
)
def test_an_evaluation_changes_no_state(name: str, root: Path, tmp_path: Path) -> None:
    """After a step that filled the memories: weights, optimizer, memories, buffer, counts and generators."""
    tree = recipe(CASES[name], "scripted", root=root, run=tmp_path / "run")
    tree["train"] |= {"num_steps": 1}
    tree["evaluation"] |= {"num_tasks": 3}
    settings = validate(RunSettings, tree)
    assert settings.algorithm.type == name  # type: ignore[attr-defined]
    states: list[tuple[dict[str, Any], dict[str, Any]]] = []
    evaluate = Trainer._evaluate

    def watched(trainer: Trainer, label: str, **options: Any) -> None:
        before = state_of(trainer)
        evaluate(trainer, label, **options)
        states.append((before, state_of(trainer)))

    with ExitStack() as ending:
        directory = RunDirectory.create(tmp_path / "run", settings)
        ending.callback(directory.release)
        made = build(
            settings, buffer_path=tmp_path / "run" / "buffer.sqlite", resumed=False,
            on_tokens=lambda num: None, note=lambda line: None,
        )  # fmt: skip
        ending.callback(made.factory.close)
        if made.buffer is not None:
            ending.callback(made.buffer.close)
        made.engine = scripted(made)
        trackers = make_trackers((), run_dir=directory.path, config={})
        trainer = Trainer(run=directory, parts=made, progress=make_progress("none"), trackers=trackers)
        ending.callback(trainer.state.close)
        directory.commit()
        directory.retain()
        ending.enter_context(mock.patch.object(Trainer, "_evaluate", watched))
        trainer.train()
        [line] = directory.finished_evaluations()
        assert len(line["task_scores"]) == 3
    [(before, after)] = states
    assert before == after
