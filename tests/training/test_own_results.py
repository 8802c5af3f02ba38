"""Runs with an environment of a user: results of other types, repeated keys, metrics, graded rewards,
trackers, prompts that do not fit, and steps without a learning signal.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import outrider
from outrider.cli import main
from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.errors import ConfigError, DataError, InvalidResult, OutriderError
from outrider.smoke import save_model
from outrider.types import Message, Step, Task
from outrider.viewer.run_reader import read_alarms

HERE = "tests.training.test_own_results"


class WorldSettings(EnvironmentSettings):
    kind: str = "right"
    num_keys: int = 4
    prompt_chars: int = 0


class Episode:
    """One turn; the return is what :func:`returned` makes of the text."""

    def __init__(self, task: Task, settings: WorldSettings) -> None:
        self.task, self.settings, self.text = task, settings, ""

    def reset(self, seed: int) -> Sequence[Message]:
        self.text = ""
        return (Message(role="user", content=self.task.question + "x" * self.settings.prompt_chars),)

    def step(self, message: Message) -> StepResult:
        self.text = message.content
        return StepResult(done=True, invalid=self.settings.kind == "unreadable")

    def result(self) -> EpisodeResult:
        value: Any = {
            "half": 0.5, "text": "0.5", "text where right": "1.0" if len(self.text) % 2 else 0.0,
            "nan": float("nan"), "unreadable": 0.0,
        }.get(self.settings.kind, np.float32(len(self.text) % 3))  # fmt: skip
        metrics = {"num_words": 3, "a/b {c}": np.int64(2), "a_b _c_": 4.0}
        return EpisodeResult(episode_return=value, success=self.settings.kind == "solved", metrics=metrics)

    def close(self) -> None:
        pass


class Factory:
    def __init__(self, settings: WorldSettings) -> None:
        self.settings = settings

    def __call__(self, task: Task) -> Episode:
        return Episode(task, self.settings)

    def close(self) -> None:
        pass


class World:
    Settings = WorldSettings
    name = "world"
    stop: tuple[str, ...] = ()
    stateful = False

    def __init__(self, settings: WorldSettings) -> None:
        self.settings = settings

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(key=f"{split}/{number % self.settings.num_keys}", question=f"Task {number}?")
            for number in range(4)
        ]

    def make(self) -> Factory:
        return Factory(self.settings)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        return [Step(text="abc", observation="", is_terminal=True)]

    def close(self) -> None:
        pass


class Spy:
    """A tracker that keeps what it gets."""

    seen: ClassVar[list[tuple[int, dict[str, float]]]] = []
    tables: ClassVar[list[tuple[int, str, list[tuple[Any, ...]]]]] = []
    alarms: ClassVar[list[str]] = []
    identity: str | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        Spy.seen.append((step, dict(metrics)))

    def log_table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
    ) -> None:
        Spy.tables.append((step, name, list(rows)))

    def alert(self, step: int, text: str) -> None:
        Spy.alarms.append(text)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


def recipe(folder: Path, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "num_threads": 1,
        "model": {"name": str(folder), "precision": "float32"},
        "environment": {"type": f"{HERE}:World"},
        "algorithm": {"type": "grpo", "group_size": 2},
        "rollout": {"max_turns": 1, "max_turn_tokens": 8, "max_response_tokens": 16},
        "train": {"num_steps": 1, "tasks_per_step": 2, "max_retries": 0},
        "evaluation": {"num_tasks": 2, "at_start": False},
    }
    for key, value in changed.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    return given


def notes(run: Path) -> str:
    return "\n".join(json.loads(line)["text"] for line in (run / "notes.jsonl").read_text().splitlines())


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("text", r"episode_return is '0\.5' \(str\)"), ("text where right", "no finite number"), ("nan", "nan")],
)
def test_a_result_that_is_no_number_stops_the_run_with_one_line(
    kind: str, reason: str, at_start: bool, model: Path, tmp_path: Path
) -> None:
    given = recipe(model, environment={"kind": kind}, evaluation={"at_start": at_start})
    with pytest.raises(OutriderError, match=reason) as refused:
        outrider.train(given, run=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert "task test/" in str(refused.value) or "task train/" in str(refused.value)
    assert "Episode" in str(refused.value) and isinstance(refused.value, InvalidResult)


@pytest.mark.parametrize("split", ["train", "test"])
def test_repeated_keys_are_named_with_their_split(
    split: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = World.tasks
    twice = [Task(key="same", question=f"{number}?") for number in range(4)]
    monkeypatch.setattr(World, "tasks", lambda self, one: twice if one == split else whole(self, one))
    with pytest.raises(DataError, match=f"split '{split}' of the environment world: tasks 1 and 2 .*'same'"):
        outrider.train(recipe(model), run=tmp_path / "run")


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["prompt", "--split", "train"]])
def test_repeated_keys_are_named_before_a_run(
    command: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    twice = [Task(key="same", question=f"{number}?") for number in range(4)]
    monkeypatch.setattr(World, "tasks", lambda self, split: twice)
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'[model]\nname = "{model}"\n[environment]\ntype = "{HERE}:World"\n[algorithm]\ntype = "grpo"\n'
    )
    assert main([command[0], str(file), *command[1:]]) == 2
    assert "tasks 1 and 2 have the same key 'same'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task",
    [Task(key=3, question="?"), Task(key="a", question=3), Task(key="", question="?"), "a question"],  # type: ignore[arg-type]
)
def test_what_is_no_task_is_named(
    task: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "tasks", lambda self, split: [task, Task(key="b", question="?")])
    with pytest.raises(DataError, match="task 1"):
        outrider.train(recipe(model), run=tmp_path / "run")


def test_metrics_and_graded_returns_are_in_records_trackers_and_lines(model: Path, tmp_path: Path) -> None:
    Spy.seen.clear()
    Spy.tables.clear()
    Spy.alarms.clear()
    tracking = {"num_rollouts": 1}
    given = recipe(model, environment={"kind": "half"}, trackers=[f"{HERE}:Spy"], tracking=tracking)
    outrider.train(given, run=tmp_path / "run")
    assert Spy.alarms == [alarm["text"] for alarm in read_alarms(tmp_path / "run")] != []
    shape = [(rows[0][0], name, len(rows), rows[0][1], rows[0][5]) for _, name, rows in Spy.tables]
    assert shape == [
        (1, "rollouts/train", 1, "training", 0.5), (1, "rollouts/eval", 2, "after GRPO", 0.5)
    ]  # fmt: skip
    wanted = {"num_words": 3.0, "a_b__c_": 2.0, "a_b__c__2": 4.0}
    for row in (*records(tmp_path / "run", "train"), *records(tmp_path / "run", "eval")):
        found = {name.rpartition("/")[2]: value for name, value in row.items() if "environment/" in name}
        assert found == wanted
    assert all(values["environment/mean/num_words"] == 3.0 for _, values in Spy.seen)
    [evaluation] = records(tmp_path / "run", "eval")
    assert evaluation["eval/mean_return"] == 0.5 and evaluation["eval/score"] == 0.0
    rollouts = outrider.load_run(tmp_path / "run").rollouts(1)
    assert json.loads(rollouts.column("metrics")[0].as_py())["num_words"] == 3.0
    assert notes(tmp_path / "run").count("mean return 0.5") == 2  # the evaluation's line, and the summary's
    assert "mean return (a number, no share)" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("num_steps", [0, 1])
def test_trackers_get_the_cold_start_with_steps_that_never_decrease(
    num_steps: int, model: Path, tmp_path: Path
) -> None:
    Spy.seen.clear()
    given = recipe(
        model,
        environment={"kind": "solved"},
        cold_start={"num_examples": 4, "batch_size": 2},
        train={"num_steps": num_steps},
        evaluation={"at_start": True},
        trackers=[f"{HERE}:Spy"],
    )
    outrider.train(given, run=tmp_path / "run")
    written = records(tmp_path / "run", "sft")
    logged = [(step, values) for step, values in Spy.seen if "sft/loss" in values]
    assert [values["sft/loss"] for _, values in logged] == [row["sft/loss"] for row in written] != []
    assert [step for step, _ in logged] == [-1, 0]
    steps = [step for step, _ in Spy.seen]
    assert steps == sorted(steps) and steps[0] == -2
    assert [step for step, values in Spy.seen if "loss/policy" in values] == [1] * num_steps


def test_a_context_that_no_prompt_fits_stops_the_run(model: Path, tmp_path: Path) -> None:
    for number, at_start in enumerate((False, True)):
        given = recipe(
            model, model={"context_length": 40}, environment={"prompt_chars": 200},
            evaluation={"at_start": at_start},
        )  # fmt: skip
        with pytest.raises(
            ConfigError, match=r"model\.context_length: the context has 40 tokens.* has 2\d\d"
        ):
            outrider.train(given, run=tmp_path / f"run{number}")


def test_experts_that_fail_are_counted_by_reason_and_recorded(model: Path, tmp_path: Path) -> None:
    given = recipe(model, cold_start={"num_examples": 3}, rollout={"max_turn_tokens": 2})
    with pytest.raises(
        DataError, match=r"no expert rollout solved its task.*3 cut by rollout.max_turn_tokens = 2"
    ):
        outrider.train(given, run=tmp_path / "run")
    rows = outrider.load_run(tmp_path / "run").expert_rollouts()
    assert rows.num_rows == 3 and set(rows.column("success").to_pylist()) == {False}
    solved = recipe(model, environment={"kind": "solved"}, cold_start={"num_examples": 3},
                    rollout={"max_turn_tokens": 2}, train={"num_steps": 0})  # fmt: skip
    outrider.train(solved, run=tmp_path / "solved")
    assert "limits cut 3 of 3 expert rollouts: 3 by rollout.max_turn_tokens = 2" in notes(tmp_path / "solved")
    assert records(tmp_path / "solved", "sft")[0]["sft/num_examples_cut"] == 3.0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("unreadable", "cut by rollout.max_turn_tokens = 8"), ("half", "no group has a learning signal: of 4")],
)
def test_a_step_without_signal_is_an_alarm_with_its_reason(
    kind: str, reason: str, model: Path, tmp_path: Path
) -> None:
    outrider.train(recipe(model, environment={"kind": kind}, train={"num_steps": 3}), run=tmp_path / "run")
    alarms = [line for line in notes(tmp_path / "run").splitlines() if line.startswith("ALARM")]
    assert len(alarms) == 1 and reason in alarms[0], alarms


def test_what_the_learner_started_is_closed_if_a_later_check_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr("outrider.training.learner.LocalLearner.close", lambda self: closed.append(True))
    with pytest.raises(ConfigError, match="context"):
        outrider.train(recipe(model, model={"context_length": 10**6}), run=tmp_path / "run")
    assert closed == [True]


def test_an_evaluation_without_training_is_finished_when_it_is_resumed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = recipe(model, train={"num_steps": 0}, evaluation={"at_start": True})
    outrider.train(given, run=tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--progress", "plain"]) == 0
    assert "this run is finished: 0 of 0 steps" in capsys.readouterr().out
    assert len((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()) == 1
