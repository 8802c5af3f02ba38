"""A finished run with more steps has the bits of a run that had them from the start."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.errors import ConfigError
from outrider.training import trainer
from outrider.training.data import read_eval_tasks, training_tasks
from outrider.training.run_dir import MAY_CHANGE, RunDirectory, extend_settings
from outrider.training.settings import RunSettings
from outrider.viewer.records import TraceReader
from tests.training.short_runs import begin, records, resume
from tests.training.short_runs import content as whole_content
from tests.training.tool_run import write_tool_run

OF_THE_MACHINE = re.compile(r'"((time|speed)/[a-z_]+|[a-z]+/peak_rss)": [^,}]+')


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("made") / "data")


@pytest.fixture(scope="module")
def short(recipe: Path) -> Path:
    """Two steps, finished."""
    return begin(recipe, recipe.parent / "short", "evaluation.every=2")


@pytest.fixture
def ended(short: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short, tmp_path / "run"))


def train(run: Path, *overrides: str) -> int:
    return main(["train", "--resume", str(run), "--progress", "plain", *overrides])


def labels(run: Path) -> list[tuple[str, int]]:
    return [(one["label"], one["step"]) for one in RunDirectory(run).finished_evaluations()]


def content(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()
    }


def of_the_run(run: Path) -> str:
    return OF_THE_MACHINE.sub("", (run / "metrics.jsonl").read_text())


@pytest.mark.parametrize("every", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_longer_run_has_the_bits_of_one_that_was_as_long_from_the_start(
    every: int, recipe: Path, tmp_path: Path
) -> None:
    whole = begin(recipe, tmp_path / "whole", f"evaluation.every={every}", "train.num_steps=4")
    run = begin(recipe, tmp_path / "run", f"evaluation.every={every}")
    assert labels(run) == [("before training", 0), ("after RAPO", 2)]
    assert train(run, "train.num_steps=4") == 0
    last = Path("checkpoints") / "step-000004"
    for name in ("masters.safetensors", "optimizer.safetensors"):
        assert (run / last / name).read_bytes() == (whole / last / name).read_bytes(), name
    longer, traces = (TraceReader(each / "traces") for each in (run, whole))
    assert longer.steps() == traces.steps() == (1, 2, 3, 4)
    for step in traces.steps():  # rows: the files contain the seconds of calls too
        assert longer.read(step) == traces.read(step), step
    assert labels(run) == [("before training", 0), ("step 2", 2), ("after RAPO", 4)]
    assert (run / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    mine, theirs = (
        [json.loads(line) for line in (one / "evaluations.jsonl").read_text().splitlines()]
        for one in (run, whole)
    )
    if every:  # the evaluation of the shorter run's end is then one that the longer run makes too
        assert mine == theirs and of_the_run(run) == of_the_run(whole)
        assert (run / last / "state.json").read_bytes() == (whole / last / "state.json").read_bytes()
    else:
        assert [mine[0], mine[2]] == theirs


def test_a_run_that_its_budget_ended_is_extended(recipe: Path, tmp_path: Path) -> None:
    """The evaluation at its end is that of the step, not a second one."""
    whole = begin(recipe, tmp_path / "whole", "evaluation.every=1", "train.num_steps=3")
    budget = int(records(whole)[0]["tokens/policy_total"])
    options = ("evaluation.every=1", f"train.max_policy_tokens={budget}", "train.num_steps=3")
    run = begin(recipe, tmp_path / "run", *options)
    assert labels(run) == [("before training", 0), ("after RAPO", 1)]
    assert train(run, "train.max_policy_tokens=none") == 0
    assert labels(run) == labels(whole)
    assert labels(whole)[1:] == [("step 1", 1), ("step 2", 2), ("after RAPO", 3)]
    assert of_the_run(run) == of_the_run(whole)


@pytest.mark.long
def test_an_extended_run_that_is_killed_continues_with_its_new_length(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(self: trainer.Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "_train_step", killed)
        assert train(ended, "train.num_steps=3") == 130
    assert labels(ended) == [("before training", 0), ("step 2", 2)]
    capsys.readouterr()
    resume(ended, progress="plain")
    said = capsys.readouterr().out
    assert (
        "DAMAGED" not in said
        and "train.num_steps is 3, was 2; the run continues and reproduces the same bits" in said
    )
    assert labels(ended) == [("before training", 0), ("step 2", 2), ("after RAPO", 3)]
    assert "num_steps = 3" in (ended / "config.toml").read_text()
    assert train(ended, "train.num_steps=3") == 0  # what it has already: the same command does no harm
    assert "this run is finished: 3 of 3 steps" in capsys.readouterr().out


def test_an_extension_that_is_killed_in_its_second_step_keeps_the_evaluation_of_the_shorter_run(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, record = ended / "config.toml", trainer.Trainer._record
    file.write_text(file.read_text().replace("checkpoint_every = 1", "checkpoint_every = 5"))

    def killed(self: trainer.Trainer, *arguments: Any) -> None:
        record(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "_record", killed)
    for _ in range(2):  # the second one cuts the records of step 3
        assert train(ended, "train.num_steps=6", "evaluation.every=0") == 130
        assert labels(ended) == [("before training", 0), ("step 2", 2)]
        assert [one["step"] for one in records(ended)] == [1, 2, 3]
        assert [one["step"] for one in records(ended, "eval")] == [0, 2]


def test_a_refused_resume_does_not_change_the_length(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = whole_content(ended)
    monkeypatch.setattr("outrider.training.resume.hash_tasks", lambda tasks: "of other data")
    assert train(ended, "train.num_steps=5") == 1
    assert "tasks are not those that this run began with" in capsys.readouterr().err
    monkeypatch.undo()
    for read, name in ((training_tasks, "train"), (read_eval_tasks, "held-out")):

        def with_column(*given: Any, read: Any = read) -> list[Any]:
            return [replace(task, metadata={"level": 1}) for task in read(*given)]

        monkeypatch.setattr(f"outrider.training.setup.{read.__name__}", with_column)
        assert train(ended, "train.num_steps=5") == 1  # the same version: the data has changed
        assert f"the {name} tasks are not those" in capsys.readouterr().err
        with monkeypatch.context() as patch:  # until 0.3.7, tasks of agent programs had no columns
            patch.setattr("outrider.__version__", "0.9")
            assert train(ended, "train.num_steps=5") == 1
        assert f"whose {name} tasks lack the further columns of the data" in capsys.readouterr().err
        monkeypatch.undo()
    assert whole_content(ended) == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("optimizer.learning_rate=1",),
            "optimizer.learning_rate cannot change in a resumed run: it decides the results",
        ),
        (("train.num_steps=3", "seed=4"), "seed cannot change"),
        (
            ("num_threads=2",),
            "num_threads cannot change in a resumed run: it changes how numbers are rounded",
        ),
        (("train.max_retries=5",), "it may be changed in config.toml. These may: train.num_steps"),
        (("train.num_steps=1",), "train.num_steps may only grow: it is 2, 1 would end the run earlier"),
        (
            ("train.max_policy_tokens=9",),
            "train.max_policy_tokens may only grow: it is without an end, 9 would",
        ),
        (("train.num_stepz=3",), "unknown key"),
    ],
)
def test_all_else_is_refused_with_its_reason_and_changes_nothing(
    overrides: tuple[str, ...], says: str, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(ended)
    assert train(ended, *overrides) == 2
    output = capsys.readouterr().err
    assert says in output and output.count("\n") == 1 and content(ended) == before


def test_a_schedule_that_ends_with_the_run_and_a_run_without_training_do_not_grow(
    recipe: Path, tmp_path: Path
) -> None:
    schedule = ["algorithm.retrieval.schedule=linear", "algorithm.retrieval.final_probability=0.1"]
    for number, (made, says) in enumerate(
        [(schedule, "final_probability at the last step"), (["train.num_steps=0"], "from 0")]
    ):
        settings = load_settings(RunSettings, file=recipe, overrides=made)
        run, _ = RunDirectory.create(tmp_path / str(number), settings), None
        run.release()
        with pytest.raises(ConfigError, match=says):
            extend_settings(run.path / "config.toml", ["train.num_steps=50"])


def test_a_dry_run_prints_what_it_would_be_and_writes_nothing(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(ended)
    assert train(ended, "train.num_steps=7", "--dry-run") == 0
    assert "num_steps = 7" in capsys.readouterr().out and content(ended) == before


def test_a_set_up_that_fails_leaves_the_length_as_it_was(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConfigError("no such tool")

    before = content(ended)
    monkeypatch.setattr("outrider.training.setup.build", broken)
    assert train(ended, "train.num_steps=3") == 2
    assert "no such tool" in capsys.readouterr().err and content(ended) == before


def test_the_settings_that_may_grow_are_in_the_documents_with_their_reasons() -> None:
    page = (Path(__file__).parents[2] / "docs" / "resuming.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert rows == dict(MAY_CHANGE)
