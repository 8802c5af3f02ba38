"""Comparison by task: cells, means, errors, notes on missing results, and curves over trials."""

import json
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from benchmarks.compare_by_task import (
    TaskComparison,
    compare_by_task,
    main,
    task_notes,
    task_report,
    task_tables,
)

from outrider.errors import ConfigError
from outrider.evaluation.compare import Incomparable, group_runs, load_run
from outrider.evaluation.compare_report import to_html, to_markdown
from outrider.evaluation.statistics import interquartile_mean

EVALUATED = ("cold_start.num_examples = 0",)
HOSTILE = "<script>alert(1)</script>|x"


def write_run(
    run: Path,
    returns: list[dict[str, float]],
    *,
    seed: int = 0,
    settings: tuple[str, ...] = (),
    **changes: object,
) -> str:
    """A run with an evaluation, or a trial, for each of ``returns`` (by task key); above 0.5 is solved."""
    run.mkdir(parents=True)
    config = [f"seed = {seed}", *EVALUATED, *settings]
    (run / "config.toml").write_text("\n".join(config) + "\n")
    lines = []
    for found in returns:
        solved = {key: float(value > 0.5) for key, value in found.items()}
        score = fmean(solved.values())
        lines.append({
            "label": "x", "split": "test", "temperature": 0.4, "panel_hash": "ab" * 32, "step": 0,
            "num_tasks": len(found), "metric": {"score": {"value": score, "ci_low": 0.0, "ci_high": 1.0}},
            "task_scores": solved, "task_returns": found, **changes,
        })  # fmt: skip
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(run)


def panel(task: str, *values: float) -> dict[str, float]:
    return {f"world/{task}/{number}": value for number, value in enumerate(values)}


def trained(kind: str, task: str) -> tuple[str, ...]:
    return (f'algorithm.type = "{kind}"', "train.num_steps = 9", f'environment.task_names = ["{task}"]')


WITHOUT_TIPS = ("algorithm.memory_probability = 0.0", "algorithm.intrinsic_coefficient = 0.0")


@pytest.fixture
def table(tmp_path: Path) -> TaskComparison:
    """Two tasks with a model each, two methods and the naive one, seeds 0 to 2; one run has both tasks."""
    given = []
    for task, base in (("a", 0.0), ("b", 0.4)):
        for seed in range(3):
            for name, gain, more in (("empo2", 0.3, ()), ("grpo", 0.0, WITHOUT_TIPS)):
                values = [base + gain + 0.1 * seed + 0.01 * number for number in range(4)]
                run = tmp_path / f"{name}-{task}-{seed}"
                settings = (*trained("empo2", task), *more)
                given.append(write_run(run, [panel(task, *values)], seed=seed, settings=settings))
    naive = panel("a", -1, -1, -1, -1) | panel("b", 0, 0, 0, 0)
    settings = ('algorithm.type = "empo2"', "train.num_steps = 0")
    given.append(write_run(tmp_path / "naive", [naive], settings=settings))
    return compare_by_task(given)


def test_a_cell_is_the_interquartile_mean_over_its_seeds(table: TaskComparison) -> None:
    assert table.methods == ("empo2", "grpo", "no training") and table.tasks == {"world/a": 4, "world/b": 4}
    for (task, base), (method, gain) in (
        (task, method) for task in (("a", 0.0), ("b", 0.4)) for method in (("empo2", 0.3), ("grpo", 0.0))
    ):
        cell = table.cells[f"world/{task}", method]
        means = np.asarray([base + gain + 0.1 * seed + 0.015 for seed in range(3)])
        assert cell.returns.value == pytest.approx(float(interquartile_mean(means)))
        assert cell.returns.low < cell.returns.value < cell.returns.high and cell.num_runs == 3
        solved = [float(value + 0.01 * number > 0.5) for value in means - 0.015 for number in range(4)]
        by_seed = np.asarray(solved).reshape(3, 4).mean(axis=1)
        assert cell.solved.value == pytest.approx(float(interquartile_mean(by_seed)))
    assert table.cells["world/a", "no training"].returns.value == -1.0
    of_one = table.cells["world/b", "no training"].solved
    assert (of_one.value, of_one.low) == (0.0, 0.0) and 0.4 < of_one.high < 0.6  # Wilson's, of 0 in 4


def test_the_mean_over_tasks_weights_tasks_equally(
    table: TaskComparison,
) -> None:
    assert table.averages["empo2"].returns.value == pytest.approx(0.3 + 0.2 + 0.1 + 0.015)
    assert table.averages["empo2"].returns.has_interval and table.averages["empo2"].num_runs == 3
    assert table.averages["no training"].returns.value == -0.5


def test_tables_mark_missing_results_and_escape_names(tmp_path: Path, table: TaskComparison) -> None:
    returns, solved = task_tables(table)
    assert returns.columns == ("task", "variations", "empo2", "grpo", "no training")
    assert [row[0] for row in returns.rows] == ["a", "b", "mean over tasks"]
    assert returns.rows[0][-1] == "-1 (1)"  # a bootstrap of equal values is no interval
    assert solved.rows[0][-1] == "0.0 % [0.0, 49.0] (1)"
    assert any("(1) one run: the interval" in note for note in task_notes(table))
    given = [
        write_run(tmp_path / "x", [panel(HOSTILE, 1, 0)], settings=trained("grpo", "x")),
        write_run(tmp_path / "y", [panel("y", 1, 0)], settings=trained("arpo", "y")),
    ]
    found = compare_by_task([f"{HOSTILE}={given[0]}", given[1]])
    assert HOSTILE in found.methods
    assert "not measured" in to_markdown(task_report(found)) and "<script>" not in to_markdown(
        task_report(found)
    )
    assert "<script>" not in to_html(task_report(found))
    assert HOSTILE not in found.averages and "arpo" not in found.averages
    assert "2 cells have no run" in " ".join(task_notes(found))


def test_curves_over_trials_and_their_gain(tmp_path: Path) -> None:
    """Checkpoints of two methods, two seeds each, tell the columns apart; a run that was cut is not held."""
    given, memory = [], ("evaluation.num_trials = 3", "train.num_steps = 0", 'algorithm.type = "empo2"')
    for name, more in (("empo2", ()), ("grpo", WITHOUT_TIPS)):
        for seed in range(2):
            run = tmp_path / f"{name}-{seed}"
            write_run(run, [panel("a", 0, 0)], seed=seed, settings=(*trained("empo2", "a"), *more))
            start = f'model.initial_checkpoint = "{run}/checkpoints/step-000009"'
            trials = [panel("b", value + 0.1 * seed, value) for value in (0.2, 0.6, 0.4)]
            trials = trials if name == "empo2" else trials[:1]
            adapted = tmp_path / f"{name}-{seed}-adapted"
            given.append(write_run(adapted, trials, seed=seed, settings=(*memory, start)))
    found = compare_by_task(given)
    assert found.methods == ("empo2, tips", "grpo, tips")
    [curves] = found.curves
    assert curves.task == "world/b" and list(curves.x) == [1, 2, 3]
    assert curves.bands["empo2, tips"].value == pytest.approx([0.225, 0.625, 0.425])
    assert curves.bands["grpo, tips"].value == pytest.approx([0.225, math.nan, math.nan], nan_ok=True)
    assert "grpo-0-adapted was cut: 1 of 3 trials" in found.notes
    assert (curves.bands["empo2, tips"].low < curves.bands["empo2, tips"].value).all()
    trials = task_tables(found)[-1]
    assert "empo2, tips: first 0.225, best 0.625 at trial 2 (+177.8 %), last 0.425" in trials.caption
    assert found.cells["world/b", "empo2, tips"].returns.value == pytest.approx(0.425)
    page = to_html(task_report(found))
    assert page.count("<svg") == 1 and "over trials" in page


def test_reflexion_keeps_its_result_after_solving_everything(tmp_path: Path) -> None:
    memory = ("evaluation.num_trials = 3", "train.num_steps = 0", 'algorithm.type = "empo2"',
              'evaluation.memory = "reflexion"')  # fmt: skip
    begin = [(*memory, f'model.initial_checkpoint = "{tmp_path}/gone-{n}/c/s"') for n in range(2)]
    given = [
        write_run(tmp_path / "a", [panel("b", 0.0, 1.0), panel("b", 1.0, 1.0)], settings=begin[0]),
        write_run(tmp_path / "b", [panel("b", 0.0, 0.0)] * 3, seed=1, settings=begin[1]),
    ]
    found = compare_by_task([f"mine={one}" for one in given])
    assert found.curves[0].bands["mine"].value == pytest.approx([0.25, 0.5, 0.5])
    assert not [note for note in found.notes if "cut" in note]


def test_a_trial_that_lost_a_variation_is_not_measured(tmp_path: Path) -> None:
    settings = ("evaluation.num_trials = 2", "train.num_steps = 0", 'algorithm.type = "empo2"')
    run = write_run(tmp_path / "r", [panel("a", 1), panel("a", 1, 0)], settings=settings)
    [curves] = compare_by_task([run]).curves
    assert math.isnan(curves.bands["tips"].value[0]) and curves.bands["tips"].value[1] == 0.5
    assert task_tables(compare_by_task([run]))[-1].rows[0][1] == "not measured"


def test_runs_of_a_cell_that_differ_in_more_than_the_seed_are_an_error(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", [panel("a", 1)], settings=trained("grpo", "a"))
    other = (*trained("grpo", "a"), "algorithm.group_size = 3")
    differs = write_run(tmp_path / "two", [panel("a", 1)], seed=1, settings=other)
    with pytest.raises(Incomparable, match=r"both 'grpo' on world/a and differ in algorithm.group_size"):
        compare_by_task([first, differs])
    assert compare_by_task([first, f"small={differs}"]).methods == ("grpo", "small")
    twin = write_run(tmp_path / "three", [panel("a", 1)], settings=trained("grpo", "a"))
    with pytest.raises(Incomparable, match="one seed twice"):
        compare_by_task([first, twin])
    hotter = write_run(
        tmp_path / "four", [panel("a", 1)], seed=2, settings=trained("grpo", "a"), temperature=1.0
    )
    with pytest.raises(Incomparable, match=r"not evaluated alike on world/a: .* temperature 1, .* 0\.4"):
        compare_by_task([first, hotter])
    with pytest.raises(ConfigError, match="scores of single tasks"):
        compare_by_task([write_run(tmp_path / "five", [], settings=trained("grpo", "a"))])


def test_variations_that_only_some_runs_scored_are_left_out_and_noted(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", [panel("a", 1, 0)], settings=trained("grpo", "a"))
    second = write_run(tmp_path / "two", [panel("a", 1)], seed=1, settings=trained("grpo", "a"))
    found = compare_by_task([first, second])
    assert found.tasks == {"world/a": 1} and found.cells["world/a", "grpo"].returns.value == 1.0
    assert any("1 variation(s)" in note for note in found.notes)


def test_the_order_of_runs_only_changes_the_order_of_columns(tmp_path: Path) -> None:
    given = [
        write_run(tmp_path / f"{seed}", [panel("a", seed / 3, 0)], seed=seed, settings=trained("grpo", "a"))
        for seed in range(3)
    ]
    assert compare_by_task(given) == compare_by_task(given[::-1])
    given.append(write_run(tmp_path / "x", [panel("a", 1, 0)], settings=trained("arpo", "a")))
    assert compare_by_task(given).methods == ("grpo", "arpo")
    assert compare_by_task(given[::-1]).methods == ("arpo", "grpo")


def test_depth_merges_tasks_into_a_row(tmp_path: Path) -> None:
    """As for a shop, in which every task is a product of its own."""
    run = write_run(tmp_path / "one", [panel("a", 1) | panel("b", 0)], settings=trained("grpo", "a"))
    found = compare_by_task([run], depth=1)
    assert found.tasks == {"world": 2} and found.cells["world", "grpo"].returns.value == 0.5
    assert task_tables(found)[0].rows[0][0] == "world"
    assert compare_by_task([run], depth=3).tasks == {"world/a/0": 1, "world/b/0": 1}


def test_the_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one", [panel("a", 1, 0)], settings=trained("grpo", "a"))
    files = ["--markdown", str(tmp_path / "t.md"), "--html", str(tmp_path / "t.html")]
    assert main([f"mine={run}", *files]) == 0
    assert "Mean return by task" in capsys.readouterr().out
    assert "| a | 2 | 0.5 [0, 1] (1) |" in (tmp_path / "t.md").read_text()
    assert "<table>" in (tmp_path / "t.html").read_text()
    assert main(["--depth", "1", run]) == 0
    assert main([str(tmp_path)]) == 1


UNTRAINED = ('algorithm.type = "empo2"', "train.num_steps = 0")


def start(folder: Path) -> str:
    return f'model.initial_checkpoint = "{folder}/checkpoints/step-000009"'


def adapting(num: int, memory: str, folder: Path) -> tuple[str, ...]:
    return (*UNTRAINED, f"evaluation.num_trials = {num}", f'evaluation.memory = "{memory}"', start(folder))


def write_adapting(run: Path, task: str) -> str:
    return write_run(run, [panel(task, 0), panel(task, 1)], settings=adapting(2, "tips", run / "weights"))


def test_a_run_without_returns_of_tasks_is_noted(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    old = Path(write_run(tmp_path / "old", [panel("a", 1, 0)], settings=trained("grpo", "a")))
    [line] = map(json.loads, (old / "evaluations.jsonl").read_text().splitlines())
    del line["task_returns"]
    (old / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    new = write_run(tmp_path / "new", [panel("a", 1, 0)], seed=1, settings=trained("grpo", "a"))
    found = compare_by_task([str(old), new])
    assert found.cells["world/a", "grpo"].num_runs == 1
    assert "old is in no row: its last evaluation has no returns of single tasks" in found.notes


def test_faults_and_missing_seeds_are_noted(tmp_path: Path) -> None:
    """A panel of two tasks, of which a fault took one away from a seed: its mean is over the others."""
    both = panel("a", 1, 0) | panel("b", 0, 0)
    given = [
        write_run(tmp_path / f"r{seed}", [both if seed else panel("a", 1, 0)], seed=seed, num_faults=3 - seed,
                  settings=trained("grpo", "a"))
        for seed in range(4)
    ]  # fmt: skip
    found = compare_by_task(given)
    assert "grpo has 4 runs on a task, but 3 on world/b" in found.notes
    assert "the mean over tasks of grpo leaves out 1 seed(s) that not every task has" in found.notes
    assert "r1: 2 rollouts of the last evaluation ended in a fault, without a score" in found.notes
    assert not [note for note in found.notes if "r3" in note and "fault" in note]
    assert found.averages["grpo"].num_runs == 3


def test_the_mean_over_tasks_of_evaluations_with_one_seed_is_over_checkpoints(tmp_path: Path) -> None:
    """Three checkpoints, all played with seed 0: each is a run of its own in the mean, as in the cells."""
    values = (0.0, 0.3, 0.9)
    given = [
        write_run(tmp_path / f"e{n}", [panel("a", one, one) | panel("b", one, one)],
                  settings=(*UNTRAINED, start(tmp_path / f"t{n}")))
        for n, one in enumerate(values)
    ]  # fmt: skip
    found = compare_by_task([f"mine={one}" for one in given])
    assert found.cells["world/a", "mine"].num_runs == found.averages["mine"].num_runs == 3
    assert found.averages["mine"].returns.value == pytest.approx(found.cells["world/a", "mine"].returns.value)
    apart = [
        write_run(
            tmp_path / f"{task}{n}",
            [panel(task, 1, 0)],
            settings=(*UNTRAINED, start(tmp_path / f"t{task}{n}")),
        )
        for task in "ab"
        for n in range(2)
    ]
    found = compare_by_task([f"mine={one}" for one in apart])  # no seed says which belong together
    assert "mine" not in found.averages
    assert "the mean over tasks of mine leaves out 2 seed(s) that not every task has" in found.notes


def test_the_note_on_coverage_includes_the_seeds_of_the_mean(tmp_path: Path) -> None:
    given = [
        write_run(
            tmp_path / f"{task}{seed}", [panel(task, seed / 9, 0)], seed=seed, settings=trained("grpo", task)
        )
        for task, first in (("a", 0), ("b", 3))
        for seed in range(first, first + 5)
    ]
    found = compare_by_task(given)
    assert found.cells["world/b", "grpo"].num_runs == 5 and found.averages["grpo"].num_runs == 2
    assert any("with 2 seeds about 60 %" in note for note in task_notes(found))


def test_different_conditions_in_a_row_are_noted(tmp_path: Path) -> None:
    short = (*trained("arpo", "a"), "rollout.max_turns = 5")
    given = [
        write_run(
            tmp_path / "one", [panel("a", 1)], settings=(*trained("grpo", "a"), "rollout.max_turns = 9")
        ),
        write_run(tmp_path / "two", [panel("a", 1)], settings=short),
    ]
    [note] = [one for one in compare_by_task(given).notes if "conditions" in one]
    assert "(rollout.max_turns)" in note


def test_only_reflexion_ends_after_a_trial_that_solved_everything(tmp_path: Path) -> None:
    """Reflexion ends there, and a memory of tips plays on: its next trial may solve less."""
    given = [
        write_run(
            tmp_path / memory, [panel("b", 0), panel("b", 1)], settings=adapting(3, memory, tmp_path / "gone")
        )
        for memory in ("tips", "reflexion")
    ]
    longer = write_run(
        tmp_path / "whole", [panel("b", 0)] * 3, seed=1, settings=adapting(3, "tips", tmp_path / "gone")
    )
    found = compare_by_task([f"tips={given[0]}", f"reflexion={given[1]}", f"tips={longer}"])
    assert "tips was cut: 2 of 3 trials" in found.notes and "reflexion was cut" not in str(found.notes)
    [curves] = found.curves
    assert curves.bands["reflexion"].value[2] == 1.0
    assert task_tables(found)[-1].rows[2][1:] == ("not measured", "1")


def test_models_of_one_name_in_two_folders_are_not_seeds_of_one_method(tmp_path: Path) -> None:
    given = [
        write_run(tmp_path / place, [panel("a", 1)], seed=seed,
                  settings=(*trained("grpo", "a"), f'model.name = "/{place}/model"'))
        for seed, place in enumerate(("one", "two"))
    ]  # fmt: skip
    with pytest.raises(Incomparable, match=r"differ in model\.name"):
        compare_by_task(given)


def test_settings_added_later_match_earlier_runs_at_their_default(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [panel("a", 1)], settings=trained("grpo", "a"))
    none = (*trained("grpo", "a"), "train.stages = []")
    new = write_run(tmp_path / "new", [panel("a", 1)], seed=1, settings=none)
    assert compare_by_task([old, new]).cells["world/a", "grpo"].num_runs == 2
    assert list(group_runs([load_run(Path(one), one) for one in (old, new)])) == ["grpo"]
    newer = write_run(
        tmp_path / "newer", [panel("a", 1)], seed=3,
        settings=(*none, 'environment.response_format = "refuse"'),
    )  # fmt: skip
    assert list(group_runs([load_run(Path(one), one) for one in (old, newer)])) == ["grpo"]
    staged = write_run(
        tmp_path / "staged", [panel("a", 1)], seed=2,
        settings=(*trained("grpo", "a"), 'train.stages = [{tasks = ["a/*"], num_steps = "none"}]'),
    )  # fmt: skip
    with pytest.raises(Incomparable, match=r"differ in train\.stages"):
        compare_by_task([new, staged])


def test_every_adapted_task_has_a_figure(tmp_path: Path) -> None:
    """Ten methods, two on each of five tasks; and one task with ten of which eight have a style of line."""
    given = [
        f"method {n} with a long name={write_adapting(tmp_path / str(n), task)}"
        for n, task in enumerate("aabbccddee")
    ]
    page = to_html(task_report(found := compare_by_task(given)))
    assert page.count("<svg") == 5 and "J: method 9 with a long name." in page
    assert "a figure shows" not in " ".join(task_notes(found))
    more = [f"m{n}={write_adapting(tmp_path / f'x{n}', 'z')}" for n in range(10)]
    found = compare_by_task(more)
    assert to_html(task_report(found)).count('class="line s7"') == 2  # the line and its sign in the legend
    assert "a figure shows the first 8 of up to 10 methods; the tables have all" in task_notes(found)
