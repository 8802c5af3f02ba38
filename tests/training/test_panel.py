"""If a recipe names the hash of its evaluation tasks, a run on other tasks does not begin."""

import json
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.environments.base import make_task_set
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import DataError
from outrider.training.data import read_eval_tasks
from outrider.training.settings import RunSettings
from tests.training.tool_run import write_tool_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("panel"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_panel_that_a_recipe_names_is_the_one_that_it_plays(path: Path) -> None:
    settings = load_settings(RunSettings, file=path)
    assert settings.train.num_steps > 0
    if path.stem.startswith(("scienceworld", "webshop")):
        assert settings.evaluation.panel is not None
    if settings.evaluation.panel is not None:
        assert (
            hash_tasks(read_eval_tasks(make_task_set(settings.environment), settings.evaluation))
            == settings.evaluation.panel
        )


@pytest.mark.parametrize("change", ["evaluation.num_tasks=2", "evaluation.split=train"])
def test_another_panel_is_refused_with_both_hashes_and_none_takes_any(recipe: Path, change: str) -> None:
    named = load_settings(RunSettings, file=recipe)
    family = make_task_set(named.environment)
    frozen = hash_tasks(read_eval_tasks(family, named.evaluation))
    given = [f"evaluation.panel={frozen}"]
    assert (
        len(read_eval_tasks(family, load_settings(RunSettings, file=recipe, overrides=given).evaluation)) == 3
    )
    other = load_settings(RunSettings, file=recipe, overrides=[*given, change]).evaluation
    with pytest.raises(DataError, match=rf"evaluation.panel is {frozen}, theirs is [0-9a-f]{{64}} "):
        read_eval_tasks(family, other)
    free = load_settings(
        RunSettings, file=recipe, overrides=[*given, change, "evaluation.panel=none"]
    ).evaluation
    assert read_eval_tasks(family, free)


def test_a_refused_run_leaves_nothing_and_the_one_on_file_is_taken(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / "run"
    wrong = f"evaluation.panel={'0' * 64}"
    assert main(["eval", str(recipe), "--run", str(run), wrong]) == 1
    assert "not the panel of the recipe" in capsys.readouterr().err and not run.exists()
    assert main(["eval", str(recipe), "--run", str(run), "--progress", "none"]) == 0
    (line,) = [json.loads(one) for one in (run / "evaluations.jsonl").read_text().splitlines()]
    assert set(line["task_returns"]) == set(line["task_scores"]) and len(line["task_returns"]) == 3
    assert sum(line["task_returns"].values()) / 3 == pytest.approx(line["mean_return"])
    again = recipe.parent / "again"
    assert (
        main(
            [
                "eval",
                str(recipe),
                "--run",
                str(again),
                "--progress",
                "none",
                f"evaluation.panel={line['panel_hash']}",
            ]
        )
        == 0
    )


def test_several_sets_are_averaged_by_set_and_by_task(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / "sets"
    sets = (
        '[{name = "small", split = "test", num_tasks = 1}, {name = "large", split = "train", num_tasks = 4}]'
    )
    command = ["eval", str(recipe), "--run", str(run), "--progress", "plain", f"evaluation.panels={sets}"]
    assert main(command) == 0
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["panel"], line["num_tasks"]) for line in lines] == [("small", 1), ("large", 4)]
    printed = capsys.readouterr()
    [note] = [line for line in (printed.out + printed.err).splitlines() if "(macro)" in line]
    scores = [line["metric"]["score"]["value"] for line in lines]
    assert f"{100 * sum(scores) / 2:.1f} % is the mean of 2 sets (macro)" in note
    assert f"{100 * (scores[0] + 4 * scores[1]) / 5:.1f} % the mean over their 5 tasks (micro)" in note
