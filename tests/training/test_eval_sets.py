"""Several evaluation sets in one run, task lists, and scores that name what they were measured on."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import outrider
from outrider.cli import main
from outrider.config import load_settings
from outrider.engines.base import EngineSettings
from outrider.environments.base import EnvironmentSettings, listed_tasks, make_task_set, split_tasks
from outrider.environments.factbook.environment import FactbookConfig
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.rollout.evaluate import evaluate, paired_gain
from outrider.rollout.settings import EvaluationSettings
from outrider.training.data import read_eval_tasks
from outrider.training.settings import RunSettings
from outrider.training.trainer import Trainer
from outrider.types import Task
from outrider.viewer.evaluations import evaluation_charts, evaluation_tables
from outrider.viewer.run_reader import read_run
from outrider.viewer.summary import one_line_summary, summary_lines
from tests.rollout.fakes import END, Factory, Fake, scheduler, scripted
from tests.training.tool_run import write_tool_run

SETS = (
    'evaluation.panels=[{name = "seen", split = "test", num_tasks = 2}, '
    '{name = "unseen", split = "train", num_tasks = 3}]'
)
SHORT = ("train.num_steps=0", "evaluation.num_samples=2")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("sets"))


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluated(recipe: Path) -> Path:
    run = recipe.parent / "evaluated"
    outrider.evaluate(recipe, run=run, overrides=[SETS, *SHORT[1:]])
    return run


def settings_of(recipe: Path, *overrides: str) -> RunSettings:
    return load_settings(RunSettings, file=recipe, overrides=overrides)


def test_every_set_is_recorded_by_its_name_and_the_first_one_is_the_main_one(
    recipe: Path, evaluated: Path
) -> None:
    seen, unseen = read_lines(evaluated)
    assert [[line[key] for key in ("label", "panel", "split", "num_tasks")] for line in (seen, unseen)] == [
        ["before training", "seen", "test", 2], ["before training", "unseen", "train", 3],
    ]  # fmt: skip
    first, second = [json.loads(line) for line in (evaluated / "metrics.jsonl").read_text().splitlines()]
    assert first["eval/score"] == seen["metric"]["score"]["value"] and "eval/score/unseen" not in first
    assert second["eval/score/unseen"] == unseen["metric"]["score"]["value"] and "eval/score" not in second
    run = read_run(evaluated)
    labels = [f"before training, {name}" for name in ("seen", "unseen")]
    assert [entry.full_label for entry in run.evaluations] == labels
    assert [entry.panel for entry in run.main_evaluations] == ["seen"]
    summary = one_line_summary(evaluated)
    assert "before training: " in summary and "2 training tasks" in summary
    scores = [line for line in summary_lines(evaluated) if "tasks, temperature" in line]
    assert [name for line in scores for name in labels if name in line] == labels
    tables = evaluation_tables(run)
    assert [table["split"] for table in tables] == ["seen (split test)", "unseen (split train)"]
    assert not any(table["warning"] for table in tables) and not evaluation_charts(run)
    # the same set alone has the same bits, with other names
    alone = recipe.parent / "alone"
    outrider.evaluate(recipe, run=alone, overrides=["evaluation.num_tasks=2", *SHORT[1:]])
    (line,) = read_lines(alone)
    assert line == {key: value for key, value in seen.items() if key != "panel"}


def test_a_score_names_split_hash_temperature_and_n_in_one_line(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, _ = read_lines(evaluated)
    conditions = f"split test, panel {seen['panel_hash'][:12]}, temperature 1, n = 2"
    notes = [json.loads(line)["text"] for line in (evaluated / "notes.jsonl").read_text().splitlines()]
    (note,) = [text for text in notes if text.startswith("before training, seen: ")]
    assert note.endswith(f"; {conditions}")
    report = (evaluated / "report.html").read_text()
    assert f"step 0, 2 tasks, {conditions}" in report
    pack = evaluated.parent / "pack"
    assert main(["pack", str(evaluated), "--out", str(pack)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("evaluated, before training, seen: ")]
    assert line.endswith(f" on 2 tasks; {conditions}")
    assert main(["verify", str(pack), "--no-replay"]) == 0
    rows = json.loads((pack / "tables.json").read_text())["evaluations"]
    assert [row["panel"] for row in rows] == ["seen", "unseen"]


def test_one_set_of_a_recipe_is_chosen_by_name(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recipe.parent / "chosen"
    arguments = ["eval", str(recipe), SETS, "--progress", "none", "--set"]
    assert main([*arguments, "unseen", "--run", str(run)]) == 0
    (line,) = read_lines(run)
    assert (line["panel"], line["num_tasks"]) == ("unseen", 3)
    metrics = json.loads((run / "metrics.jsonl").read_text())
    assert metrics["eval/score"] == line["metric"]["score"]["value"]
    assert main([*arguments, "unsen", "--run", str(recipe.parent / "none")]) == 2
    assert "evaluation.panels has no set 'unsen', did you mean unseen?" in capsys.readouterr().err


class Killed(BaseException):
    """What ends a process between two evaluation sets."""


def test_an_evaluation_that_was_killed_between_two_sets_continues(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = recipe.parent / "whole", recipe.parent / "killed"
    overrides = [SETS, "train.num_steps=1", "evaluation.every=1", "evaluation.at_start=false"]
    outrider.train(recipe, run=whole, overrides=overrides)
    played: list[str] = []
    original = Trainer._evaluate_set

    def stop_before_second(self: Trainer, label: str, tasks: Any, **kwargs: Any) -> None:
        if tasks.name == "unseen" and not played.count("unseen"):
            played.append("unseen")
            raise Killed
        played.append(tasks.name)
        original(self, label, tasks, **kwargs)

    monkeypatch.setattr(Trainer, "_evaluate_set", stop_before_second)
    with pytest.raises(Killed):
        outrider.train(recipe, run=killed, overrides=overrides)
    assert [line["panel"] for line in read_lines(killed)] == ["seen"]
    outrider.train(resume=killed)
    assert played == ["seen", "unseen", "unseen"]  # the first set was not evaluated again
    assert read_lines(killed) == read_lines(whole)
    # more steps: both evaluations at the former end are kept
    outrider.train(resume=killed, overrides=["train.num_steps=2"])
    assert [(line["label"], line["panel"]) for line in read_lines(killed)] == [
        ("step 1", "seen"), ("step 1", "unseen"), ("after RAPO", "seen"), ("after RAPO", "unseen"),
    ]  # fmt: skip
    assert [line["task_scores"] for line in read_lines(killed)[:2]] == [
        line["task_scores"] for line in read_lines(whole)
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.panels=[{}]"], "every set needs a name|Field required"),
        (['evaluation.panels=[{name = "a"}, {name = "a"}]'], "every set needs a name of its own"),
        (['evaluation.panels=[{name = "a/b"}]'], "name"),
        ([SETS, "evaluation.num_tasks=3"], r"remove evaluation\.num_tasks"),
        ([SETS, "evaluation.num_trials=2"], r"name it \(--set; sets= in Python\)"),
        (["evaluation.temperature=0", "evaluation.top_p=0.9"], "temperature = 0 is greedy"),
        (["evaluation.top_p=0"], "evaluation.top_p"),
        (["evaluation.top_k=0"], "evaluation.top_k"),
    ],
)
def test_what_contradicts_itself_is_refused(recipe: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(recipe, *overrides)


def test_a_set_with_another_hash_is_refused_by_name(recipe: Path) -> None:
    sets = f'evaluation.panels=[{{name = "a"}}, {{name = "b", split = "train", sha256 = "{"0" * 64}"}}]'
    with pytest.raises(DataError, match=r"the sha256 of the evaluation set 'b' is 0{64}, theirs is"):
        outrider.evaluate(recipe, run=recipe.parent / "other", overrides=[sets])


def test_the_likeliest_token_alone_is_greedy_and_the_record_names_the_truncation(recipe: Path) -> None:
    runs = {"greedy": ["evaluation.temperature=0"], "top": ["evaluation.top_k=1"], "free": []}
    for name, overrides in runs.items():
        samples = "evaluation.num_samples=1"
        outrider.evaluate(recipe, run=recipe.parent / name, overrides=[samples, *overrides])
    greedy, top, free = [read_lines(recipe.parent / name)[0] for name in runs]
    assert top["top_k"] == 1 and "top_p" not in top and not {"top_p", "top_k"} & free.keys()
    texts = [
        outrider.load_run(recipe.parent / name).evaluation_traces(0)["text"].to_pylist() for name in runs
    ]
    assert texts[0] == texts[1] != texts[2]
    assert top["task_scores"] == greedy["task_scores"]
    assert paired_gain(free, top) is None and paired_gain(top, top) is not None
    (run,) = read_run(recipe.parent / "top").evaluations
    assert run.conditions != replace(run, top_k=None).conditions and run.truncation == {"top_k": 1.0}


class UntruncatedSettings(EngineSettings):
    """Of an engine that samples from all tokens."""

    type: Literal["untruncated"] = "untruncated"


def test_an_engine_that_cannot_truncate_is_refused(recipe: Path) -> None:
    settings = settings_of(recipe, "evaluation.top_p=0.9")
    with pytest.raises(ValueError, match=r"evaluation\.top_p and top_k: engine\.type = untruncated"):
        settings.model_copy(update={"engine": UntruncatedSettings()})._validate()  # type: ignore[operator]


def test_a_question_in_two_splits_is_reported_before_a_run_begins(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [("Where is the moon?", "up"), ("where is the  LAMP", "hill"), ("Where is the sun?", "up")]
    rows = (json.dumps({"question": question, "answer": answer}) for question, answer in questions)
    (recipe.parent / "held.jsonl").write_text("".join(f"{row}\n" for row in rows))
    assert main(["train", str(recipe), "--dry-run", "environment.test.path=held.jsonl"]) == 0
    assert (
        "EVALUATION ON TRAINING TASKS: 1 of the 3 evaluation tasks (split test) are training tasks, for "
        "example 'where is the LAMP'; a score on them does not measure generalization"
    ) in capsys.readouterr().out


# Task lists.


TASKS = [Task(key=f"k{number}", question="q") for number in range(4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty or its last line is cut"),
        ("k1\nk2", "its last line is cut"),
        ("k1\nk9\n", r"list\.txt:2: 'k9' is no task of the split 'test'"),
        ("k1\n\n", r"list\.txt:2: '' is no task"),
        ("k1 \n", r"list\.txt:1: 'k1 ' is no task"),
        ("k1\nk2\nk1\n", r"list\.txt:3: 'k1' is listed twice"),
    ],
)
def test_a_task_list_with_an_error_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(text.encode())
    with pytest.raises(DataError, match=message):
        listed_tasks(TASKS, tmp_path / "list.txt", split="test")


def test_a_task_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfk1\n")
    assert [task.key for task in listed_tasks(TASKS, tmp_path / "list.txt", split="test")] == ["k1"]


def test_a_list_is_never_cut_by_a_default(tmp_path: Path) -> None:
    task_set = make_task_set(FactbookConfig(hops=(2, 3)))
    keys = [task.key for task in split_tasks(task_set, "train")[:201]]
    assert len(keys) == 201
    file = tmp_path / "list.txt"
    file.write_text("".join(f"{key}\n" for key in keys))
    chosen = {"name": "a", "split": "train", "task_list": file}
    with pytest.raises(ConfigError, match=r"lists 201 tasks, and num_tasks .* set num_tasks = 201"):
        read_eval_tasks(task_set, EvaluationSettings.model_validate({"panels": [chosen]}))
    for num in (200, 201):
        settings = EvaluationSettings.model_validate({"panels": [{**chosen, "num_tasks": num}]})
        assert [task.key for task in read_eval_tasks(task_set, settings)] == keys[:num]


def test_task_lists_select_and_order_tasks_and_are_inputs_of_the_run(recipe: Path) -> None:
    keys = [task.key for task in split_tasks(make_task_set(settings_of(recipe).environment), "train")]
    chosen = [keys[4], keys[0]]
    (recipe.parent / "list.txt").write_text("".join(f"{key}\n" for key in chosen))
    listed = settings_of(recipe, "environment.task_list.train=list.txt")
    task_set = make_task_set(listed.environment)
    assert [task.key for task in split_tasks(task_set, "train")] == chosen
    assert len(split_tasks(task_set, "test")) == 3
    assert "task_list" not in settings_of(recipe).environment.model_dump()
    run = recipe.parent / "listed"
    sets = 'evaluation.panels=[{name = "two", split = "train", task_list = "list.txt"}]'
    outrider.train(
        recipe, run=run, overrides=[sets, "environment.task_list.train=list.txt", "train.num_steps=1"]
    )
    assert list(read_lines(run)[0]["task_scores"]) == chosen
    (state,) = run.glob("checkpoints/step-000001/state.json")
    inputs = json.loads(state.read_text())["inputs"]
    assert inputs["environment.task_list.train"] == inputs["evaluation.panels.0.task_list"]
    (recipe.parent / "list.txt").write_text("".join(f"{key}\n" for key in chosen[::-1]))
    with pytest.raises((CheckpointError, DataError)):
        outrider.train(resume=run, overrides=["train.num_steps=2"])


class Unlisted:
    """A task set that does not keep its settings."""

    name, stop, stateful = "unlisted", (), True


def test_a_task_set_that_would_ignore_a_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.environments.base.build", lambda *arguments: Unlisted())
    with pytest.raises(ConfigError, match=r"environment\.task_list: unlisted does not keep its settings"):
        make_task_set(EnvironmentSettings.model_validate({"task_list": {"test": tmp_path / "list.txt"}}))


# Scores do not depend on the batch.


@pytest.mark.parametrize("size", [1, 64, 128, 140])
def test_a_score_does_not_depend_on_the_batch_and_every_task_is_played_n_times(size: int) -> None:
    tasks = [Task(key=f"game {number}", question=f"q{number}") for number in range(140)]
    played: Counter[str] = Counter()

    def make(task: Task, number: int) -> Fake:
        played[task.key] += 1
        return Fake(lambda step, text: END, episode_return=float(int(task.question[1:]) % 3 == 0))

    player = scheduler(scripted(lambda request, text: "go."), Factory(make), max_concurrent=size)
    result, _ = evaluate(player, tasks, num_samples=2, label="a", step=0)
    assert played == dict.fromkeys((task.key for task in tasks), 2)
    assert result.num_tasks == 140 and result.num_faults == 0
    assert result.mean_return == pytest.approx(47 / 140)
    assert list(result.task_returns) == [task.key for task in tasks]
    assert hash_tasks(tasks) == hash_tasks(list(tasks))
