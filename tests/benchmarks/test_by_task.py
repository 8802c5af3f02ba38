"""The runs behind a table of tasks and methods: which there are, what each is told, and that nothing runs
twice.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.by_task import TASKS, make_parser
from benchmarks.by_task_runs import Piece, Plan, play
from pytest import MonkeyPatch

from benchmarks import by_task, by_task_runs
from outrider.api import evaluation_settings, run_settings
from outrider.config import to_toml
from outrider.environments.scienceworld.tasks import NUM_VARIATIONS
from outrider.errors import ConfigError, OutriderError

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "recipes" / "house-empo2.toml"


def plan(out: Path, **changes: object) -> Plan:
    given = {
        "recipe": HOUSE, "out": out, "tasks": ["1", "2"], "methods": ["naive", "reflexion", "grpo", "empo2"],
        "seeds": range(2), "num_trials": 3, "transfers": [("1", "9"), ("7", "1")], "critic": None,
        "setting": "environment.house_seed={task}", "overrides": ["train.num_steps=4", "num_threads=1"],
    } | changes  # fmt: skip
    return Plan(**given)  # type: ignore[arg-type]


class Outrider:
    """In the place of the command line: writes what a run leaves. ``fails``: runs that do not end."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.fails: set[str] = set()

    def __call__(self, arguments: Sequence[str]) -> int:
        self.told.append(list(arguments))
        command, *rest = arguments
        run = Path(rest[rest.index("--resume" if "--resume" in rest else "--run") + 1])
        run.mkdir(parents=True, exist_ok=True)
        if "--resume" not in rest:
            overrides = [one for one in rest if "=" in one]
            options = dict(zip(rest[1::2], rest[2::2], strict=False))
            settings = (
                run_settings(rest[0], overrides=overrides)
                if command == "train"
                else evaluation_settings(
                    rest[0], overrides=overrides, checkpoint=options.get("--checkpoint"),
                    num_trials=int(options["--adapt"]) if "--adapt" in options else None,
                    method=options.get("--method", "tips"),
                )
            )  # fmt: skip
            (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))
        if run.name.removesuffix(".partial") in self.fails:
            return 1
        (run / "checkpoints" / "step-000004").mkdir(parents=True, exist_ok=True)
        scores = {f"house/{number}/x": 1.0 for number in range(2)}
        line = {
            "label": "after EMPO2", "step": 4 if command == "train" else 0, "split": "test", "num_tasks": 2,
            "temperature": 1.0, "panel_hash": "0" * 64, "task_scores": scores, "task_returns": scores,
            "metric": {"score": {"value": 1.0, "ci_low": 0.5, "ci_high": 1.0}},
        }  # fmt: skip
        (run / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
        (run / "metrics.jsonl").write_text("")
        return 0


@pytest.fixture
def outrider(monkeypatch: MonkeyPatch) -> Outrider:
    stand_in = Outrider()
    monkeypatch.setattr(by_task_runs, "_in_a_process", stand_in)
    return stand_in


def play_all(made: Plan) -> list[Piece]:
    played = []
    for piece in made.pieces():
        play(piece)
        played.append(piece)
    return played


def test_every_cell_has_its_runs_and_adaptation_follows_training(tmp_path: Path, outrider: Outrider) -> None:
    played = play_all(plan(tmp_path))
    names = [piece.run.name for piece in played]
    assert len(set(names)) == len(names)
    of_table = 2 * (1 + 1 + 2 + 2)
    trainings_of_7, adaptations = 2 * 2, 2 * 2 * 2
    assert len(names) == of_table + trainings_of_7 + adaptations
    assert sum("--adapt" in told for told in outrider.told) == 2 + adaptations
    for told in outrider.told:
        if "--checkpoint" in told:  # of a folder that was there by then
            checkpoint = Path(told[told.index("--checkpoint") + 1])
            assert checkpoint.name == "step-000004" and checkpoint.is_dir()
    columns = {piece.column for piece in played}
    assert columns >= {"naive", "reflexion", "grpo", "empo2", "empo2, from 1", "grpo, from 7"}
    grpo = next(piece for piece in played if piece.run.name == "grpo-2-1")
    assert {"seed=1", "environment.house_seed=2", "algorithm.memory_probability=0"} <= set(grpo.overrides)


def test_the_same_command_repeats_no_run_and_continues(tmp_path: Path, outrider: Outrider) -> None:
    small = plan(tmp_path, tasks=["1"], transfers=[])
    outrider.fails = {"reflexion-1"}
    with pytest.raises(OutriderError, match="reflexion-1 ended with status 1"):
        play_all(small)
    assert (tmp_path / "reflexion-1.partial").exists() and not (tmp_path / "reflexion-1").exists()
    outrider.fails = {"grpo-1-0"}
    outrider.told.clear()
    with pytest.raises(OutriderError, match="grpo-1-0"):
        play_all(small)
    assert not (tmp_path / "reflexion-1.partial").exists() and (tmp_path / "reflexion-1").exists()
    assert len(outrider.told) == 2  # the naive run was left alone, the cut one begun anew
    outrider.fails = set()
    outrider.told.clear()
    play_all(small)
    assert outrider.told[0] == ["train", "--resume", str(tmp_path / "grpo-1-0")]
    outrider.told.clear()
    play_all(small)
    assert not outrider.told


@pytest.mark.parametrize("done", [True, False])
def test_runs_of_other_settings_are_refused(tmp_path: Path, outrider: Outrider, done: bool) -> None:
    small = plan(tmp_path, tasks=["1"], transfers=[], methods=["empo2"])
    outrider.fails = set() if done else {"empo2-1-0"}
    if done:
        play_all(small)
    else:
        with pytest.raises(OutriderError):
            play_all(small)
    other = plan(tmp_path, tasks=["1"], transfers=[], methods=["empo2"], overrides=["train.num_steps=5"])
    with pytest.raises(ConfigError, match="started with other settings"):
        play_all(other)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--methods", "ppo"], "unknown methods ppo"), (["--methods", "retrospex"], "needs --critic"),
        (["--transfers", "a"], "pairs of tasks"), (["--setting", "environment.x=1"], "needs {task}"),
        (["--seeds", "0"], "at least 1"), (["--only-report"], "there is nothing to report"),
        (["--methods", "naive", "--transfers", "a:b"], "--transfers need one of grpo, empo2"),
    ],
)  # fmt: skip
def test_invalid_arguments(
    wrong: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert by_task.main([str(HOUSE), "--out", str(tmp_path), *wrong]) == 2
    assert told in capsys.readouterr().err


def test_the_tasks_are_those_of_the_simulator_and_of_the_page() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    assert len(set(TASKS)) == 18 and set(TASKS) <= set(NUM_VARIATIONS)
    assert all(f"`{task}`" in page for task in TASKS)
    assert make_parser().parse_args(["r.toml", "--out", "x"]).tasks == list(TASKS)
