"""Errors of the first day: they appear at once, suggest a correction and leave no files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import files
from outrider.cli import main
from outrider.config import load_settings, validate
from outrider.engines.base import require_known_model
from outrider.engines.local import model
from outrider.errors import ConfigError, ModelError
from outrider.evaluation.tasks import find_benchmark
from outrider.training import adaptation
from outrider.training import run_dir as run_directory
from outrider.training import setup as start
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "demo.toml"

QUICK = [  # arguments, exit status, and a part of the output
    (["train", str(RECIPE), "--run", "new", "algorithm.type=grppo"], 2, "did you mean grpo?"),
    (
        ["train", str(RECIPE), "--run", "new", "--model", "smolm2-135m-instruct"],
        1,
        "did you mean smollm2-135m-instruct?",
    ),
    (["train", str(RECIPE), "--run", "."], 2, "is not empty"),
    (["train", "--resume", "gone"], 1, "gone is no run directory"),
    (["eval", "--tasks", "gsm8k", "--model", "smollm2-135m-instruct", "--dry-run"], 0, 'tasks = "gsm8k"'),
    (["buffer", "build", str(RECIPE), "--out", "new", "trian.num_steps=1"], 2, "did you mean train?"),
    (["init", "recipe.toml"], 0, "recipe.toml: next"),
    (["init", "demo.toml", "--demo"], 0, "demo.toml --run runs/demo"),
]
# Each command runs in a fork of a process that has read a recipe.
_RUN = """
import contextlib, io, json, os, sys
from outrider.cli import main
from outrider.api import run_settings
run_settings(sys.argv[2])
for arguments, folder in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, arguments
        continue
    os.chdir(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(arguments)
    heavy = [name for name in ("torch", "transformers", "pyarrow", "bm25s") if name in sys.modules]
    print(json.dumps([status, out.getvalue(), heavy, os.listdir()]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each command: its status, its output, its heavy imports and the files in its folder."""
    folders = [tmp_path_factory.mktemp("quick") for _ in QUICK]
    for folder in folders:
        (folder / "a file").touch()
    commands = [(arguments, str(folder)) for (arguments, *_), folder in zip(QUICK, folders, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands), str(RECIPE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = map(json.loads, done.stdout.splitlines())
    return {str(arguments): one for (arguments, *_), one in zip(QUICK, results, strict=True)}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    QUICK,
    ids=lambda one: " ".join(one)[-40:] if isinstance(one, list) else "",
)
def test_commands_without_a_model_import_no_torch(
    arguments: list[str], status: int, message: str, quick: dict[str, list[Any]]
) -> None:
    result, output, heavy, names = quick[str(arguments)]
    assert result == status and not heavy
    assert message in output and (status == 0 or output.count("\n") == 1)
    assert "a file" in names and "new" not in names


def test_a_dry_run_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(ROOT / "recipes" / "house-empo2.toml"), "--dry-run"]) == 0
    assert "num_steps = 0" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.groupsize=4", "algorithm.groupsize: unknown key, did you mean algorithm.group_size?"),
        (
            "algorithm.retrieval.mod=1",
            "algorithm.retrieval.mod: unknown key, did you mean algorithm.retrieval.mode?",
        ),
        ("algorithm.group_size=many", "algorithm.group_size: Input should be a valid integer"),
        ("trian.num_steps=3", "trian: unknown key, did you mean train?"),
        (
            'environment={type="openenv",url="http://localhost:1"}',
            "environment.url: unknown key, did you mean environment.server_url?",
        ),
        ("train.learning_rate=1", "did you mean cold_start.learning_rate or optimizer.learning_rate?"),
        (
            "environment.type=factbok",
            "environment.type: there is no 'factbok', did you mean factbook? (one of factbook, tools,",
        ),
        ("environment={hops=[1]}", "environment.type: is missing"),
        ("algorithm=grpo", "algorithm: is a section with keys of its own, not 'grpo'"),
        (
            'environment={type="tools",tools=["serch"]}',
            "environment.tools.0: there is no 'serch', did you mean search? (one of",
        ),
        (
            'environment={type="tools",tools=["python"],prompt="shrot"}',
            "environment.prompt: Input should be 'full', 'short' or 'none', did you mean short?",
        ),
        ("zzz=1", "zzz: unknown key"),
    ],
)
def test_errors_have_plain_paths_and_suggestions(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(RunSettings, file=RECIPE, overrides=[override])
    assert message in str(error.value)
    assert override != "zzz=1" or str(error.value) == message  # without a suggestion


@pytest.mark.parametrize(("device", "precision"), [("cuda:99", "auto"), ("banana", "float32")])
@pytest.mark.parametrize("command", [["train"], ["eval"], ["eval", "--adapt", "2"]])
def test_a_missing_device_is_one_line(
    command: list[str], device: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"model.device={device}", f"model.precision={precision}"]
    assert main([*command, str(RECIPE), "--run", str(tmp_path / "run"), *overrides]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line.startswith(f"outrider: model.device = {device!r} cannot be used: ")
        and "model.device=cpu" in line
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", [RuntimeError("a driver"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("command", [["train"], ["eval"], ["eval", "--adapt", "2"]])
def test_a_failed_set_up_leaves_no_folder(
    command: list[str], reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, buffer_path: Path, **__: Any) -> None:
        buffer_path.write_text("half a buffer")
        raise reason

    monkeypatch.setattr(start, "build", fails)
    monkeypatch.setattr(adaptation, "build", fails)
    arguments = [*command, str(RECIPE), "--run", str(tmp_path / "run"), "--progress", "none"]
    if isinstance(reason, KeyboardInterrupt):
        assert main(arguments) == 130
    else:
        with pytest.raises(type(reason)):
            main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_cannot_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "replace_file", full)
    assert main(["train", str(RECIPE), "--run", str(tmp_path / "run")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(RunSettings, file=RECIPE)
    RunDirectory.create(tmp_path / "run", settings).release()
    before = (tmp_path / "run" / "config.toml").read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a driver")

    monkeypatch.setattr(start, "build", fails)
    with pytest.raises(RuntimeError, match="a driver"):
        main(["train", "--resume", str(tmp_path / "run"), "--progress", "none"])
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "smollm2-135-instruct",
            "did you mean smollm2-135m-instruct? (packaged: smollm2-135m-instruct, gemma3-270m, ",
        ),
        ("gpt2", "there is no model 'gpt2' (packaged: "),
        ("./nofolder", "model './nofolder': no such folder"),
        ("/no/folder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("~/model", "no such folder"),
        ("weights.gguf", "is a file: give the folder"),
    ],
)
def test_names_that_are_no_hub_ids_cause_no_request(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.gguf").touch()
    monkeypatch.setattr(
        model.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a request")
    )
    with pytest.raises(ModelError) as error:
        model.load_model(name, precision="float32")
    assert message in str(error.value)


def test_hub_ids_folders_and_packaged_models_are_valid(tmp_path: Path) -> None:
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path), "smollm2-135m-instruct"):
        require_known_model(name)


def test_the_error_of_a_list_has_an_example() -> None:
    with pytest.raises(ConfigError, match=r'trackers: needs a list, such as trackers=\["wandb"\]'):
        load_settings(RunSettings, file=RECIPE, overrides=["trackers=wandb"])


def test_an_unknown_task_set_with_a_file_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown task set 'own' in 'own=mine\.jsonl'; .* questions of your own go as FILE alone",
    ):
        find_benchmark("own=mine.jsonl")
    with pytest.raises(ConfigError, match="did you mean gsm8k"):
        find_benchmark("gsm9k=mine.jsonl")


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error:
        files.replace_file(tmp_path / "gone" / "report.html", b"")
    assert error.value.filename == str(tmp_path / "gone" / "report.html")


def test_the_help_of_buffer_lists_all_its_actions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["buffer", "--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert {"build", "import", "stats", "query"} <= set(listed)


def test_a_key_with_the_name_of_a_type() -> None:
    """``environment.tools.tools`` is the tag and then the key."""
    tree = {"algorithm": {"type": "grpo"}, "environment": {"type": "tools", "tools": "search"}}
    with pytest.raises(ConfigError, match=r"^environment\.tools: needs a list"):
        validate(RunSettings, tree)


def test_the_recipe_of_the_demo_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "demo.toml", "--demo"]) == 0
    assert Path("demo.toml").read_bytes() == RECIPE.read_bytes()
    assert main(["init", "demo.toml"]) == 2
    assert Path("demo.toml").read_bytes() == RECIPE.read_bytes()
