"""What a table by task says of its runs: nothing is left out of it in silence."""

import json
from pathlib import Path

import pytest

from outrider.evaluation.compare import Incomparable, group_runs, load_run
from outrider.evaluation.compare_report import html_page
from outrider.evaluation.compare_tables import compare_by_task, task_notes, task_tables
from tests.evaluation.test_compare_by_task import panel, trained, write_run

UNTRAINED = ('algorithm.type = "empo2"', "train.num_steps = 0")


def start(folder: Path) -> str:
    return f'model.initial_checkpoint = "{folder}/checkpoints/step-000009"'


def adapting(num: int, memory: str, folder: Path) -> tuple[str, ...]:
    return (*UNTRAINED, f"evaluation.num_trials = {num}", f'evaluation.memory = "{memory}"', start(folder))


def write_adapting(run: Path, task: str) -> str:
    return write_run(run, [panel(task, 0), panel(task, 1)], settings=adapting(2, "tips", run / "weights"))


def test_a_run_without_returns_of_tasks_is_told(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    old = Path(write_run(tmp_path / "old", [panel("a", 1, 0)], settings=trained("grpo", "a")))
    [line] = map(json.loads, (old / "evaluations.jsonl").read_text().splitlines())
    del line["task_returns"]
    (old / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    new = write_run(tmp_path / "new", [panel("a", 1, 0)], seed=1, settings=trained("grpo", "a"))
    found = compare_by_task([str(old), new])
    assert found.cells["world/a", "grpo"].num_runs == 1
    assert "old is in no row: its last evaluation has no returns of single tasks" in found.notes


def test_faults_and_seeds_that_a_task_lost_are_told(tmp_path: Path) -> None:
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
    assert "r1: 2 rollout(s) of the last evaluation ended in a fault and are in no score" in found.notes
    assert not [note for note in found.notes if "r3" in note and "fault" in note]
    assert found.averages["grpo"].num_runs == 3


def test_the_mean_over_tasks_is_over_weights_where_evaluations_name_no_seed(tmp_path: Path) -> None:
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


def test_a_mean_over_fewer_seeds_than_cells_has_its_coverage_told(tmp_path: Path) -> None:
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


def test_conditions_that_differ_in_a_row_are_told(tmp_path: Path) -> None:
    short = (*trained("arpo", "a"), "rollout.max_turns = 5")
    given = [
        write_run(
            tmp_path / "one", [panel("a", 1)], settings=(*trained("grpo", "a"), "rollout.max_turns = 9")
        ),
        write_run(tmp_path / "two", [panel("a", 1)], settings=short),
    ]
    [note] = [one for one in compare_by_task(given).notes if "conditions" in one]
    assert "(rollout.max_turns)" in note


def test_tips_that_were_cut_behind_a_trial_that_solved_all_are_not_held(tmp_path: Path) -> None:
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


def test_runs_from_before_there_were_stages_are_seeds_of_those_without_any(tmp_path: Path) -> None:
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


def test_every_task_that_was_adapted_to_has_its_figure(tmp_path: Path) -> None:
    """Ten methods, two on each of five tasks; and one task with ten of which eight have a style of line."""
    given = [
        f"method {n} with a long name={write_adapting(tmp_path / str(n), task)}"
        for n, task in enumerate("aabbccddee")
    ]
    page = html_page(found := compare_by_task(given))
    assert page.count("<svg") == 5 and "J: method 9 with a long name." in page
    assert "a figure shows" not in " ".join(task_notes(found))
    more = [f"m{n}={write_adapting(tmp_path / f'x{n}', 'z')}" for n in range(10)]
    found = compare_by_task(more)
    assert html_page(found).count('class="line s7"') == 2  # the line and its sign in the legend
    assert "a figure shows the first 8 of up to 10 methods; the tables have all" in task_notes(found)
