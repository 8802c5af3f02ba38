"""A run continues as the run that it was: changed settings and inputs that decide its results are refused by
name, and other changes are reported.
"""

import json
import shutil
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings, to_toml
from outrider.engines.local.processor import Processor
from outrider.errors import CheckpointError, ConfigError
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.run_dir import (
    RunDirectory,
    check_settings,
    comparable_settings,
    recorded_settings,
)
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from tests.log_lines import messages
from tests.memory.builders import make_trajectory
from tests.training.short_runs import (
    assert_same,
    begin,
    content,
    interrupted,
    resume,
    rewrite_state,
    same_weights,
)
from tests.training.tool_run import write_tool_run
from tests.training.whole_runs import command, write_inputs

HYBRID = 'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with held-out tasks in a file of their own, and a run of them."""
    folder = tmp_path_factory.mktemp("made")
    recipe, data = write_tool_run(folder / "data"), folder / "data"
    shutil.copy(data / "tasks.jsonl", data / "held-out.jsonl")
    test = f'test = {{ path = "{data}/'
    recipe.write_text(recipe.read_text().replace(f"{test}tasks", f"{test}held-out"))
    begin(recipe, folder / "run")
    return folder


@pytest.fixture
def whole(made: Path, tmp_path: Path) -> Path:
    """A copy with data of its own; paths may change."""
    shutil.copytree(made, tmp_path / "moved")
    for file in ("run/config.toml", "data/recipe.toml"):
        path = tmp_path / "moved" / file
        path.write_text(path.read_text().replace(str(made), str(tmp_path / "moved")))
    return tmp_path / "moved" / "run"


@pytest.fixture
def killed(whole: Path) -> Path:
    return interrupted(whole)


@pytest.fixture
def data(whole: Path) -> Path:
    return whole.parent / "data"


def edit(run: Path, *overrides: str) -> None:
    settings = load_settings(RunSettings, file=run / "config.toml", overrides=overrides)
    (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))


def test_moved_data_are_the_same_and_a_finished_run_changes_nothing(
    whole: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(killed, progress="plain")
    assert "OTHER" not in capsys.readouterr().out
    assert_same(whole, killed)
    before = content(killed)
    resume(killed, progress="plain")
    assert "this run is finished: 2 of 2 steps" in capsys.readouterr().out
    assert content(killed) == before | {"notes.jsonl": content(killed)["notes.jsonl"]}


def test_settings_that_decide_the_results_are_refused_before_anything_is_written(killed: Path) -> None:
    config = killed / "config.toml"
    text = config.read_text()
    start, end = text.index("[algorithm]"), text.index("[rollout]")
    refused = {
        "optimizer.learning_rate=0.01": "optimizer.learning_rate is 0.01, was 0.0003",
        "seed=4": "seed is 4, was 3",
        "algorithm.retrieval.probability=0.25": "algorithm.retrieval.probability is 0.25, was ",
        "model.lora={rank=2}": "model.lora.rank is 2, was None",
        "buffer.evolve=true": "buffer.evolve is True, was False",
        # another algorithm is named, and not its settings
        f'{text[:start]}[algorithm]\ntype = "empo2"\n{text[end:]}': "algorithm.type is 'empo2', was 'rapo'; ",
    }
    for change, reason in refused.items():
        config.write_text(text)
        if "\n" in change:
            config.write_text(change)
        else:
            edit(killed, change)
        before = content(killed)
        with pytest.raises(CheckpointError, match=r"config\.toml is not what this run began with") as error:
            resume(killed)
        assert reason in str(error.value) and "\n" not in str(error.value)
        assert content(killed) == before


def test_changes_that_are_allowed_are_reported(
    killed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some settings; and packages, processor and variables, for which the same bits are not promised."""
    edit(killed, "train.checkpoint_every=2", "evaluation.every=2", "train.max_concurrent=3", "num_threads=2")
    with rewrite_state(killed / "checkpoints" / "step-000001") as state:
        state["versions"]["torch"] = "0.4.1"
    other = Processor(model="another", instruction_sets=frozenset({"avx1024"}))
    monkeypatch.setattr("outrider.training.resume.read_processor", lambda: other)
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX2")
    resume(killed, progress="plain")
    output = capsys.readouterr().out
    same = (
        "OTHER SETTINGS: evaluation.every is 2, was 0; the run continues and reproduces the same bits "
        "as far as it went"
    )
    assert same in output and "checkpoint_every" not in output  # no number depends on it
    assert (
        "num_threads is 2, was 1, train.max_concurrent is 3, was 8; the run continues, "
        "but may not reproduce the same bits"
    ) in output
    assert "OTHER VERSIONS: the checkpoint was written with torch 0.4.1 (now " in output
    [line] = [line for line in messages(output) if line.startswith("OTHER PROCESSOR")]
    assert "the checkpoint was written with processor " in line and "(now another)" in line
    assert "(now avx1024)" in line and "NPY_DISABLE_CPU_FEATURES=AVX2)" in line


def test_evaluations_report_other_versions_than_those_of_the_weights(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, checkpoint = whole.parent / "data", whole / "checkpoints" / "step-000002"
    with rewrite_state(checkpoint) as state:
        state["versions"]["torch"] = "0.4.1"
    tasks = [
        "--tasks",
        f"hotpotqa={data / 'tasks.jsonl'}",
        "--model",
        str(whole),
        "rollout.max_turn_tokens=2",
    ]
    recipe = [str(data / "recipe.toml"), "--checkpoint", str(checkpoint), "evaluation.num_tasks=1"]
    for name, arguments in (("tasks", tasks), ("recipe", recipe)):
        run = str(whole.parent / name)
        assert main(["eval", *arguments, "num_threads=1", "--run", run, "--progress", "plain"]) == 0
        output = capsys.readouterr().out
        assert "OTHER VERSIONS: the checkpoint was written with torch 0.4.1 (now " in output
        assert "the scores may differ" in output and "the run continues" not in output


def test_recorded_settings_are_plain_and_a_key_of_another_version_is_not_compared(whole: Path) -> None:
    settings = load_settings(RunSettings, file=whole / "config.toml")
    flat = json.loads(json.dumps(comparable_settings(settings)))
    assert check_settings(flat, settings) == [] and str(whole.parent) not in json.dumps(flat)
    del flat["update.max_tokens"]
    assert check_settings({**flat, "update.of_tomorrow": 1}, settings) == []
    # a key of a table of the user's, added or removed; records of before do not have the empty table
    one, two, none = (
        load_settings(RunSettings, file=whole / "config.toml", overrides=[f"model.template_kwargs={table}"])
        for table in ("{other=1}", "{other=1,terse=true}", "{}")
    )
    for before, after in ((one, two), (two, one), (none, one), (one, none)):
        with pytest.raises(CheckpointError, match=r"model\.template_kwargs\."):
            check_settings(comparable_settings(before), after)
    old = {key: value for key, value in comparable_settings(one).items() if value != {}}
    assert check_settings(old, one) == []
    # a schedule that ends with the run depends on its length
    linear = ["algorithm.retrieval.schedule=linear", "algorithm.retrieval.final_probability=0.1"]
    short, longer = (
        load_settings(RunSettings, file=whole / "config.toml", overrides=[*linear, *more])
        for more in ([], ["train.num_steps=9"])
    )
    with pytest.raises(CheckpointError, match=r"train\.num_steps is 9, was 2"):
        check_settings(comparable_settings(short), longer)


def change_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_inputs_that_changed_are_refused_before_anything_is_written(
    whole: Path, killed: Path, data: Path
) -> None:
    """They went on in silence, to other results."""
    kept = shutil.copytree(data, data.with_name("kept"))
    before = content(killed)

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            resume(killed)
        assert content(killed) == before
        shutil.rmtree(data)
        shutil.copytree(kept, data)

    change_text(data / "tasks.jsonl", "Where is", "Where was")
    refused("the train tasks are not those that this run began with")
    lines = (data / "tasks.jsonl").read_text().splitlines()
    (data / "tasks.jsonl").write_text("".join(f"{line}\n" for line in [*lines, lines[0]]))
    refused("the train tasks are not those that this run began with")
    change_text(data / "held-out.jsonl", "Where is", "Where was")
    refused("the held-out tasks are not those that this run began with")
    template = data / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    change_text(data / "corpus.jsonl", "lamp: hill", "lamp: lake")
    tokenizer = json.loads((data / "model" / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["rstrip"] = True
    (data / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = json.loads((data / "model" / "config.json").read_text())
    (data / "model" / "config.json").write_text(json.dumps({**model, "rms_norm_eps": 1e-3}))
    names = "chat template, tokenizer, model configuration, environment.corpus"
    refused(f"not what this run began with: {names}; put")
    ends = data / "model" / "generation_config.json"
    ends.write_text(json.dumps({**json.loads(ends.read_text()), "eos_token_id": [100, 1]}))
    refused("not what this run began with: ends of turns; put")
    (data / "buffer.sqlite").unlink()  # as many batches, other contents
    with StepTraceBuffer(data / "buffer.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"new {i}", task=f"tasks-{i}", reward=2.0) for i in range(6)]
        )
    refused("not what this run began with: step-trace buffer; put")
    # others may add to a shared buffer meanwhile
    with StepTraceBuffer(data / "buffer.sqlite", load_embedder("hash"), mode="write") as buffer:
        buffer.add_trajectories(
            [make_trajectory(f"new {i}", task=f"tasks-{i}", reward=2.0) for i in range(6)], keep_best=1
        )
    resume(killed)
    assert_same(whole, killed)


def test_the_reference_of_the_kl_term_comes_back(data: Path, tmp_path: Path) -> None:
    change_text(data / "recipe.toml", HYBRID, 'type = "grpo"\ngroup_size = 4\nkl_weight = 0.5')
    options = ("update.num_mini_batches=2", "optimizer.warmup_steps=3", "algorithm.kl_estimator=k3")
    run = begin(data / "recipe.toml", tmp_path / "run", *options)
    killed = interrupted(run)
    assert not same_weights(run, run, 0, 2)
    resume(killed)
    assert_same(run, killed)
    shutil.rmtree(killed / "checkpoints" / "step-000002")
    reference = killed / "reference.safetensors"
    changed = bytearray(reference.read_bytes())
    changed[-1] ^= 1
    reference.write_bytes(changed)
    with pytest.raises(CheckpointError, match="not what was written"):
        resume(killed)
    reference.unlink()
    with pytest.raises(CheckpointError, match=r"reference\.safetensors is missing"):
        resume(killed)


def test_a_run_without_its_checkpoints_does_not_start_over(whole: Path) -> None:
    """It did, in silence, and erased what was left of it."""
    shutil.rmtree(whole / "checkpoints")
    names = ("metrics.jsonl", "traces", "evaluations.jsonl")
    for left in (names, *((name,) for name in names)):
        run = Path(shutil.copytree(whole, whole.with_name("-".join(("left", *left)))))
        for name in set(names) - set(left):
            shutil.rmtree(run / name) if name == "traces" else (run / name).unlink()
        before = content(run)
        with pytest.raises(CheckpointError, match="and no checkpoint: put its folder checkpoints back"):
            resume(run)
        assert content(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(whole: Path) -> None:
    again = Path(shutil.copytree(whole, whole.with_name("again")))
    shutil.rmtree(again / "checkpoints")
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        (again / name).write_text((again / name).read_text().splitlines()[0] + "\n")
    for file in (again / "traces").glob("step-*"):
        file.unlink()
    resume(again)
    assert_same(whole, again)
    assert RunDirectory(again).finished_evaluations() == RunDirectory(whole).finished_evaluations()


def test_a_stop_in_the_set_up_of_a_run_without_a_checkpoint_keeps_larger_limits(
    made: Path, tmp_path: Path
) -> None:
    settings = load_settings(RunSettings, file=made / "data" / "recipe.toml")
    RunDirectory.create(tmp_path / "run", settings).release()
    opened = RunDirectory.open(tmp_path / "run", ["train.num_steps=77"])
    run_training(opened, progress="none", on_start=lambda request_stop: request_stop())
    assert recorded_settings(tmp_path / "run" / "config.toml").train.num_steps == 77
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_an_adaptation_is_no_training_run(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``train`` would pass over the trials in silence."""
    recipe = made / "data" / "recipe.toml"
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "evaluation.num_trials=2"]) == 2
    assert "num_trials=K in Python" in capsys.readouterr().err and not (tmp_path / "run").exists()
    settings = load_settings(RunSettings, file=recipe, overrides=["evaluation.num_trials=2"])
    RunDirectory.create(tmp_path / "adapted", settings).release()
    with pytest.raises(ConfigError, match="outrider eval --adapt"):
        resume(tmp_path / "adapted")
    assert (tmp_path / "adapted" / "config.toml").exists()


def test_a_dry_run_of_a_resumed_run_prints_its_settings_and_trains_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(RunSettings, file=made / "data" / "recipe.toml", overrides=["seed=41"])
    RunDirectory.create(tmp_path / "run", settings).release()
    assert main(["train", "--resume", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "seed = 41" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.toml", "lock"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("eval", "--run", "r", "--method", "reflexion"), "--method needs --adapt"),
        (
            ("buffer", "build", "--out", "b.sqlite", "--endpoint-model", "m"),
            "--endpoint-model needs --endpoint",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: tuple[str, ...], reason: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, str(made / "data" / "recipe.toml")]) == 2
    assert reason in capsys.readouterr().err


def test_another_embedder_of_the_tips_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of the memory and those of new questions would have no common meaning."""
    write_inputs(tmp_path)
    _, recipe, *others = map(str, command(tmp_path, tmp_path / "run", "empo2"))
    killed = interrupted(begin(Path(recipe), tmp_path / "run", *(one for one in others if "=" in one)))

    def other(self: HashEmbedder, dim: int = 256) -> None:
        built(self, dim)
        self.name = f"other:{dim}"

    built = HashEmbedder.__init__
    monkeypatch.setattr(HashEmbedder, "__init__", other)
    with pytest.raises(CheckpointError, match=r"embedder of the tips \(was: hash:256, .* is: other:256"):
        resume(killed)
