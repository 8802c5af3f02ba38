"""Commands with a user's questions and tools: data that --dry-run reads, prompts as the policy sees them,
evaluations on training tasks, resuming from another folder, evaluations of a run, and notebooks.
"""

import inspect
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import outrider
from outrider import api
from outrider.cli import main
from outrider.environments.base import EnvironmentSettings
from outrider.environments.tool_qa.environment import ToolsConfig, system_prompt
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.evaluation.packs import copy_checkpoints
from outrider.training.data import kind_of_tasks, repetition_lines, shared_tasks
from outrider.training.export import export_run
from outrider.types import Task
from outrider.viewer.answers import Catalogue
from outrider.viewer.run_reader import read_alarms
from tests.tiny import save_tiny_model

DATA = Path(__file__).parent / "first_week"
RECIPE = """
seed = 1
num_threads = 1
[model]
name = "model"
precision = "float32"
[environment]
type = "tools"
tools = ["first_week_tools:multiply"]
protocol = "hermes"
prompt = "short"
max_calls = 2
train = { path = "train.jsonl" }
test = { path = "test.jsonl" }
reward = { answer = "em", require_think = false, require_boxed = false }
[algorithm]
type = "grpo"
group_size = 2
[rollout]
max_turns = 1
max_turn_tokens = 3
max_response_tokens = 8
[train]
num_steps = 2
tasks_per_step = 2
checkpoint_every = 1
[evaluation]
num_tasks = 2
at_start = false
"""
TOOLS = '''
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: one number
        b: another number
    """
    return a * b
'''


def lines(*questions: str, answer: str = "a") -> str:
    return "".join(json.dumps({"question": one, "answer": answer}) + "\n" for one in questions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=2048)


@pytest.fixture
def recipe(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe with all that it names beside it; another folder is the current one."""
    folder, here = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    here.mkdir()
    (folder / "model").symlink_to(model)
    (folder / "first_week_tools.py").write_text(TOOLS)
    (folder / "train.jsonl").write_text(lines("One?", "Two?", "Three?", "Four?"))
    (folder / "test.jsonl").write_text(lines("Five?", "Six?"))
    (folder / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(here)
    sys.modules.pop("first_week_tools", None)  # that of another test's folder
    yield folder / "recipe.toml"
    sys.modules.pop("first_week_tools", None)


def dry(recipe: Path, *overrides: str) -> int:
    return main(["train", str(recipe), "--dry-run", *overrides])


def test_dry_run_describes_the_data_and_prints_a_valid_recipe(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(recipe) == 0
    shown = capsys.readouterr().out
    for reason in (
        "# tasks: 4 to train on, all with answers",
        "# tasks: 2 to evaluate on (split test), all with answers",
        "# tools: multiply", f"# model: {recipe.parent / 'model'}", '"description": "Multiply two numbers."',
        "# | Five?",
    ):  # fmt: skip
        assert reason in shown
    *_, step, run = shown.splitlines()
    tokens = "at most 32 response tokens (8 each)"
    assert step == f"# a step: 2 groups of 2 rollouts (4), {tokens}, 1 update of the weights"
    assert run == "# the run: 2 steps; a checkpoint after every step"
    again = recipe.with_name("shown.toml")
    again.write_text(shown)
    assert api.run_settings(again) == api.run_settings(recipe)


def test_dry_run_describes_the_cold_start_and_names_the_trackers(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 1, "b": 2}}</tool_call>'
    (recipe.parent / "demonstrations.jsonl").write_text(
        json.dumps({"question": "One?", "reward": 1, "messages": [{"role": "assistant", "content": call}]})
    )
    cold_start = ["cold_start.num_examples=3", "cold_start.batch_size=2"]
    demonstrations = "cold_start.demonstrations=demonstrations.jsonl"
    assert dry(recipe, *cold_start, demonstrations, 'trackers=["wandb"]', "update.num_epochs=2") == 0
    shown = capsys.readouterr().out
    assert "# trackers: wandb" in shown
    assert "# cold_start.demonstrations: 1 of 4 training tasks have one" in shown
    assert "# cold start: up to 3 demonstrations, 2 updates" in shown and "2 updates of the weights" in shown
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert dry(recipe, 'trackers=["wandb"]') == 2
    assert "pip install 'outrider[wandb]'" in capsys.readouterr().err


def test_dry_run_reads_the_demonstrations_of_the_algorithm(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "demonstrations.jsonl").write_text('{"question": "One?", "message": [], "reward": 1}\n')
    luffy = 'algorithm={type="luffy",group_size=2,demonstrations="demonstrations.jsonl"}'
    assert dry(recipe, luffy) == 2
    assert "demonstrations.jsonl:1: no column 'messages'" in capsys.readouterr().err


BROKEN = {
    "missing": (None, "environment.train.path: train.jsonl: no such file or folder"),
    "empty": (b"", "train.jsonl: the data set is empty"),
    "answerless": (b'{"question": "q?"}\n', "train.jsonl:1: no column 'answer'; the row has question"),
    "utf16": (lines("q?").encode("utf-16"), "train.jsonl:1: malformed JSON: UTF-16 text; save"),
    "latin1": (b'{"question": "caf\xe9", "answer": "a"}\n', "not UTF-8 text (byte 0xe9 at position 17)"),
    "array": (b'[{"question": "q?"}]\n', "train.jsonl:1: malformed JSON: expected an object, got list"),
    "not json": (lines("q?").encode() + b"{'question': 'x'}\n", "train.jsonl:2: malformed JSON"),
    "nan": (b'{"question": "q?", "answer": NaN}\n', "train.jsonl:1: column 'answer' contains a blank answer"),
    "null": (b'{"question": "q?", "answer": null}\n', "train.jsonl:1: column 'answer' must contain text"),
    "bool": (b'{"question": "q?", "answer": true}\n', "train.jsonl:1: column 'answer' must contain text"),
    "dict": (b'{"question": "q?", "answer": {"x": 1}}\n', "train.jsonl:1: column 'answer' must contain text"),
    "list of none": (b'{"question": "q?", "answer": []}\n', "column 'answer' contains no answer"),
    "messages": (b'{"question": [{"role": "user"}], "answer": "a"}\n', "column 'question' must hold a"),
    "number": (b'{"question": 3, "answer": "a"}\n', "train.jsonl:1: column 'question' must hold a string"),
    "key twice": (b'{"question": "q?", "answer": "a", "answer": "b"}\n', "the key 'answer' occurs more than"),
    "few": (lines("q?").encode(), "1 training task is fewer than train.tasks_per_step = 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_dry_run_refuses_data_in_one_line(
    name: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, reason = BROKEN[name]
    (recipe.parent / "train.jsonl").unlink()
    if content is not None:
        (recipe.parent / "train.jsonl").write_bytes(content)
    assert dry(recipe) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert reason in line and line.startswith("outrider: ")


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + lines("q?", "r?").encode(), lines("q?", "r?").replace("\n", "\r\n").encode(),
        lines("q?", "r?").rstrip().encode(), lines("q?", "r?").replace("\n", "\n\n").encode(),
        b'{"question": "q?", "answer": 12345678901234567890}\n{"question": "r?", "answer": 4.5}\n',
    ],
    ids=["bom", "crlf", "no last line end", "blank lines", "numbers"],
)  # fmt: skip
def test_dry_run_accepts_usual_files(content: bytes, recipe: Path) -> None:
    (recipe.parent / "train.jsonl").write_bytes(content)
    assert dry(recipe) == 0


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trackers=['wandb']"], "tracker 'wandb' needs an extra: pip install 'outrider[wandb]'"),
        (["model.name=empty"], "/empty': the folder has no config.json"),
        (["model.name=smolm2-135m-instruct"], "did you mean smollm2-135m-instruct?"),
        (["evaluation.split=valid"], "no data set is configured for the split 'valid'"),
        (["environment.tools=['search']", "environment.corpus=none.jsonl"], "environment.corpus: none.jsonl"),
        (["environment.tools=['first_week_tools:divide']"], "has no 'divide'"),
        (["cold_start.num_examples=2"], "cold_start.demonstrations"),
        (["model.device=gpu"], "model.device = 'gpu' cannot be used: the device is not known; "),
        (["model.device=cuda1"], "model.device = 'cuda1' cannot be used"),
    ],
)
def test_dry_run_refuses_what_a_run_would_miss(
    overrides: list[str],
    reason: str,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from outrider.viewer import trackers

    Path("empty").mkdir()
    monkeypatch.setattr(trackers, "PACKAGES", {"wandb": "no_such_package"})
    assert dry(recipe, *overrides) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert reason in line


def test_an_environment_that_breaks_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "first_week_broken.py").write_text(
        "from tests.plugins.test_api import Own\n"
        "class Broken(Own):\n    def reset(self, task, seed):\n        return 1 / 0\n"
    )
    own = '{type="first_week_broken:Broken"}'
    assert dry(recipe, f"environment={own}") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot start task 'own/test/0'" in line and "ZeroDivisionError" in line


def test_the_command_prompt_prints_messages_text_and_ids(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prompt", str(recipe), "--split", "train", "--task", "1", "--ids"]) == 0
    shown = capsys.readouterr().out
    assert "task train-1 (split train, 4 tasks)" in shown and "[user] Two?" in shown
    assert '"description": "one number"' in shown and "<|im_start|>user\nTwo?<|im_end|>" in shown
    num = int(shown.split(" renders it: ")[1].split()[0])
    assert len(shown.splitlines()[-1].split()) == num
    assert main(["prompt", str(recipe), "--task", "9"]) == 2
    assert "has 2 tasks, counted from 0" in capsys.readouterr().err
    assert main(["prompt", str(recipe), "--task", "test-00"]) == 2
    assert "did you mean test-0?" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["short", "full"])
@pytest.mark.parametrize("protocol", ["tags", "hermes"])
def test_prompts_describe_arguments_and_ask_for_a_box_only_where_one_is_needed(
    prompt: Any, protocol: str, recipe: Path
) -> None:
    for boxed in (True, False):
        reward = {"require_boxed": boxed}
        settings = api.run_settings(
            recipe,
            overrides=[f"environment.prompt={prompt}", f"environment.protocol={protocol}"],
            sections=None,
        ).environment
        assert isinstance(settings, ToolsConfig)
        plain = settings.model_dump() | {"reward": settings.reward.model_dump() | reward}
        text = system_prompt(ToolsConfig.model_validate(plain))
        assert ("boxed" in text) == boxed
        assert "with ..." not in text and "as ..." not in text
        assert protocol != "tags" or ("a (number): one number" in text and '{"a": ' in text)


def test_questions_are_compared_after_normalisation() -> None:
    def task(question: str, *answers: str, key: str = "k") -> Task:
        return Task(key=key, question=question, answers=answers)

    train = [task("How  many?", "1"), task("Which one?", "2")]
    assert len(shared_tasks(train, [task("how many", "9"), task("Which two?", "2")])) == 1
    # the same question with the same answer in a file with other columns
    row = Task(key="1", question="Which one?", answers=("2", "two"), metadata={"split": "test"})
    assert len(shared_tasks(train, [row])) == 1
    assert len(shared_tasks(train, [replace(row, answers=("3",))])) == 0
    # of a simulator what is said first may be the same for many tasks
    assert len(shared_tasks([task("Look.", key="a")], [task("Look.", key="b")])) == 0
    assert len(shared_tasks([task("Look.", key="a")], [task("Look.", key="a")])) == 1
    assert [kind_of_tasks(4, num) for num in (0, 1, 4)] == [
        "held-out tasks", "tasks, 1 of them training tasks", "training tasks",
    ]  # fmt: skip
    assert repetition_lines([task("q?", "a"), task("Q", "A "), task("r?", "a")], "train") == [
        "train: 1 question occurs more than once (2 of 3 tasks), for example 'q?'"
    ]
    assert repetition_lines([task("q?", "a"), task("q?", "b")], "test") == [
        "test: 1 question occurs with different answers, for example 'q?' with 'a' and 'b'"
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Path]:
    """A run whose test questions are its training questions, begun from a folder of its own."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "model").symlink_to(model)
    (folder / "first_week_tools.py").write_text(TOOLS)
    (folder / "train.jsonl").write_text(lines("One?", "Two?", "Three?", "Four?"))
    (folder / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        overrides = ["environment.test.path=train.jsonl", "train.num_steps=1", "evaluation.num_samples=1"]
        outrider.train("recipe.toml", run="runs/one", overrides=overrides)
    yield folder / "runs/one"
    sys.modules.pop("first_week_tools", None)


def test_training_tasks_are_not_called_held_out(done: Path) -> None:
    [line] = [json.loads(line) for line in (done / "evaluations.jsonl").read_text().splitlines()]
    assert line["num_training_tasks"] == 2
    notes = (done / "notes.jsonl").read_text()
    assert "EVALUATION ON TRAINING TASKS: all 2 evaluation tasks (split test) are training tasks" in notes
    assert "on 2 training tasks, 0 faults" in notes and "held-out" not in notes
    report = (done / "report.html").read_text()
    assert "Played on training tasks without" in report and "held-out" not in report


def test_the_recorded_prompt_is_what_the_policy_saw(done: Path) -> None:
    run = outrider.load_run(done)
    for table in (run.traces(1), run.evaluation_traces(0)):
        prompts = [row for row in table.to_pylist() if row["origin"] == "prompt"]
        assert prompts
        for row in prompts:
            assert '"description": "one number"' in row["text"] and "<|im_start|>system" in row["text"]
            assert json.loads(row["metadata"])["described_tools"] == ["multiply"]
    assert "one number" in (done / "report.html").read_text()


def test_a_run_resumes_from_another_folder_and_more_steps_are_no_alarm(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = done.with_name("two")
    shutil.copytree(done, run)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", str(run), "train.num_steps=2", "--progress", "none"]) == 0
    resumed = outrider.load_run(run)
    assert resumed.metrics("train").num_rows == 2
    assert "OTHER SETTINGS: train.num_steps" in (run / "notes.jsonl").read_text()
    assert not any("train.num_steps" in one["text"] for one in read_alarms(run))
    rollouts = resumed.rollouts()
    assert sorted(set(rollouts.column("step").to_pylist())) == [1, 2]
    assert rollouts.num_rows == resumed.rollouts(1).num_rows + resumed.rollouts(2).num_rows
    shown = repr(resumed)
    assert "grpo on tools, 2 of 2 steps" in shown and str(run) in shown and "training tasks" in shown


def test_an_evaluation_has_the_step_of_its_checkpoint(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done.parent)
    run = outrider.evaluate(
        done / "config.toml", run=tmp_path / "eval", checkpoint="one/checkpoints/step-000001"
    )
    found = run.evaluations().to_pylist()
    assert [(one["step"], one["label"]) for one in found] == [(1, "of one/checkpoints/step-000001")]


def test_an_evaluation_names_its_weights_instead_of_a_copy(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "copy" / "checkpoints" / "step-000001"
    shutil.copytree(done, tmp_path / "copy")
    run = tmp_path / "eval"
    evaluate = ["eval", str(done / "config.toml"), "--progress", "plain"]
    assert main([*evaluate, "--run", str(run), "--checkpoint", str(weights)]) == 0
    assert not list(run.rglob("*.safetensors"))
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 0
    assert "this run is finished" in capsys.readouterr().out
    # everything that reads weights follows the path
    again = tmp_path / "again"
    checkpoint = run / "checkpoints" / "step-000000"
    assert main([*evaluate, "--run", str(again), "--checkpoint", str(checkpoint)]) == 0
    exported = []
    for source in (again, tmp_path / "copy"):
        export_run(source, source / "exported")
        exported.append((source / "exported" / "model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    copy_checkpoints(tmp_path / "pack", {"eval": run})
    [packed] = (tmp_path / "pack").rglob("*.safetensors")
    assert packed.read_bytes() == (weights / "masters.safetensors").read_bytes()
    # weights that are gone or have changed
    masters = weights / "masters.safetensors"
    masters.write_bytes(masters.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="which have changed since"):
        export_run(run, tmp_path / "changed")
    masters.unlink()
    with pytest.raises(CheckpointError, match="put them back"):
        export_run(run, tmp_path / "gone")


def test_an_evaluation_of_a_model_has_no_copy_of_it(done: Path, tmp_path: Path) -> None:
    run = outrider.evaluate(done / "config.toml", run=tmp_path / "eval")
    assert not list(run.path.rglob("*.safetensors"))
    export_run(run.path, tmp_path / "exported")
    export_run(done, tmp_path / "start", checkpoint=done / "checkpoints" / "step-000000")
    exported, start = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("exported", "start"))
    assert exported == start


@pytest.mark.long
def test_an_evaluation_with_tools_plays_as_the_run(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text(lines("Seven?", "Eight?"))
    common = ["eval", "--tasks", str(tmp_path / "q.jsonl"), "--model", str(done), "--progress", "plain"]
    assert main([*common, "--tools", "on", "--run", str(tmp_path / "on")]) == 0
    shown = capsys.readouterr().out
    assert "IN TRAINING" not in shown
    settings = (tmp_path / "on/evaluation.toml").read_text()
    for reason in ('protocol = "hermes"', 'prompt = "short"', "max_calls = 2", "max_turn_tokens = 3"):
        assert reason in settings
    other = [*common, "--tools", "on", "--run", str(tmp_path / "other"), "environment.max_calls=1"]
    assert main(other) == 0
    assert "OTHER SETTINGS THAN IN TRAINING: environment.max_calls = 1 (run: 2)" in capsys.readouterr().out
    assert main([*common, "--run", str(tmp_path / "off"), "rollout.max_turn_tokens=3"]) in (0, 1)
    shown = capsys.readouterr().out
    assert "OTHER PROMPT THAN IN TRAINING" in shown and "set tools = on (--tools on)" in " ".join(
        shown.split()
    )
    for refused in (outrider.load_run, lambda run: Catalogue([run])):
        with pytest.raises(DataError, match="is an evaluation of eval --tasks, no run"):
            refused(tmp_path / "on")
    for command in (["report"], ["watch", "--once"], ["view"]):
        assert main([*command, str(tmp_path / "on")]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert "is an evaluation of eval --tasks, no run" in line
    assert not (tmp_path / "on/report.html").exists()


def test_an_interrupted_program_keeps_finished_steps(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal comes while the second step's rollouts are played."""
    from outrider.training import trainer

    played: list[int] = []
    credit = trainer.assign_step_advantages

    def interrupted(*given: Any, **named: Any) -> Any:
        played.append(1)
        if len(played) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return credit(*given, **named)

    monkeypatch.setattr(trainer, "assign_step_advantages", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"continue with outrider\.train\(resume="):
        outrider.train(recipe, run=tmp_path / "run", overrides=["train.num_steps=4"])
    run = outrider.load_run(tmp_path / "run")
    assert 1 <= run.metrics("train").num_rows < 4 and run.checkpoints
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "stopping" in capfd.readouterr().err
    monkeypatch.undo()
    assert outrider.train(resume=tmp_path / "run").metrics("train").num_rows == 4


def test_signatures_are_real() -> None:
    for function in (outrider.train, outrider.evaluate):
        names = list(inspect.signature(function).parameters)
        assert names[0] == "recipe"
        assert {"run", "overrides", "progress", "environment", "algorithm", "engine"} <= set(names)
    assert "progress" in (inspect.getdoc(outrider.train) or "")


@pytest.mark.parametrize(("shell", "progress"), [("ZMQInteractiveShell", "plain"), ("TerminalShell", "none")])
def test_notebooks_show_progress(shell: str, progress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = type(shell, (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))  # type: ignore[arg-type]
    assert api._default_progress() == progress
    monkeypatch.delitem(sys.modules, "IPython")
    assert api._default_progress() == "none"


class NoEnvironment:
    Settings = EnvironmentSettings


class Silent:
    """A tracker without an identity."""

    @classmethod
    def build(cls, settings: object, context: object) -> "Silent":
        return cls()

    def log(self, step: int, metrics: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("environment", "an environment"), ("algorithm", "an algorithm"), ("engine", "an engine")],
)
def test_an_object_of_another_kind_is_one_line(kind: str, reason: str, recipe: Path, tmp_path: Path) -> None:
    for wrong in (object(), [1], lambda: None):
        with pytest.raises(ConfigError, match=f"is not {reason}: it has no method"):
            outrider.train(recipe, run=tmp_path / "run", **{kind: wrong})
    with pytest.raises(ConfigError, match="is a class: give an object of it"):
        outrider.train(recipe, run=tmp_path / "run", **{kind: NoEnvironment})


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("environment={type='tests.training.test_first_week:NoEnvironment'}", "is not an environment"),
        ("algorithm={type='tests.training.test_first_week:Silent'}", "is not an algorithm"),
        ("engine={type='tests.training.test_first_week:Silent'}", "is not an engine"),
        (
            "trackers=['tests.training.test_first_week:NoEnvironment']",
            "is not a tracker: it has no method log",
        ),
        ("buffer.embedder='tests.training.test_first_week:NoEnvironment'", "is not an embedder"),
        ("environment.protocol='tests.training.test_first_week:NoEnvironment'", "is not a call format"),
        ("environment.tools=['tests.training.test_first_week:NoEnvironment']", "is not a tool"),
        ("environment.tools=['tests.training.test_first_week:DATA']", "is no class and no function"),
    ],
)
def test_a_class_of_another_kind_is_one_line(
    override: str, reason: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(recipe, override) == 2
    [line] = capsys.readouterr().err.splitlines()
    key = override.partition("=")[0]
    assert reason in line and (f" {key}.type: " in line or f" {key}: " in line or f" {key}.0: " in line)


def test_a_tracker_needs_no_identity(recipe: Path, tmp_path: Path) -> None:
    own = "trackers=['tests.training.test_first_week:Silent']"
    run = outrider.train(recipe, run=tmp_path / "run", overrides=[own, "train.num_steps=1"])
    assert run.metrics("train").num_rows == 1
