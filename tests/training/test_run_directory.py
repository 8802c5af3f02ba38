"""The folder of a new run: its settings, its lock, and leftovers of killed processes."""

import tomllib
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.engines.local import model
from outrider.errors import ConfigError
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"


def test_the_resolved_precision_is_recorded(tmp_path: Path) -> None:
    """It stays the same if another machine resumes the run."""
    for name, recorded in (("auto", {"bfloat16", "float32"}), ("bfloat16", {"bfloat16"})):
        settings = load_settings(RunSettings, file=RECIPE, overrides=[f"model.precision={name}"])
        RunDirectory.create(tmp_path / name, settings)
        written = tomllib.loads((tmp_path / name / "config.toml").read_text())
        assert written["model"]["precision"] in recorded


def test_a_folder_that_cannot_be_created_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=float32"])
    with pytest.raises(ConfigError, match="file/run cannot be created: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run", settings)


def test_two_processes_that_create_one_run_at_the_same_time_do_not_write_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes between the first look at the folder and the first file."""
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=float32"])
    others = []

    def other_process_is_faster(precision: str, device: str) -> str:
        monkeypatch.undo()
        others.append(RunDirectory.create(tmp_path / "run", settings.model_copy(update={"seed": 7})))
        return precision

    monkeypatch.setattr(model, "resolve_precision", other_process_is_faster)
    with pytest.raises(ConfigError, match="in use by another process"):
        RunDirectory.create(tmp_path / "run", settings)
    assert tomllib.loads((others[0].path / "config.toml").read_text())["seed"] == 7


@pytest.mark.parametrize(
    "left",
    [
        {"lock": "", "config.toml.tmp": "seed ="},
        dict.fromkeys(("lock", "plugins.json", "plugins.json.0a1b.tmp", "config.toml.0a1b.tmp"), ""),
    ],
    ids=["settings", "plug-ins"],
)
def test_a_folder_in_which_a_kill_left_only_the_beginning_of_a_run_is_free(
    left: dict[str, str], tmp_path: Path
) -> None:
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    RunDirectory.create(tmp_path, load_settings(RunSettings, file=RECIPE))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "lock"]


@pytest.mark.parametrize("name", ["thesis.tex", "lock", "plugins.json"])
def test_a_folder_with_files_of_the_user_is_refused_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """Also with names of ours: our lock is empty, and a list of plug-ins has a lock beside it."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path, load_settings(RunSettings, file=RECIPE))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_leftovers_of_a_kill_in_a_checkpoint_are_removed_and_a_link_is_not_followed(tmp_path: Path) -> None:
    """The records of a checkpoint are written anew at a run's end."""
    run = RunDirectory.create(tmp_path / "run", load_settings(RunSettings, file=RECIPE))
    run.release()
    step, other = run.checkpoints / "step-000004", tmp_path / "other"
    step.mkdir(parents=True)
    other.mkdir()
    for folder in (step, other):
        (folder / "records.json.0a1b.tmp").touch()
        (folder / "records.json").touch()
    (run.checkpoints / "step-000005").symlink_to(other)
    again, _ = RunDirectory.open(run.path)
    again.release()
    assert [one.name for one in step.iterdir()] == ["records.json"]
    assert len(list(other.iterdir())) == 2


def test_a_failed_set_up_takes_back_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    """What somebody put into the folder meanwhile stays, and the folder with it; a link is not followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    run = RunDirectory.create(tmp_path / "run", load_settings(RunSettings, file=RECIPE))
    (run.path / "notes").write_text("mine")
    (run.path / "buffer.sqlite-wal").touch()
    (run.path / "traces").symlink_to(elsewhere)
    run.roll_back()
    run.release()
    assert [one.name for one in run.path.iterdir()] == ["notes"] and (elsewhere / "kept").exists()
