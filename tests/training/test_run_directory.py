"""What a new run writes down."""

import tomllib
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.engines.local import model
from outrider.errors import ConfigError
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"


def test_the_precision_that_auto_meant_is_written_down_and_survives_another_machine(tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=auto"])
    RunDirectory.create(tmp_path / "run", settings)
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["model"]["precision"] in ("bfloat16", "float32")


def test_a_named_precision_stays(tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=bfloat16"])
    RunDirectory.create(tmp_path / "run", settings)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]["precision"] == "bfloat16"


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


def test_a_folder_in_which_a_kill_left_only_the_beginning_of_a_run_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "config.toml.tmp").write_text("seed =")
    settings = load_settings(RunSettings, file=RECIPE)
    RunDirectory.create(folder, settings)
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "lock"]


def test_so_is_one_of_a_run_with_plug_ins(tmp_path: Path) -> None:
    """Theirs is the first file; what it said is not the new run's."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("lock", "plugins.json", "plugins.json.0a1b.tmp", "config.toml.0a1b.tmp"):
        (folder / name).touch()
    RunDirectory.create(folder, load_settings(RunSettings, file=RECIPE))
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "lock"]


def test_a_list_of_plug_ins_without_a_lock_is_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "plugins.json").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path, load_settings(RunSettings, file=RECIPE))
    assert (tmp_path / "plugins.json").read_text() == "mine"


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


def test_a_folder_with_files_of_others_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path, load_settings(RunSettings, file=RECIPE))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


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


def test_a_lock_with_content_is_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path, load_settings(RunSettings, file=RECIPE))
    assert (tmp_path / "lock").read_text() == "mine"
