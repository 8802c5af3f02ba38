"""A run goes on as the run that it was; what decides its results and is another one now is named
and refused.
"""

import json
import shutil
from pathlib import Path

import pytest

from outrider.config import load_settings, to_toml
from outrider.errors import CheckpointError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.run_dir import RunDirectory, check_settings, flat_settings
from outrider.training.settings import RunSettings
from tests.memory.builders import make_trajectory
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.tool_run import write_tool_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a run of them."""
    folder = tmp_path_factory.mktemp("made")
    begin(write_tool_run(folder / "data"), folder / "run")
    return folder


@pytest.fixture
def whole(made: Path, tmp_path: Path) -> Path:
    """A copy with data of its own; paths may change."""
    shutil.copytree(made, tmp_path / "moved")
    config = tmp_path / "moved" / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(made), str(tmp_path / "moved")))
    return config.parent


@pytest.fixture
def killed(whole: Path) -> Path:
    return interrupted(whole)


def edit(run: Path, *overrides: str) -> None:
    settings = load_settings(RunSettings, file=run / "config.toml", overrides=overrides)
    (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))


def content(run: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }


def test_data_that_moved_are_the_same(whole: Path, killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume(killed, progress="plain")
    assert "OTHER" not in capsys.readouterr().out
    assert_same(whole, killed)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.learning_rate=0.01", "optimizer.learning_rate is 0.01, was 0.0003"),
        ("seed=4", "seed is 4, was 3"),
        ("algorithm.retrieval.probability=0.25", "algorithm.retrieval.probability is 0.25, was "),
        ("model.lora={rank=2}", "model.lora.rank is 2, was None"),
        ("buffer.evolve=true", "buffer.evolve is True, was False"),
    ],
)
def test_settings_that_decide_the_results_are_refused_before_anything_is_written(
    override: str, told: str, killed: Path
) -> None:
    edit(killed, override)
    before = content(killed)
    with pytest.raises(CheckpointError, match=r"config\.toml is not what this run began with") as refused:
        resume(killed)
    assert told in str(refused.value) and "\n" not in str(refused.value)
    assert content(killed) == before


def test_another_algorithm_is_named_and_not_its_settings(killed: Path) -> None:
    text = (killed / "config.toml").read_text()
    start, end = text.index("[algorithm]"), text.index("[rollout]")
    (killed / "config.toml").write_text(f'{text[:start]}[algorithm]\ntype = "empo2"\n{text[end:]}')
    with pytest.raises(
        CheckpointError, match=r"began with: algorithm\.type is 'empo2', was 'rapo'; put it back"
    ):
        resume(killed)


def test_settings_that_may_change_are_told(
    whole: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(killed, "train.checkpoint_every=2", "evaluation.every=2", "train.max_concurrent=3", "num_threads=2")
    resume(killed, progress="plain")
    told = capsys.readouterr().out
    assert (
        "OTHER SETTINGS: evaluation.every is 2, was 0; the run goes on, to the same bits as far as it went"
        in told
    )
    assert "checkpoint_every" not in told  # no number depends on it
    assert (
        "num_threads is 2, was 1, train.max_concurrent is 3, was 8; the run goes on, "
        "but not to the same bits for sure"
    ) in told


def test_a_schedule_that_ends_with_the_run_has_its_length(whole: Path) -> None:
    overrides = ["algorithm.retrieval.schedule=linear", "algorithm.retrieval.final_probability=0.1"]
    settings = load_settings(RunSettings, file=whole / "config.toml", overrides=overrides)
    longer = load_settings(
        RunSettings, file=whole / "config.toml", overrides=[*overrides, "train.num_steps=9"]
    )
    with pytest.raises(CheckpointError, match=r"train\.num_steps is 9, was 2"):
        check_settings(flat_settings(settings), longer)


def test_settings_are_plain_and_a_key_of_another_version_is_not_compared(whole: Path) -> None:
    settings = load_settings(RunSettings, file=whole / "config.toml")
    flat = json.loads(json.dumps(flat_settings(settings)))
    assert check_settings(flat, settings) == [] and str(whole.parent) not in json.dumps(flat)
    del flat["update.max_tokens"]
    assert check_settings({**flat, "update.of_tomorrow": 1}, settings) == []


def change_template(data: Path) -> None:
    file = data / "model" / "chat_template.jinja"
    file.write_text(file.read_text() + "\n")


def change_corpus(data: Path) -> None:
    lines = (data / "corpus.jsonl").read_text()
    (data / "corpus.jsonl").write_text(lines.replace("lamp: hill", "lamp: lake"))


def change_tokenizer(data: Path) -> None:
    content = json.loads((data / "model" / "tokenizer.json").read_text())
    content["added_tokens"][-1]["rstrip"] = True
    (data / "model" / "tokenizer.json").write_text(json.dumps(content))


def change_configuration(data: Path) -> None:
    content = json.loads((data / "model" / "config.json").read_text())
    content["rms_norm_eps"] = 1e-3
    (data / "model" / "config.json").write_text(json.dumps(content))


def change_buffer(data: Path) -> None:
    """As many batches, other contents."""
    (data / "buffer.sqlite").unlink()
    with StepTraceBuffer(data / "buffer.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"new {i}", task=f"tasks-{i}", reward=2.0) for i in range(6)]
        )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (change_template, "chat template"),
        (change_corpus, "environment.corpus"),
        (change_tokenizer, "tokenizer"),
        (change_configuration, "model configuration"),
        (change_buffer, "step-trace buffer"),
    ],
)
def test_inputs_that_changed_are_refused(change: object, name: str, whole: Path, killed: Path) -> None:
    """They went on in silence, to other results."""
    kept = shutil.copytree(whole.parent / "data", whole.parent / "kept")
    before = content(killed)
    change(whole.parent / "data")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=f"not what this run began with: {name}; put"):
        resume(killed)
    assert content(killed) == before
    shutil.rmtree(whole.parent / "data")
    shutil.move(kept, whole.parent / "data")
    resume(killed)
    assert_same(whole, killed)


def test_weights_that_do_not_train_are_in_no_checkpoint_and_are_compared(made: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(made / "data", tmp_path / "data"))
    recipe = data / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(made / "data"), str(data)))
    run = begin(recipe, tmp_path / "run", "model.trained_layers=1")
    killed = interrupted(run)
    weights = data / "model" / "model.safetensors"
    before = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(before[:8], "little")
    changed = bytearray(before)
    changed[start + 2] ^= 1  # of the first tensor: the embeddings
    weights.write_bytes(changed)
    with pytest.raises(CheckpointError, match="not what this run began with: frozen weights; put"):
        resume(killed)
    weights.write_bytes(before)
    resume(killed)
    assert_same(run, killed)


@pytest.mark.parametrize("left", ["everything", "metrics.jsonl", "traces", "evaluations.jsonl"])
def test_a_run_without_its_checkpoints_does_not_start_over(left: str, whole: Path) -> None:
    """It did, in silence, and erased what was left of it."""
    shutil.rmtree(whole / "checkpoints")
    for name in {"metrics.jsonl", "traces", "evaluations.jsonl"} - {left}:
        if left != "everything":
            shutil.rmtree(whole / name) if name == "traces" else (whole / name).unlink()
    before = content(whole)
    with pytest.raises(CheckpointError, match="and no checkpoint: put its folder checkpoints back"):
        resume(whole)
    assert content(whole) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(whole: Path) -> None:
    again = Path(shutil.copytree(whole, whole.with_name("again")))
    shutil.rmtree(again / "checkpoints")
    first, *_ = (again / "evaluations.jsonl").read_text().splitlines()
    (again / "evaluations.jsonl").write_text(f"{first}\n")
    (again / "metrics.jsonl").write_text((again / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    for file in (again / "traces").glob("step-*"):
        file.unlink()
    resume(again)
    assert_same(whole, again)
    assert RunDirectory(again).finished_evaluations() == RunDirectory(whole).finished_evaluations()
