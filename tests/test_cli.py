"""The command line: bad input is one line and the right exit status, and leaves nothing behind; imports stay
light.

Exit status 2 is bad configuration, 1 anything else that has a name.
"""

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings, to_toml
from outrider.training.settings import RunSettings
from tests.training.tool_run import write_tool_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("cli"))


BAD = [
    ("train.num_stepz=3", 2, "train.num_stepz: unknown key"),
    ("trian.num_steps=3", 2, "trian: unknown key"),
    ("train.num_steps=many", 2, "train.num_steps"),
    ("optimizer.learning_rate=inf", 2, "optimizer.learning_rate"),
    ("train.tasks_per_step=0", 2, "train.tasks_per_step"),
    ("seed.x=1", 2, "seed is a value"),
    ("=1", 2, "section.key=value"),
    ("algorithm.type=magic", 2, "algorithm"),
    ("algorithm.num_hybrid=9", 2, "num_hybrid 9 exceeds group_size 4"),
    ("rollout.max_turn_tokens=999", 2, "max_turn_tokens exceeds"),
    ("algorithm.retrieval.mode=execute", 2, "stateful environment"),
    ("update.num_mini_batches=5", 2, "num_mini_batches exceeds"),
    ('environment={type="tools"}', 2, "needs a corpus"),
    ("model.name=no/such/folder", 1, "no/such/folder"),
    ("environment.train.path=gone.jsonl", 1, "gone.jsonl: no such file"),
    ("environment.corpus=gone.jsonl", 1, "gone.jsonl"),
    ("buffer.path=gone.sqlite", 1, "gone.sqlite"),
    ("buffer.embedder=minilm", 2, "built with embedder"),
    ("train.tasks_per_step=50", 1, "6 training tasks are fewer"),
    ("evaluation.split=valid", 1, "no data set is configured"),
    ("model.initial_checkpoint=gone", 1, "gone"),
]
"""An override that cannot run, the exit status, and a part of the message."""


def _train(recipe: Path, run: Path, *more: str) -> list[str]:
    return ["train", str(recipe), *more, "--run", str(run), "--progress", "none"]


def _assert_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    capsys.readouterr()
    assert main(arguments) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("outrider: ") and message in line


def _files(folder: Path) -> dict[Path, bytes]:
    """Contents by path; what SQLite keeps beside a database while it is read is not the user's."""
    kept = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    ]
    return {path: path.read_bytes() for path in kept}


@pytest.mark.parametrize(("override", "status", "message"), BAD)
def test_bad_input_is_one_line_and_writes_nothing(
    override: str,
    status: int,
    message: str,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "minilm" in override and find_spec("onnxruntime") is None:
        pytest.skip("needs the extra minilm")
    monkeypatch.chdir(tmp_path)
    before = _files(recipe.parent)
    _assert_error(capsys, _train(recipe, tmp_path / "run", override), status, message)
    assert list(tmp_path.iterdir()) == []
    assert _files(recipe.parent) == before


def test_a_failed_set_up_leaves_an_empty_folder_empty(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_error(capsys, _train(recipe, tmp_path, "--model", "no/such/folder"), 1, "no/such/folder")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_malformed_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = \n")
    for path, says in (
        (tmp_path / "gone.toml", "cannot read"),
        (broken, "not valid TOML"),
        (tmp_path, "cannot read"),
    ):
        _assert_error(capsys, ["train", str(path), "--run", str(tmp_path / "run")], 2, says)
    assert list(tmp_path.iterdir()) == [broken]


def test_options_that_contradict(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _assert_error(capsys, ["train"], 2, "name a recipe")
    _assert_error(capsys, ["train", str(recipe)], 2, "--run DIRECTORY")
    _assert_error(capsys, ["train", str(recipe), "--resume", str(tmp_path)], 2, "name a recipe")
    _assert_error(capsys, ["train", "--resume", str(tmp_path), "--model", "x"], 2, "has its own model")
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe), "--no-such-option"])
    assert stopped.value.code == 2
    assert list(tmp_path.iterdir()) == []


def _damage_json(path: Path) -> str:
    path.write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", \n')
    return f"{path}:2: malformed JSON"


def _empty(path: Path) -> str:
    path.write_text("\n")
    return "the data set is empty"


def _without_column(path: Path) -> str:
    path.write_text(json.dumps({"question": "a?"}) + "\n")
    return f"{path}:1: no column 'answer'"


@pytest.mark.parametrize("spoil", [_damage_json, _empty, _without_column])
def test_a_bad_data_file_is_named_with_its_line(
    spoil: Callable[[Path], str], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    says = spoil(data)
    arguments = _train(recipe, tmp_path / "run", f"environment.train.path={data}")
    _assert_error(capsys, arguments, 1, says)
    assert list(tmp_path.iterdir()) == [data]


def test_a_corrupt_buffer_is_an_error_and_stays_as_it_is(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = tmp_path / "buffer.sqlite"
    content = bytearray((recipe.parent / "buffer.sqlite").read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    for damaged in (bytes(content), b"not a database at all" * 100):
        buffer.write_bytes(damaged)
        arguments = _train(recipe, tmp_path / "run", f"buffer.path={buffer}")
        _assert_error(capsys, arguments, 1, str(buffer))
        assert buffer.read_bytes() == damaged and not (tmp_path / "run").exists()


def test_a_run_directory_is_never_overwritten_or_guessed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    _assert_error(capsys, ["train", str(recipe), "--run", str(tmp_path)], 2, "is not empty")
    _assert_error(capsys, ["train", str(recipe), "--run", str(note)], 2, "is not empty")
    _assert_error(capsys, ["train", "--resume", str(tmp_path)], 1, "no run directory")
    _assert_error(capsys, ["train", "--resume", str(tmp_path / "gone")], 1, "no run directory")
    assert _files(tmp_path) == {note: b"mine"}


def test_a_run_in_use_is_an_error(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(load_settings(RunSettings, file=recipe).model_dump(mode="json")))
    # another open file description is another holder, as another process is
    with (run / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = _files(run)
        _assert_error(capsys, ["train", "--resume", str(run)], 2, "in use by another process")
        assert _files(run) == before


@pytest.mark.parametrize(
    ("tracker", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_tracker_names_its_extra(
    tracker: str,
    module: str,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # the import fails, whatever is installed
    arguments = _train(recipe, tmp_path / "run", f'trackers=["{tracker}"]')
    _assert_error(capsys, arguments, 2, f"outrider[{tracker}]")
    assert list(tmp_path.iterdir()) == []


def test_the_output_of_a_dry_run_is_a_recipe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    awkward = 'a "quoted" \\ name\twith\nlines é 日本'
    overrides = [
        "train.num_steps=3",
        f"environment.system_prompt={json.dumps(awkward)}",
        "optimizer.learning_rate=1e-7",
    ]
    assert main(["train", str(recipe), *overrides, "--dry-run", "--run", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and not (tmp_path / "run").exists()
    copy = tmp_path / "copy.toml"
    copy.write_text(printed.out, encoding="utf-8")
    again = load_settings(RunSettings, file=copy)
    assert again == load_settings(RunSettings, file=recipe, overrides=overrides)
    assert (again.train.num_steps, again.optimizer.learning_rate) == (3, 1e-7)
    assert again.environment.type == "tools" and again.environment.system_prompt == awkward


def test_overrides_may_stand_anywhere(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "smollm2-135m-instruct"]
    orders = [
        ["train", str(recipe), *model, "seed=9", "--dry-run", "train.num_steps=3"],
        [
            "train",
            "--dry-run",
            str(recipe),
            *model,
            "seed=1",
            "--progress",
            "none",
            "train.num_steps=3",
            "seed=9",
        ],
    ]
    outputs = []
    for arguments in orders:
        assert main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "seed = 9" in outputs[0] and f'name = "{model[1]}"' in outputs[0]


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_is_quick_and_brings_no_torch() -> None:
    code = """
import sys, time
began = time.perf_counter()
import outrider
print(time.perf_counter() - began, "torch" in sys.modules, "transformers" in sys.modules)
"""
    best = min((_python(code).split() for _ in range(3)), key=lambda words: float(words[0]))
    assert best[1:] == ["False", "False"]
    assert float(best[0]) < 0.5


def test_help_and_version_import_neither_torch_nor_a_plug_in() -> None:
    code = """
import sys
from outrider.cli import main
for arguments in (["--help"], ["train", "--help"], ["--version"]):
    try:
        main(arguments)
    except SystemExit as stopped:
        assert stopped.code == 0
heavy = {"torch", "transformers", "pyarrow"}
heavy |= {f"outrider.{name}" for name in ("algorithms", "environments", "engines", "tools")}
print(sorted(heavy & set(sys.modules)))
"""
    assert _python(code).splitlines()[-1] == "[]"
