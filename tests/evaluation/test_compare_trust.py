"""What a comparison must keep apart, must not take for finished, and must say beside its numbers."""

import json
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from io import StringIO
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from outrider.errors import DataError
from outrider.evaluation.compare import compare
from outrider.evaluation.compare_report import compare_runs, html_page, markdown_page, notes
from tests.evaluation.test_compare import (
    make_group,
    make_run,
    task_scores,
    write_config,
    write_evaluation,
    write_steps,
)


def only_evaluated(run: Path, checkpoint: str, *, seed: int = 0) -> Path:
    write_config(
        run, seed=seed, settings=("train.num_steps = 0", f'model.initial_checkpoint = "{checkpoint}"')
    )
    write_evaluation(run, 0, task_scores(0.5, seed=seed))
    return run


def test_checkpoints_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    """A run directory is named by its user, but its checkpoints are always called ``step-000100``."""
    runs = [only_evaluated(tmp_path / name, f"/data/{name}/checkpoints/step-000100") for name in ("a", "b")]
    comparison = compare(runs)
    assert [len(group.runs) for group in comparison.groups] == [1, 1]
    values = {value for _, cells in comparison.settings for value in cells}
    assert values == {
        ".../a/checkpoints/step-000100",
        ".../b/checkpoints/step-000100",
    }  # no more of the path than tells them apart
    assert "/data" not in html_page(comparison)


def test_models_and_files_of_one_name_in_two_folders_are_not_one_configuration(tmp_path: Path) -> None:
    for key in ("model.name", "environment.train.path"):
        folder = tmp_path / key
        runs = [
            make_run(folder / str(n), seed=n, settings=[f"{key} = '/data/v{n}/same.jsonl'"]) for n in (1, 2)
        ]
        comparison = compare(runs)
        assert len(comparison.groups) == 2
        assert len({group.label for group in comparison.groups}) == 2
        assert (key, (".../v1/same.jsonl", ".../v2/same.jsonl")) in [
            (k, tuple(sorted(v))) for k, v in comparison.settings
        ]


def test_labels_do_not_hang_on_the_folders_of_a_machine(tmp_path: Path) -> None:
    def labels(place: str) -> list[str]:
        runs = [
            make_run(tmp_path / place / str(n), settings=[f"model.name = '/{place}/m'", f"x = {n}"])
            for n in (1, 2)
        ]
        return [group.label for group in compare(runs).groups]

    assert labels("here") == labels("there")


def budget(tokens: int) -> tuple[str, str]:
    return "train.num_steps = 100000", f"train.max_policy_tokens = {tokens}"


def test_a_run_that_was_killed_before_its_token_budget_was_spent_decides_nothing(tmp_path: Path) -> None:
    done = [
        make_run(
            tmp_path / f"a{n}", algorithm="rapo", seed=n, last=task_scores(0.9, seed=n), settings=budget(1200)
        )
        for n in range(3)
    ]
    fine = [
        make_run(tmp_path / f"b{n}", seed=n, last=task_scores(0.2, seed=n), settings=budget(1200))
        for n in range(3)
    ]
    [pair] = compare([*done, *fine]).pairs
    assert pair.verdict.winner == "rapo"
    killed = [
        make_run(tmp_path / f"c{n}", seed=n, last=task_scores(0.2, seed=n), settings=budget(5000))
        for n in range(3)
    ]
    [pair] = compare([*done, *killed]).pairs
    assert pair.verdict.winner is None
    assert "c0 had spent 1200 of 5000 policy tokens" in pair.verdict.reasons


def test_runs_with_and_without_a_token_budget_are_not_one_training(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", seed=0, settings=["train.max_policy_tokens = 7"]),
        make_run(tmp_path / "b", seed=1),
    ]
    comparison = compare(runs)
    assert len(comparison.groups) == 2
    assert [sorted(cells) for key, cells in comparison.settings if key == "train.max_policy_tokens"] == [
        ["given", "none"]
    ]


def test_faults_of_the_last_evaluation_are_said(tmp_path: Path) -> None:
    paths = make_group(tmp_path, "rapo", [0.9, 0.9]) + make_group(tmp_path, "grpo", [0.2])
    write_evaluation(paths[0], 12, task_scores(0.9), num_faults=4)
    assert "rapo-0: 4 rollout(s) of the last evaluation ended in a fault and are in no score" in notes(
        compare(paths)
    )


def test_tasks_that_different_runs_lack_are_all_counted(tmp_path: Path) -> None:
    paths = make_group(tmp_path, "rapo", [0.9]) + make_group(tmp_path, "grpo", [0.2])
    for path, lacking in zip(paths, ((0, 1, 2), (3, 4)), strict=True):
        (path / "evaluations.jsonl").unlink()
        scores = task_scores(0.5)
        write_evaluation(
            path, 12, {key: value for n, (key, value) in enumerate(scores.items()) if n not in lacking}
        )
    comparison = compare(paths)
    assert comparison.num_tasks == 55
    assert "5 task(s) are left out: a fault kept them from being scored in some run" in notes(comparison)


def test_an_evaluation_without_a_score_is_said(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b")
    # as a run writes it when every rollout ended in a fault
    write_evaluation(run, 12, float("nan"), label="after RAPO")
    comparison = compare([run, other])
    assert any(
        note.startswith("a: evaluations.jsonl: ") and "after RAPO" in note for note in comparison.notes
    )


def test_an_evaluation_of_another_panel_is_said(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b")
    (run / "evaluations.jsonl").unlink()
    for step, panel in ((0, "0" * 64), (6, "0" * 64), (12, "9f2c" * 16)):
        write_evaluation(run, step, 0.5, panel_hash=panel)
    assert "a: 2 evaluation(s) on another panel than the last are left out" in compare([run, other]).notes


def test_a_group_that_spent_nothing_is_said_too(tmp_path: Path) -> None:
    imitation = make_run(
        tmp_path / "sft", algorithm="grpo", num_steps=0, settings=["cold_start.num_examples = 4"]
    )
    said = notes(compare([imitation, make_run(tmp_path / "rapo", algorithm="rapo")]))
    assert "final scores are not at equal training steps: rapo took 12, grpo none" in said


def test_different_conditions_of_the_test_are_said(tmp_path: Path) -> None:
    settings = ["rollout.max_turns = 4", "environment.max_calls = 2"]
    said = notes(
        compare([make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="rapo", settings=settings)])
    )
    [line] = [line for line in said if "environment.max_calls, rollout.max_turns" in line]
    assert "not of one test" in line


@pytest.mark.parametrize(("num_seeds", "share"), [(2, "60"), (3, "80"), (4, "90"), (5, "")])
def test_intervals_over_few_seeds_are_called_too_narrow(tmp_path: Path, num_seeds: int, share: str) -> None:
    paths = make_group(tmp_path, "rapo", [0.5] * num_seeds) + make_group(tmp_path, "grpo", [0.5] * num_seeds)
    said = [note for note in notes(compare(paths)) if "interval" in note]
    assert [f"{num_seeds} seeds" in note and f"about {share} %" in note for note in said] == (
        [True] if share else []
    )


def test_a_damaged_number_of_steps_is_named(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", algorithm="rapo", settings=["train.num_steps = 'many'"]),
    ]
    with pytest.raises(DataError, match=r"b is no run that can be compared: train\.num_steps"):
        compare(runs)


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing is no run that can be compared: config\.toml is missing"):
        compare([make_run(tmp_path / "a"), tmp_path / "nothing"])


def test_names_can_neither_link_nor_steer_a_terminal(tmp_path: Path) -> None:
    name = "![x](http://evil.example/pixel)\x1b]0;owned\x07\x1b[31m"
    hostile = make_run(tmp_path / "a", settings=[f"note = {json.dumps(name)}"])
    comparison = compare([hostile, make_run(tmp_path / "b", algorithm="rapo")])
    page = markdown_page(comparison)
    assert "](http" not in page
    console = Console(file=(out := StringIO()), width=250)
    compare_runs([hostile, tmp_path / "b"], markdown=None, html=None, console=console)
    for text in (page, out.getvalue()):
        assert "evil.example" in text  # it is shown
        assert "\x1b" not in text and "\x07" not in text


def test_a_step_that_cost_more_than_another_run_has_in_all(tmp_path: Path) -> None:
    """Curves of a run with one step of 5,000 tokens and of one with twelve of 100: on what both have, and
    nothing made up.
    """
    write_config(tmp_path / "a", algorithm="rapo")
    write_steps(tmp_path / "a", [0.7], tokens=5000.0)
    comparison = compare([tmp_path / "a", make_run(tmp_path / "b")])
    [curves] = [
        one for one in comparison.curves if one.axis == "policy tokens" and one.quantity == "training reward"
    ]
    assert curves.x.tolist() == [1200.0]
    assert curves.bands["rapo"].value.tolist() == pytest.approx([0.7])
    assert curves.bands["grpo"].value.tolist() == pytest.approx([0.065])


def spread(shares: Mapping[str, tuple[float, ...]], folder: Path) -> list[Path]:
    return [path for name, values in shares.items() for path in make_group(folder, name, values)]


def test_seeds_that_differ_more_than_the_groups_carry_no_winner(tmp_path: Path) -> None:
    """All of one side are above all of the other, over tasks it is beyond doubt, and still three seeds could
    have done so.
    """
    comparison = compare(spread({"rapo": (0.5, 0.65, 0.95), "grpo": (0.1, 0.25, 0.42)}, tmp_path))
    [pair] = comparison.pairs
    assert pair.p_corrected is not None and pair.p_corrected < 0.05
    assert not pair.difference.low <= 0 <= pair.difference.high
    assert pair.p_seeds is not None and pair.p_seeds > 0.05
    assert pair.verdict.winner is None
    assert any(reason.startswith("over seeds, p = ") for reason in pair.verdict.reasons)


def test_evaluations_with_different_numbers_of_samples_are_said(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(num), algorithm=name, settings=[f"evaluation.num_samples = {num}"])
            for num, name in ((1, "rapo"), (4, "grpo"))]  # fmt: skip
    assert "the evaluations drew different numbers of samples a task (1, 4): their noise differs" in notes(
        compare(runs)
    )


def middle_half(numbers: Sequence[Fraction]) -> Fraction:
    """Mean of the middle half, by repeating each value four times."""
    repeated = sorted(number for number in numbers for _ in range(4))
    return sum(repeated[len(numbers) : -len(numbers)], Fraction(0)) / (2 * len(numbers))


def sign_flip_reference(first: Sequence[Fraction], second: Sequence[Fraction]) -> Fraction:
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    sums = [
        abs(sum(sign * gap for sign, gap in zip(signs, gaps, strict=True)))
        for signs in product((1, -1), repeat=len(gaps))
    ]
    return Fraction(sum(one >= abs(sum(gaps)) for one in sums), len(sums))


def test_files_to_numbers_against_fractions(tmp_path: Path) -> None:
    """Three groups of three to five runs on eight tasks, from the files alone: every value but the intervals,
    exactly.
    """
    draw = random.Random(3)
    solved = {
        name: [[draw.random() < share for _ in range(8)] for _ in range(num)]
        for name, share, num in (("arpo", 0.3, 3), ("grpo", 0.4, 4), ("rapo", 0.8, 5))
    }
    paths = [
        make_run(
            tmp_path / f"{name}-{seed}",
            algorithm=name,
            seed=seed,
            last={f"t{n}": float(ok) for n, ok in enumerate(row)},
        )
        for name, rows in solved.items()
        for seed, row in enumerate(rows)
    ]
    comparison = compare(paths)
    means = {name: [Fraction(sum(row), 8) for row in rows] for name, rows in solved.items()}
    for group in comparison.groups:
        assert group.score is not None
        assert group.score.value == pytest.approx(float(middle_half(means[group.label])), abs=1e-12)
    raw = []
    for pair in comparison.pairs:
        a, b = means[pair.first], means[pair.second]
        higher = sum((Fraction(x > y) + Fraction(x == y, 2) for x, y in product(a, b)), Fraction(0)) / (
            len(a) * len(b)
        )
        by_task = [
            [Fraction(sum(row[n] for row in rows), len(rows)) for n in range(8)]
            for rows in (solved[pair.first], solved[pair.second])
        ]
        assert pair.test is not None
        assert pair.improvement.value == pytest.approx(float(higher), abs=1e-12)
        assert pair.difference.value == pytest.approx(float(middle_half(a) - middle_half(b)), abs=1e-12)
        assert pair.test.p == pytest.approx(float(sign_flip_reference(*by_task)), abs=1e-12)
        raw.append(pair.test.p)
    smallest, middle, largest = sorted(raw)
    stepped = [
        min(1.0, 3 * smallest),
        min(1.0, max(3 * smallest, 2 * middle)),
        min(1.0, max(3 * smallest, 2 * middle, largest)),
    ]
    assert sorted(pair.p_corrected or 0.0 for pair in comparison.pairs) == pytest.approx(stepped)


def test_a_narrow_terminal_folds_and_cuts_nothing(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"a-long-name-of-a-run-{name}", algorithm=name) for name in ("grpo", "rapo")]
    compare_runs(paths, markdown=None, html=None, console=Console(file=(out := StringIO()), width=72))
    assert "…" not in out.getvalue()


def test_an_unfinished_run_is_said_beside_its_score_too(tmp_path: Path) -> None:
    """Also where no verdict could say it: with one group there is none."""
    runs = [
        make_run(tmp_path / str(seed), seed=seed, settings=["train.num_steps = 100"]) for seed in range(2)
    ]
    assert "0 was last evaluated at step 12 of 100" in notes(compare(runs))
