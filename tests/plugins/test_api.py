"""The Python API: names, tables and objects in place of a recipe's sections, and runs as tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import outrider
from outrider.errors import ConfigError, DataError
from outrider.types import Task
from tests.tiny import save_tiny_model


class Own(outrider.Environment):
    """Passed by a program, and not named in a recipe."""

    class Settings(outrider.EnvironmentSettings):
        size: int = 4

    stateful = False
    num_opened: ClassVar[int] = 0

    @classmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        return [Task(key=f"own/{split}/{i}", question="?") for i in range(settings.size)]

    @classmethod
    def open_shared(cls, settings: Any) -> None:
        Own.num_opened += 1

    def reset(self, task: Task, seed: int) -> str:
        return task.question

    def step(self, action: str) -> tuple[None, float, bool]:
        return None, 1.0, True


class Other(Own):
    """Another class with the same settings."""


def tree(root: Path) -> dict[str, Any]:
    return {
        "seed": 1, "num_threads": 1, "model": {
            "name": str(save_tiny_model(root / "model")), "precision": "float32"},
        "environment": {"type": "house"}, "algorithm": {"type": "grpo", "group_size": 2},
        "rollout": {"max_turns": 1, "max_turn_tokens": 3, "max_response_tokens": 8},
        "train": {"num_steps": 1, "tasks_per_step": 2}, "evaluation": {"num_tasks": 2, "at_start": False},
    }  # fmt: skip


def test_an_object_in_place_of_a_name_and_the_run_as_tables(tmp_path: Path) -> None:
    environment = Own(Own.Settings(size=3))
    Own.num_opened = 0  # other tests of this process open it too
    run = outrider.train(tree(tmp_path), run=tmp_path / "run", overrides=["seed=5"], environment=environment)
    assert Own.num_opened == 1
    assert run.config["seed"] == 5 and run.config["environment"] == {"type": f"{__name__}:Own", "size": 3}
    assert json.loads((run.path / "plugins.json").read_text())["environment"]["file"] == __file__
    trained = run.metrics("train")
    assert trained.num_rows == 1 and trained.column("step").to_pylist() == [1]
    assert trained.column("reward/mean").to_pylist() == [1.0]
    assert run.evaluations().column("label").to_pylist() == ["after GRPO"]
    assert run.evaluations().column("score.value").to_pylist() == [1.0]
    traces = run.traces(run.steps()[-1])
    assert set(traces.column("task_key").to_pylist()) <= {f"own/train/{i}" for i in range(3)}
    assert run.evaluation_traces(0).num_rows > 0
    with pytest.raises(ConfigError, match=r"environment.size is 4, but the run started with 3"):
        outrider.train(resume=run.path, environment=Own(Own.Settings(size=4)))
    with pytest.raises(ConfigError, match=r"environment\.type"):
        outrider.train(resume=run.path, environment=Other(Other.Settings(size=3)))
    outrider.train(resume=run.path, environment=Own(Own.Settings(size=3)))
    with pytest.raises(DataError, match="the file is missing"):
        run.traces(99)
    again = outrider.load_run(run.path)
    assert again == run and run.metrics("sft").num_rows == 0
    pandas = pytest.importorskip("pandas")
    assert isinstance(trained.to_pandas(), pandas.DataFrame)


def test_a_class_has_its_default_settings(tmp_path: Path) -> None:
    run = outrider.evaluate(tree(tmp_path), run=tmp_path / "eval", environment=Own)
    assert run.config["environment"] == {"type": f"{__name__}:Own", "size": 4}
    assert run.evaluations().column("score.value").to_pylist() == [1.0]


def test_evaluate_by_name_and_with_the_weights_of_a_run(tmp_path: Path) -> None:
    run = outrider.evaluate(
        tree(tmp_path), run=tmp_path / "eval", environment={"type": "house", "max_moves": 2}
    )
    assert run.config["environment"]["max_moves"] == 2 and run.evaluations().num_rows == 1


@pytest.mark.parametrize("override", ["train.num_steps=1", "evaluation.at_start=false"])
def test_an_evaluation_refuses_to_train_and_to_leave_itself_out(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"an evaluation requires .*: remove '{override}'"):
        outrider.evaluate(tree(tmp_path), run=tmp_path / "eval", overrides=["seed=2", override])
    assert not (tmp_path / "eval").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name a recipe"),
        ({"recipe": {"environment": {"type": "house"}}, "run": "new"}, "algorithm: Field required"),
        ({"recipe": "gone.toml", "run": "new"}, "cannot read gone.toml"),
        ({"recipe": {}, "environments": "house"}, "unknown plug-in section 'environments'"),
        ({"resume": "gone", "environment": "house"}, "keeps its environment: only an object"),
        ({"resume": "gone", "run": "new"}, "keeps its model and its directory"),
    ],
)
def test_impossible_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        outrider.train(**arguments)
    assert "\n" not in str(caught.value)


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory"):
        outrider.load_run(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        outrider.trian  # noqa: B018
