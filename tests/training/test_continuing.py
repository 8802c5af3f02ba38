"""What a run needs of its surroundings to continue to the same bits, and what it says where they have
changed. In process.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from outrider.cli import main
from outrider.config import load_settings
from outrider.engines.local.processor import Processor
from outrider.errors import CheckpointError, ConfigError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training import trainer
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from tests.memory.builders import make_trajectory
from tests.training.short_runs import assert_same, begin, interrupted, resume, rewrite_state
from tests.training.tool_run import write_tool_run

HYBRID = 'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("made") / "data").parent


@pytest.fixture
def recipe(made: Path, tmp_path: Path) -> Path:
    """A folder of its own for every test: they change data."""
    folder = shutil.copytree(made, tmp_path / "data")
    text = (folder / "recipe.toml").read_text().replace(str(made), str(folder))
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def begun(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the unchanged recipe, for tests that work in copies of it."""
    return begin(made / "recipe.toml", tmp_path_factory.mktemp("begun") / "run")


def test_a_shared_buffer_may_grow_meanwhile(recipe: Path, tmp_path: Path) -> None:
    run = begin(recipe, tmp_path / "run")
    killed = interrupted(run)
    with StepTraceBuffer(recipe.parent / "buffer.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"new {i}", task=f"tasks-{i}", reward=2.0) for i in range(6)], keep_best=1
        )
    resume(killed)
    assert_same(run, killed)


def test_a_stop_writes_what_is_finished_and_the_rest_has_the_same_bits(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = begin(recipe, tmp_path / "whole"), tmp_path / "stopped"
    requests: list[Callable[[], None]] = []

    def alarms_of_the_first_step(*_: object, **__: object) -> list[str]:
        requests[0]()
        return []

    given = [
        "evaluation.every=0",
        "train.num_steps=2",
        "evaluation.num_tasks=1",
        "train.checkpoint_every=100",
    ]
    settings = load_settings(RunSettings, file=recipe, overrides=given)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "step_alarms", alarms_of_the_first_step)
        run_training(
            (RunDirectory.create(stopped, settings), settings), progress="plain", on_start=requests.append
        )
    assert (
        "stopped on request after step 1 of 2, the checkpoint of step 1 is written" in capsys.readouterr().out
    )
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == ["step-000000", "step-000001"]
    resume(stopped)
    assert_same(whole, stopped)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param("other question", "train", marks=pytest.mark.slow),
        ("one more", "train"),
        ("test", "held-out"),
    ],
)
def test_tasks_that_changed_meanwhile_are_refused_before_anything_is_written(
    change: str, name: str, recipe: Path, tmp_path: Path
) -> None:
    folder = recipe.parent
    if change == "test":
        shutil.copy(folder / "tasks.jsonl", folder / "held-out.jsonl")
        text = recipe.read_text()
        recipe.write_text(
            text.replace(f'test = {{ path = "{folder}/tasks', f'test = {{ path = "{folder}/held-out')
        )
    killed = interrupted(begin(recipe, tmp_path / "run"))
    before = {
        path: path.read_bytes()
        for path in sorted(killed.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }
    tasks = folder / ("held-out.jsonl" if change == "test" else "tasks.jsonl")
    lines = tasks.read_text().splitlines()
    place = 0 if change == "test" else -1  # only the first one is played in evaluations
    changed = [*lines, lines[0]]
    if change != "one more":
        changed = list(lines)
        changed[place] = changed[place].replace("Where is", "Where was")
    tasks.write_text("".join(f"{line}\n" for line in changed))
    with pytest.raises(CheckpointError, match=f"the {name} tasks are not those that this run began with"):
        resume(killed)
    assert before == {path: path.read_bytes() for path in before}
    tasks.write_text("".join(f"{line}\n" for line in lines))
    resume(killed)


def test_the_reference_of_the_kl_term_comes_back(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace(HYBRID, 'type = "grpo"\ngroup_size = 4\nkl_weight = 0.5'))
    run = begin(
        recipe,
        tmp_path / "run",
        "update.num_mini_batches=2",
        "optimizer.warmup_steps=3",
        "algorithm.kl_estimator=k3",
    )
    killed = interrupted(run)
    first, last = (
        load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors") for step in (0, 2)
    )
    assert any((first[name] != last[name]).any() for name in first)
    resume(killed)
    assert_same(run, killed)
    shutil.rmtree(killed / "checkpoints" / "step-000002")
    content = bytearray((killed / "reference.safetensors").read_bytes())
    content[-1] ^= 1
    (killed / "reference.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not what was written"):
        resume(killed)


def test_a_checkpoint_that_does_not_know_tasks_or_reference_still_continues(
    begun: Path, tmp_path: Path
) -> None:
    """As earlier versions wrote them."""
    run = shutil.copytree(begun, tmp_path / "run")
    killed = interrupted(run)
    path = killed / "checkpoints" / "step-000001" / "state.json"
    state = json.loads(path.read_text())
    for name in ("tasks", "reference_checksum", "versions", "own_checksum"):
        del state[name]
    path.write_text(json.dumps(state))
    resume(killed)
    assert_same(run, killed)


def test_an_adaptation_is_no_training_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``train`` would pass over the trials in silence."""
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "evaluation.num_trials=2"]) == 2
    assert "evaluation.num_trials" in capsys.readouterr().err and not (tmp_path / "run").exists()
    settings = load_settings(RunSettings, file=recipe, overrides=["evaluation.num_trials=2"])
    RunDirectory.create(tmp_path / "adapted", settings).release()
    with pytest.raises(ConfigError, match="outrider eval --adapt"):
        resume(tmp_path / "adapted")
    assert (tmp_path / "adapted" / "config.toml").exists()


def test_other_versions_are_told(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bits are promised for the same packages only."""
    killed = interrupted(shutil.copytree(begun, tmp_path / "run"))
    with rewrite_state(killed / "checkpoints" / "step-000001") as state:
        state["versions"]["torch"] = "0.4.1"
    run_training(RunDirectory.open(killed), progress="plain", on_start=lambda stop: None)
    assert "OTHER VERSIONS: the checkpoint was written with torch 0.4.1 (now " in capsys.readouterr().out


def test_another_processor_is_told_and_the_same_one_is_not(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits are promised for the same processor only."""
    here = interrupted(shutil.copytree(begun, tmp_path / "run"))
    elsewhere = shutil.copytree(here, tmp_path / "elsewhere")
    run_training(RunDirectory.open(here), progress="plain", on_start=lambda stop: None)
    assert "OTHER" not in capsys.readouterr().out
    other = Processor(model="another", instruction_sets=frozenset({"avx1024"}))
    monkeypatch.setattr("outrider.training.resume.read_processor", lambda: other)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX2")
    run_training(RunDirectory.open(elsewhere), progress="plain", on_start=lambda stop: None)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("OTHER")]
    assert "OTHER PROCESSOR: the checkpoint was written with processor " in told and "(now another)" in told
    assert "(now avx1024)" in told and "NPY_DISABLE_CPU_FEATURES=AVX2)" in told


def test_a_dry_run_of_a_resumed_run_prints_its_settings_and_trains_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(RunSettings, file=recipe, overrides=["seed=41"])
    RunDirectory.create(tmp_path / "run", settings).release()
    assert main(["train", "--resume", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "seed = 41" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.toml", "lock"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("eval", "--run", "r", "--method", "reflexion"), "--method needs --adapt"),
        (
            ("buffer", "build", "--out", "b.sqlite", "--endpoint-model", "m"),
            "--endpoint-model needs --endpoint",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: tuple[str, ...], says: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, str(recipe)]) == 2
    assert says in capsys.readouterr().err
