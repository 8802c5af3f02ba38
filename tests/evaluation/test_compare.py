"""Comparison of run directories: groups, curves over common costs, verdicts, errors, notes and reports."""

import json
import math
import pickle
import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from html import unescape
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from outrider.errors import ConfigError, DataError, OutriderError
from outrider.evaluation.compare import (
    AXES,
    STEPS,
    Comparison,
    Curves,
    Incomparable,
    Pair,
    checkpoint_rule,
    compare,
)
from outrider.evaluation.compare_report import compare_runs, html_page, markdown_page, notes, tables, verdicts
from outrider.metrics import MetricsWriter
from outrider.runs import Run
from outrider.smoke import SmokeAssets, smoke_checkpoint

HOSTILE = "<script>alert(1)</script>|x"
PANEL = {"split": "test", "temperature": 0.0, "panel_hash": "9f2c" * 16}
TASKS = tuple(f"task-{index}" for index in range(60))


def write_config(run: Path, *, algorithm: str = "grpo", seed: int = 0, settings: Sequence[str] = ()) -> None:
    run.mkdir(parents=True)
    lines = [f"seed = {seed}", f'algorithm.type = "{algorithm}"', *settings]
    (run / "config.toml").write_text("\n".join(lines) + "\n")


def step_values(step: int, *, tokens: float = 100.0) -> dict[str, float | None]:
    return {
        "reward/mean": step / 100,
        "tokens/policy": tokens,
        "rollout/num_tool_calls": 2.0 * tokens,
        "time/step": tokens / 10,
    }


def write_steps(run: Path, rewards: Sequence[float | None], *, tokens: float = 100.0) -> None:
    writer = MetricsWriter(run / "metrics.jsonl")
    writer.write(1, "sft", {"sft/loss": 1.0})
    for step, reward in enumerate(rewards, start=1):
        writer.write(step, "train", step_values(step, tokens=tokens) | {"reward/mean": reward})
    writer.close()


def write_evaluation(run: Path, step: int, score: float | Mapping[str, float], **changes: object) -> None:
    """One line as a run writes it; per-task scores where they are given."""
    mean = score if isinstance(score, float) else math.fsum(score.values()) / len(score)
    metric = {"score": {"value": mean, "ci_low": mean - 0.1, "ci_high": mean + 0.1}}
    line = {"label": f"step {step}", "num_tasks": 60, "step": step, **PANEL, **changes, "metric": metric}
    if not isinstance(score, float):
        line["task_scores"] = dict(score)
    with (run / "evaluations.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def task_scores(share: float, *, seed: int = 0) -> dict[str, float]:
    """Binary scores of a policy that solves about this share; the same tasks are hard for all."""
    difficulty = np.random.default_rng(0).random(len(TASKS)) + 0.1 * np.random.default_rng(100 + seed).random(
        len(TASKS)
    )
    return {task: float(hard < share) for task, hard in zip(TASKS, difficulty, strict=True)}


def make_run(
    run: Path,
    *,
    algorithm: str = "grpo",
    seed: int = 0,
    last: float | Mapping[str, float] = 0.5,
    num_steps: int = 12,
    tokens: float = 100.0,
    settings: Sequence[str] = (),
    **changes: object,
) -> Path:
    write_config(run, algorithm=algorithm, seed=seed, settings=settings)
    write_steps(run, [step / 100 for step in range(1, num_steps + 1)], tokens=tokens)
    write_evaluation(run, 0, 0.1, **changes)
    write_evaluation(run, num_steps, last, **changes)
    return run


def make_group(
    folder: Path, algorithm: str, shares: Sequence[float], *settings: str, by_task: bool = True
) -> list[Path]:
    lasts = [task_scores(share, seed=seed) if by_task else share for seed, share in enumerate(shares)]
    return [
        make_run(folder / f"{algorithm}-{n}", algorithm=algorithm, seed=n, last=last, settings=settings)
        for n, last in enumerate(lasts)
    ]


@pytest.fixture(scope="module")
def clear_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two groups of three seeds, of which one is better on every task."""
    folder = tmp_path_factory.mktemp("clear")
    return make_group(folder, "rapo", [0.85, 0.9, 0.88]) + make_group(folder, "grpo", [0.3, 0.35, 0.32])


@pytest.fixture(scope="module")
def clear(clear_runs: list[Path]) -> Comparison:
    return compare(clear_runs)


def evaluated(run: Path, checkpoint: str, *, seed: int = 0) -> Path:
    """An evaluation of a checkpoint, without training."""
    settings = ("train.num_steps = 0", f'model.initial_checkpoint = "{checkpoint}"')
    write_config(run, seed=seed, settings=settings)
    write_evaluation(run, 0, task_scores(0.5, seed=seed))
    return run


def curves_of(comparison: Comparison, quantity: str, axis: str) -> Curves:
    (found,) = [one for one in comparison.curves if (one.quantity, one.axis) == (quantity, axis)]
    return found


def test_groups_ignore_seed_speed_folder_and_evaluation(tmp_path: Path) -> None:
    given = "model.initial_checkpoint"
    paths = [
        make_run(
            tmp_path / "a", seed=0, settings=["num_threads = 1", f"{given} = 'x/1'", "evaluation.every = 5"]
        ),
        make_run(
            tmp_path / "b", seed=1, settings=["num_threads = 2", f"{given} = 'x/2'", "evaluation.every = 0"]
        ),
        make_run(tmp_path / "c", seed=1, settings=["num_threads = 2", f"{given} = 'none'"]),
        make_run(tmp_path / "d", algorithm="arpo", seed=1, settings=["train.max_policy_tokens = 7"]),
        make_run(tmp_path / "e", algorithm="arpo", seed=2, settings=["train.max_policy_tokens = 8"]),
    ]
    comparison = compare(paths)
    assert [[run.name for run in group.runs] for group in comparison.groups if group.label == "arpo"] == [
        ["d", "e"]
    ]
    others = {
        group.label: [run.name for run in group.runs] for group in comparison.groups if group.label != "arpo"
    }
    assert sorted(others.values()) == [["a", "b"], ["c"]]
    assert all(label.startswith("grpo ") and len(label) == 11 for label in others)
    assert given in dict(comparison.settings)
    assert "num_threads" not in dict(comparison.settings)
    assert any("different numbers of threads" in note for note in notes(comparison))


def test_rapo_without_hybrid_rollouts_is_grpo(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / str(n), algorithm="rapo", settings=[f"algorithm.num_hybrid = {n}"])
        for n in (0, 4)
    ]
    assert [group.label for group in compare(paths).groups] == ["grpo", "rapo"]


def test_the_order_of_the_paths_does_not_matter(clear_runs: list[Path], clear: Comparison) -> None:
    assert markdown_page(compare(clear_runs[::-1])) == markdown_page(clear)


def test_runs_with_the_same_folder_name_have_different_names(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / str(seed) / "run", seed=seed) for seed in (0, 1)]
    assert [run.name for run in compare(paths).groups[0].runs] == ["0/run", "1/run"]


def test_curves_of_runs_with_different_steps_lie_on_common_costs(tmp_path: Path) -> None:
    """Twelve steps of 100 tokens against six of 200 with the same reward a token, and one run that went on
    for longer.
    """
    rewards = [0.1, 0.3, 0.2, 0.4, 0.6, 0.4, 0.5, 0.9, 0.8, 0.6, 1.0, 0.8]
    pairs = [(a + b) / 2 for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
    for name, values, tokens in (("rapo", rewards, 100), ("grpo", pairs, 200), ("arpo", [*pairs, 5.0], 200)):
        write_config(tmp_path / name, algorithm=name)
        write_steps(tmp_path / name, values, tokens=tokens)
    comparison = compare([tmp_path / name for name in ("arpo", "grpo", "rapo")])
    for axis, per_step in (("policy tokens", 200.0), ("tool calls", 400.0), ("seconds", 20.0)):
        curves = curves_of(comparison, "training reward", axis)
        assert curves.x.tolist() == pytest.approx([per_step * n for n in range(1, 7)])
        for band in curves.bands.values():
            assert band.value.tolist() == pytest.approx(pairs)
    steps = curves_of(comparison, "training reward", STEPS)
    assert steps.x.tolist() == [1, 2, 3, 4, 5, 6]
    assert steps.bands["rapo"].value.tolist() == pytest.approx(rewards[:6])
    assert steps.bands["grpo"].value.tolist() == pytest.approx(pairs)


def test_a_resumed_run_has_the_curve_of_the_unbroken_one(tmp_path: Path) -> None:
    rewards = [step / 100 for step in range(1, 13)]
    for name, seed in (("whole", 0), ("resumed", 1), ("doubled", 2)):
        write_config(tmp_path / name, seed=seed)
    write_steps(tmp_path / "whole", rewards)
    write_steps(tmp_path / "resumed", [*rewards[:8], 9.0, 9.0])
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 11, "ki')  # killed while it wrote
    writer = MetricsWriter(tmp_path / "resumed" / "metrics.jsonl")
    writer.cut(writer.num_records - 2)
    for step in range(9, 13):
        writer.write(step, "train", step_values(step))
    writer.close()
    write_steps(tmp_path / "doubled", rewards[:9])
    again = ((10, 900.0), (10, 100.0), (11, 100.0), (12, 100.0))
    lines = [{"step": step, "kind": "train", **step_values(step, tokens=tokens)} for step, tokens in again]
    lines[0]["reward/mean"] = 9.0
    # of a step that is there twice the last counts
    with (tmp_path / "doubled" / "metrics.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(line) + "\n" for line in lines))
    ends = {STEPS: 12.0, "policy tokens": 1200.0, "tool calls": 2400.0, "seconds": 120.0}
    for run in compare([tmp_path / name for name in ("whole", "resumed", "doubled")]).groups[0].runs:
        assert run.rewards.tolist() == rewards
        assert {axis: totals[-1] for axis, totals in run.costs.items()} == ends


def test_scores_between_evaluations_are_interpolated_linearly(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b", tokens=200.0)
    for run, scores in ((a, {0: 0.1, 4: 0.3, 12: 0.7}), (b, {0: 0.1, 6: 0.4, 12: 0.8})):
        (run / "evaluations.jsonl").unlink()
        for step, score in scores.items():
            write_evaluation(run, step, score)
    write_evaluation(a, 0, 0.2, label="after cold start")  # the last of a step stands
    comparison = compare([a, b])
    steps = curves_of(comparison, "held-out score", STEPS)
    assert steps.x.tolist() == [0, 4, 6, 12]
    assert steps.bands["rapo"].value.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.7])
    assert steps.bands["grpo"].value.tolist() == pytest.approx([0.1, 0.3, 0.4, 0.8])
    tokens = curves_of(comparison, "held-out score", "policy tokens")
    assert tokens.x.tolist() == [0, 400, 1200]  # to 1200 of a; b goes on to 2400 alone
    assert tokens.bands["grpo"].value.tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert np.isnan(tokens.bands["grpo"].low).all()


def test_a_weaker_success_rule_has_a_note(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / rule, algorithm=algorithm, settings=(f'environment.success_at = "{rule}"',))
        for rule, algorithm in (("full", "grpo"), ("positive", "rapo"))
    ]
    marked = [note for note in notes(compare(runs)) if "counts as a success" in note]
    assert marked == [
        "positive: Every final score above 0 counts as a success (environment.success_at = positive)."
    ]


def test_a_missing_curve_of_scores_has_a_note(tmp_path: Path) -> None:
    """Runs that were not evaluated before training (``evaluation.at_start = false``) have one point each."""
    runs = [
        make_run(tmp_path / f"{name}-{seed}", algorithm=name, seed=seed)
        for name in ("grpo", "rapo")
        for seed in (0, 1)
    ]
    said = "no curve of held-out scores: "
    assert not any(note.startswith(said) for note in notes(compare(runs)))
    for run in runs[:2]:
        last = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)[-1]
        (run / "evaluations.jsonl").write_text(last)
    [note] = [one for one in notes(compare(runs)) if one.startswith(said)]
    assert note == f"{said}grpo-0 and 1 other run had one evaluation only"


def test_long_curves_are_thinned_to_whole_steps_and_scores_stay_scores(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / str(seed), seed=seed, num_steps=40, last=min(0.7 + 0.3 * seed, 1.0))
        for seed in range(4)
    ]
    # of another panel than the last: not on the curve
    write_evaluation(paths[0], 7, 0.9, panel_hash="0" * 64)
    for step in range(8, 40):
        write_evaluation(paths[0], step, 0.5)
    comparison = compare(paths)
    rewards, scores = (
        curves_of(comparison, quantity, STEPS) for quantity in ("training reward", "held-out score")
    )
    assert [rewards.x[-1], len(rewards.x)] == [scores.x[-1], len(scores.x)] == [40, 24]
    assert not np.any(rewards.x % 1)
    assert scores.x[:2].tolist() == [0, 8]
    assert scores.bands["grpo"].high[-1] == 1.0  # cut: the interval would end above


def test_unknown_values_leave_gaps_and_have_a_note(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    broken = json.loads(lines[3]) | {
        "reward/mean": None,
        "tokens/policy": None,
        "rollout/num_tool_calls": None,
    }
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], json.dumps(broken), *lines[4:]]) + "\n")
    comparison = compare([run, other])
    steps = curves_of(comparison, "training reward", STEPS)
    assert np.isnan(steps.bands["rapo"].value).tolist() == [False, False, True] + [False] * 9
    assert {group.label: group.costs["policy tokens"] for group in comparison.groups} == {
        "rapo": 1100.0,
        "grpo": 1200.0,
    }
    assert "a: 1 step counts as 0 without tokens/policy" in comparison.notes
    lines = re.findall(r'class="line s1" d="([^"]*)"', html_page(comparison))
    assert max(line.count("M") for line in lines) == 2  # broken at the step that is not known


def test_a_clear_difference_has_a_winner(clear: Comparison) -> None:
    (pair,) = clear.pairs
    means = {
        g.label: float(np.mean([np.mean(list(r.evaluations[-1].task_scores.values())) for r in g.runs]))
        for g in clear.groups
    }
    assert (pair.first, pair.second) == ("grpo", "rapo")
    assert pair.verdict.winner == "rapo"
    assert pair.difference.high < 0
    assert pair.difference.value == pytest.approx(means["grpo"] - means["rapo"], abs=0.05)
    assert pair.improvement.value == 0.0
    assert pair.test is not None
    assert pair.test.num_tasks == clear.num_tasks == 60
    assert pair.p_corrected == pair.test.p < 1e-3
    assert re.fullmatch(
        r"rapo scores higher than grpo: \+\d\d points, between \+\d\d and \+\d\d\.", verdicts(clear)[0]
    )


def test_identical_results_have_no_winner(tmp_path: Path) -> None:
    comparison = compare(
        make_group(tmp_path, "rapo", [0.5, 0.6, 0.7]) + make_group(tmp_path, "grpo", [0.5, 0.6, 0.7])
    )
    (pair,) = comparison.pairs
    assert pair.verdict.winner is None
    assert (pair.difference.value, pair.improvement.value) == (0.0, 0.5)
    assert pair.test is not None
    assert pair.test.p == 1.0
    assert re.fullmatch(
        r"No difference shown between grpo and rapo: \+0\.0 points, between -\d+ and \+\d+ \(grpo - rapo\)\.",
        verdicts(comparison)[0],
    )
    (reasons,) = [table for table in tables(comparison) if table.title == "Why no winner"]
    assert [reason for _, reason in reasons.rows] == [
        "over tasks, p = 1 is not below 0.05",
        "over seeds, p = 1 is not below 0.05",
        "the interval of the difference includes 0",
    ]


def one_seed(folder: Path) -> list[Path]:
    return make_group(folder, "rapo", [0.95]) + make_group(folder, "grpo", [0.1] * 3)


def only_means(folder: Path) -> list[Path]:
    return make_group(folder, "rapo", [0.9] * 3, by_task=False) + make_group(
        folder, "grpo", [0.1, 0.11, 0.12]
    )


def stopped_early(folder: Path) -> list[Path]:
    paths = make_group(folder, "rapo", [0.95] * 3) + make_group(folder, "grpo", [0.1] * 3)
    with (paths[0] / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 13, "kind": "train", **step_values(13)}) + "\n")
    return paths


def without_evaluation(folder: Path) -> list[Path]:
    paths = make_group(folder, "rapo", [0.95] * 3) + make_group(folder, "grpo", [0.1] * 3)
    (paths[1] / "evaluations.jsonl").unlink()
    return paths


@pytest.mark.parametrize(
    ("make", "sentence", "note"),
    [
        (one_seed, "(rapo - grpo); rapo has 1 seed, at least 3 are needed.", ""),
        (only_means, "no paired test", "no scores of single tasks: rapo-0, rapo-1, rapo-2"),
        (stopped_early, "rapo-0 was last evaluated at step 12 of 13", ""),
        (without_evaluation, "No two groups have scores", "rapo-1 has no evaluation: its group has no score"),
    ],
)
def test_insufficient_data_has_no_winner_and_a_reason(
    tmp_path: Path, make: Callable[[Path], list[Path]], sentence: str, note: str
) -> None:
    comparison = compare(make(tmp_path))
    assert all(pair.verdict.winner is None for pair in comparison.pairs)
    assert sentence in verdicts(comparison)[0]
    assert not note or note in notes(comparison)


def test_three_groups_are_corrected_for_three_comparisons(tmp_path: Path) -> None:
    paths = [path for algorithm, share in (("rapo", 0.65), ("grpo", 0.5), ("arpo", 0.5))
             for path in make_group(tmp_path, algorithm, [share, share + 0.05, share - 0.05])]  # fmt: skip
    pairs = compare(paths).pairs
    assert [(pair.first, pair.second) for pair in pairs] == [
        ("arpo", "grpo"),
        ("arpo", "rapo"),
        ("grpo", "rapo"),
    ]
    raw = sorted(pair.test.p for pair in pairs if pair.test)
    assert len(raw) == 3
    for pair in pairs:
        assert pair.test is not None
        assert pair.p_corrected is not None
        assert pair.test.p <= pair.p_corrected <= 3 * pair.test.p
    assert min(pair.p_corrected or 0.0 for pair in pairs) == pytest.approx(3 * raw[0])


def test_tasks_that_a_run_could_not_score_are_left_out_of_all(tmp_path: Path) -> None:
    paths = make_group(tmp_path, "rapo", [0.9, 0.9]) + make_group(tmp_path, "grpo", [0.2])
    (paths[0] / "evaluations.jsonl").unlink()
    write_evaluation(paths[0], 12, dict(list(task_scores(0.9).items())[3:]))
    comparison = compare(paths)
    assert comparison.num_tasks == 57
    assert "3 tasks are left out: a fault kept them from being scored in some run" in notes(comparison)


def two_runs(folder: Path, **changes: object) -> list[Path]:
    return [
        make_run(folder / "a", seed=3),
        make_run(folder / "b", algorithm="rapo", **changes),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda f: two_runs(f, panel_hash="0" * 64),
            Incomparable,
            "a and b were not evaluated alike: panels 9f2c9f2c9f2c and 000000000000",
        ),
        (lambda f: two_runs(f, split="valid"), Incomparable, "splits test and valid"),
        (lambda f: two_runs(f, temperature=1.0), Incomparable, "temperatures 0 and 1"),
        (
            lambda f: [*two_runs(f), make_run(f / "c", seed=3)],
            Incomparable,
            "a and c have one configuration and one seed",
        ),
        (lambda f: [*two_runs(f), f / "b" / ".." / "a"], Incomparable, "a run directory is given twice"),
        (lambda f: two_runs(f)[:1], ConfigError, "at least two runs"),
        (lambda f: [*two_runs(f), f], DataError, "is no run that can be compared"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error(
    tmp_path: Path, make: Callable[[Path], list[Path]], kind: type[OutriderError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        compare(make(tmp_path))


def test_unequal_costs_have_a_note(tmp_path: Path) -> None:
    said = notes(
        compare([make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="rapo", tokens=150.0)])
    )
    assert "final scores are not at equal policy tokens: rapo took 1.50 times those of grpo" in said
    assert not any("training steps" in note for note in said)


def test_evaluated_checkpoints_without_training_are_compared_by_score_alone(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, algorithm=name, num_steps=0) for name in ("rapo", "grpo")]
    comparison = compare(paths)
    assert comparison.curves == ()
    assert [group.score.value for group in comparison.groups if group.score] == [0.5, 0.5]
    assert "The runs have no curve in common." in html_page(comparison)


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", page))


def test_the_page_begins_with_a_picture_and_a_sentence_and_folds_the_tests(clear: Comparison) -> None:
    page = html_page(clear)
    picture, sentence, tests = (page.index(part) for part in ("<svg class=", "rapo scores", "<details>"))
    assert picture < sentence < tests and " p " not in text_of(page[page.index("</style>") : tests])
    assert page[picture:].partition("</svg>")[0].count("<circle") == 6  # one a seed
    for group in clear.groups:
        assert group.score is not None and len(group.seed_scores) == 3
        assert min(group.seed_scores) <= group.score.value <= max(group.seed_scores)
    assert "Differences" in page[tests:] and "p over seeds, Holm" in page[tests:]


def test_a_group_without_a_score_and_seeds_of_one_score_are_drawn(tmp_path: Path) -> None:
    paths = make_group(tmp_path, "rapo", [0.5], by_task=False) + make_group(tmp_path, "grpo", [0.1])
    (paths[1] / "evaluations.jsonl").unlink()
    picture = html_page(compare(paths)).partition("<svg class=")[2].partition("</svg>")[0]
    assert picture.count("<circle") == 1 and "nan" not in picture and "grpo" not in picture


def test_a_group_of_imitation_only_is_not_called_by_its_algorithm_alone(tmp_path: Path) -> None:
    settings = ("train.num_steps = 0", "cold_start.num_examples = 4")
    paths = [make_run(tmp_path / "a", num_steps=0, settings=settings), make_run(tmp_path / "b")]
    groups = tables(compare(paths))[0]
    assert [row[0].endswith(" (imitation only)") for row in groups.rows].count(True) == 1


def test_the_command_prints_tables_and_writes_both_files(clear_runs: list[Path], tmp_path: Path) -> None:
    console = Console(file=(out := StringIO()), width=200)
    markdown, html = tmp_path / "out.md", tmp_path / "out.html"
    assert compare_runs(clear_runs, markdown=markdown, html=html, console=console) == 0
    page = html.read_text(encoding="utf-8")
    for text in (out.getvalue(), markdown.read_text(), text_of(page)):
        for part in (
            "rapo scores higher than grpo",
            "At equal cost",
            "1200 policy tokens",
            "rapo-2",
            "sign flips",
            "temperature 0",
        ):
            assert part in text
    assert page.count("<svg") == 1 + 2 * len(AXES)
    assert not list(tmp_path.glob("*.tmp"))


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(tmp_path: Path) -> None:
    text = markdown_page(compare([make_run(tmp_path / "a|b"), make_run(tmp_path / "c", algorithm=HOSTILE)]))
    assert "<script" not in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_names_and_settings_cannot_inject_html(tmp_path: Path) -> None:
    hostile = make_run(tmp_path / "[bold]x", algorithm=HOSTILE, settings=[f"note = '{HOSTILE}'"])
    comparison = compare([hostile, make_run(tmp_path / "plain")])
    whole = html_page(comparison)
    assert not {"script", "img", "iframe", "link", "object", "form"} & set(re.findall(r"<([a-z]+)", whole))
    assert re.search(r"\s(on\w+|src|href)=", whole) is None
    assert "default-src 'none'" in whole
    assert HOSTILE in text_of(whole)
    assert str(tmp_path) not in whole
    console = Console(file=(out := StringIO()), width=250)
    assert compare_runs([hostile, tmp_path / "plain"], markdown=None, html=None, console=console) == 0
    assert "[bold]x" in out.getvalue()


def test_figures_of_many_groups_use_letters_and_stop_at_eight(tmp_path: Path) -> None:
    comparison = compare([make_run(tmp_path / f"r{n}", algorithm=f"algorithm-{n}") for n in range(9)])
    page = text_of(html_page(comparison))
    assert "A: algorithm-0" in page
    assert "H: algorithm-7" in page
    assert "I: algorithm-8" not in page
    assert "the figures show the first 8 of 9 groups" in notes(comparison)


def test_a_comparison_can_be_pickled(clear: Comparison) -> None:
    assert html_page(pickle.loads(pickle.dumps(clear))) == html_page(clear)


def test_scores_are_in_per_cent_and_wide_tables_scroll(clear: Comparison) -> None:
    page = html_page(clear)
    cells = {cell for cell in re.findall("<td>([^<]*)</td>", page) if " % [" in cell or " points [" in cell}
    assert len(cells) >= 3 and all(
        re.match(r"[+-]?\d+\.\d (%|points) \[[+-]?\d+\.\d, [+-]?\d+\.\d\]$", cell) for cell in cells
    )
    assert page.count("<table>") == page.count('<div class="scroll" tabindex="0" role="region"') > 2
    assert (
        ".scroll { overflow-x: auto; max-width: 100%;" in page and "svg { width: 100%; height: auto;" in page
    )


def test_checkpoints_of_one_name_in_two_folders_are_two_groups(tmp_path: Path) -> None:
    """A run directory is named by its user, but its checkpoints are always called ``step-000100``."""
    runs = [evaluated(tmp_path / name, f"/data/{name}/checkpoints/step-000100") for name in ("a", "b")]
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


def test_labels_do_not_depend_on_folders(tmp_path: Path) -> None:
    def labels(place: str) -> list[str]:
        runs = [
            make_run(tmp_path / place / str(n), settings=[f"model.name = '/{place}/m'", f"x = {n}"])
            for n in (1, 2)
        ]
        return [group.label for group in compare(runs).groups]

    assert labels("here") == labels("there")


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


def test_faults_of_the_last_evaluation_have_a_note(tmp_path: Path) -> None:
    paths = make_group(tmp_path, "rapo", [0.9, 0.9]) + make_group(tmp_path, "grpo", [0.2])
    write_evaluation(paths[0], 12, task_scores(0.9), num_faults=4)
    assert "rapo-0: 4 rollouts of the last evaluation ended in a fault, without a score" in notes(
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
    assert "5 tasks are left out: a fault kept them from being scored in some run" in notes(comparison)


def test_an_evaluation_without_a_score_has_a_note(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b")
    # as a run writes it when every rollout ended in a fault
    write_evaluation(run, 12, float("nan"), label="after RAPO")
    comparison = compare([run, other])
    assert any(
        note.startswith("a: evaluations.jsonl: ") and "after RAPO" in note for note in comparison.notes
    )


def test_an_evaluation_of_another_panel_has_a_note(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a", algorithm="rapo"), make_run(tmp_path / "b")
    (run / "evaluations.jsonl").unlink()
    for step, panel in ((0, "0" * 64), (6, "0" * 64), (12, "9f2c" * 16)):
        write_evaluation(run, step, 0.5, panel_hash=panel)
    assert "a: left out: 2 evaluations on another panel than the last" in compare([run, other]).notes


def test_a_group_without_costs_has_a_note(tmp_path: Path) -> None:
    imitation = make_run(
        tmp_path / "sft", algorithm="grpo", num_steps=0, settings=["cold_start.num_examples = 4"]
    )
    said = notes(compare([imitation, make_run(tmp_path / "rapo", algorithm="rapo")]))
    assert "final scores are not at equal training steps: rapo took 12, grpo none" in said


def test_different_conditions_of_the_test_have_a_note(tmp_path: Path) -> None:
    settings = ["rollout.max_turns = 4", "environment.max_calls = 2"]
    said = notes(
        compare([make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="rapo", settings=settings)])
    )
    [line] = [line for line in said if "environment.max_calls, rollout.max_turns" in line]
    assert "not of one test" in line


@pytest.mark.parametrize(("num_seeds", "share"), [(3, "80"), (5, "")])
def test_intervals_over_few_seeds_have_a_note(tmp_path: Path, num_seeds: int, share: str) -> None:
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


def test_names_can_neither_link_nor_control_a_terminal(tmp_path: Path) -> None:
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


def test_large_differences_between_seeds_have_no_winner(tmp_path: Path) -> None:
    """All of one side are above all of the other, over tasks it is beyond doubt, and still three seeds could
    have done so.
    """
    comparison = compare(
        make_group(tmp_path, "rapo", [0.5, 0.65, 0.95]) + make_group(tmp_path, "grpo", [0.1, 0.25, 0.42])
    )
    [pair] = comparison.pairs
    assert pair.p_corrected is not None and pair.p_corrected < 0.05
    assert not pair.difference.low <= 0 <= pair.difference.high
    assert pair.p_seeds is not None and pair.p_seeds > 0.05
    assert pair.verdict.winner is None
    assert any(reason.startswith("over seeds, p = ") for reason in pair.verdict.reasons)


def test_different_numbers_of_samples_have_a_note(tmp_path: Path) -> None:
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


def test_every_number_agrees_with_exact_fractions(tmp_path: Path) -> None:
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


def test_an_unfinished_run_has_a_note_without_a_verdict(tmp_path: Path) -> None:
    """Also where no verdict could say it: with one group there is none."""
    runs = [
        make_run(tmp_path / str(seed), seed=seed, settings=["train.num_steps = 100"]) for seed in range(2)
    ]
    assert "0 was last evaluated at step 12 of 100" in notes(compare(runs))


def test_runs_that_ended_before_their_steps_or_their_budget_have_no_winner(tmp_path: Path) -> None:
    def result(name: str, *settings: str) -> Pair:
        other = make_group(tmp_path / name, "grpo", [0.2] * 3, *settings)
        [pair] = compare([*done, *other]).pairs
        return pair

    done = make_group(tmp_path, "arpo", [0.9] * 3, "train.num_steps = 12")
    assert result("finished", "train.num_steps = 12").verdict.winner == "arpo"
    stopped = result("stopped", "train.num_steps = 100").verdict
    assert stopped.winner is None and any("of 100" in reason for reason in stopped.reasons)
    # a token budget ends a run before its steps are done
    budget = ("train.num_steps = 100", "train.max_policy_tokens = {}")
    spent = result("spent", budget[0], budget[1].format(1200)).verdict
    assert spent.winner == "arpo"
    killed = result("killed", budget[0], budget[1].format(5000)).verdict
    assert killed.winner is None and "grpo-0 had spent 1200 of 5000 policy tokens" in killed.reasons


def test_seeds_of_an_evaluation_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Incomparable, match="same weights"):
        compare([evaluated(tmp_path / str(seed), "a/step-1", seed=seed) for seed in range(3)])


def test_a_group_has_the_name_of_its_preset(tmp_path: Path) -> None:
    runs = make_group(tmp_path / "a", "grpo", [0.9], 'algorithm.preset = "dapo-paper"') + make_group(
        tmp_path / "b", "grpo", [0.2]
    )
    assert {one.label for one in compare(runs).groups} == {"dapo-paper", "grpo"}


def test_reflections_and_discarded_tries_are_policy_tokens(tmp_path: Path) -> None:
    runs = []
    for seed in range(2):
        run = tmp_path / str(seed)
        write_config(run, algorithm="empo2", seed=seed)
        writer = MetricsWriter(run / "metrics.jsonl")
        for step in (1, 2):
            writer.write(
                step,
                "train",
                step_values(step, tokens=100.0) | {"tokens/remarks": 30.0, "tokens/discarded": 7.0},
            )
        writer.close()
        write_evaluation(run, 2, 0.5)
        runs.append(run)
    [members] = compare(runs).groups
    assert members.costs["policy tokens"] == 274.0


def test_final_and_best_scores_are_columns_of_their_own(tmp_path: Path) -> None:
    """One run with 31 evaluations on 128 tasks: the best of them is seven points above the truth by
    chance.
    """
    run = make_run(tmp_path / "many", algorithm="gigpo", num_steps=150)
    (run / "evaluations.jsonl").unlink()
    for index in range(31):
        num_solved = {30: 102, 17: 109}.get(index, 96)
        scores = {f"t{task}": float(task < num_solved) for task in range(128)}
        write_evaluation(run, 5 * index, scores, num_tasks=128)
    other = make_run(tmp_path / "one", num_steps=150)
    (other / "evaluations.jsonl").unlink()
    write_evaluation(other, 150, {f"t{task}": float(task < 64) for task in range(128)}, num_tasks=128)
    groups, runs = (
        next(table for table in tables(compare([run, other])) if table.title == title)
        for title in ("Groups", "Runs")
    )
    assert groups.columns[:6] == ("group", "seeds", "tasks", "final score", "best score", "best by chance")
    one_seed_only = " (one seed: no interval)"
    assert [row[:6] for row in groups.rows] == [
        ("gigpo", "1", "128", f"79.7 %{one_seed_only}", f"85.2 %{one_seed_only}", "+7.0 points of 31"),
        ("grpo", "1", "128", f"50.0 %{one_seed_only}", f"50.0 %{one_seed_only}", "+0.0 points of 1"),
    ]
    assert runs.columns[3:8] == ("final score", "at step", "best score", "best at step", "best by chance")
    assert runs.rows[0][3:8] == ("79.7 %", "150", "85.2 %", "85", "+7.0 points of 31")


def test_best_and_final_scores_have_intervals_over_seeds(tmp_path: Path) -> None:
    runs = make_group(tmp_path, "rapo", [0.5, 0.55, 0.6]) + make_group(tmp_path, "grpo", [0.3, 0.35, 0.4])
    write_evaluation(runs[0], 6, task_scores(0.9))
    [rapo] = [group for group in compare(runs).groups if group.label == "rapo"]
    assert rapo.score is not None and rapo.best is not None
    assert rapo.score.has_interval and rapo.best.has_interval
    assert rapo.best.value > rapo.score.value


def with_checkpoints(folder: Path, *steps: int) -> list[str]:
    paths = [folder / "checkpoints" / f"step-{step:06d}" for step in steps]
    for path in paths:
        path.mkdir(parents=True)
    return [str(path) for path in paths]


def test_a_chosen_checkpoint_is_not_compared_with_a_final_step(tmp_path: Path) -> None:
    best, last = with_checkpoints(tmp_path / "training", 90, 150)
    [other] = with_checkpoints(tmp_path / "other", 150)
    trained = make_run(tmp_path / "trained")
    chosen = evaluated(tmp_path / "chosen", best)
    continued = make_run(tmp_path / "continued", settings=[f'model.initial_checkpoint = "{last}"'])
    for final in (trained, continued, evaluated(tmp_path / "final", other)):
        with pytest.raises(Incomparable, match="chosen evaluates step-000090, which is not the last"):
            compare([chosen, final])
    # the last checkpoint is a final one, and checkpoints of one training may be compared
    assert compare([evaluated(tmp_path / "last", last), trained]).conditions is not None
    comparison = compare([chosen, tmp_path / "last"])
    assert "chosen: step-000090 is not the last checkpoint of its training" in notes(comparison)


def test_copies_of_checkpoints_are_no_checkpoints(tmp_path: Path) -> None:
    """A copy of another one (``step-best``) was the last checkpoint of its training."""
    *_, last = with_checkpoints(tmp_path, 999_999, 1_000_000)
    folder = Path(last).parent
    copies = ["step-999999-backup", "step-best", "best"]
    for name in copies:
        (folder / name).mkdir()
    assets = SmokeAssets(tmp_path / "assets")
    (tmp_path / "config.toml").write_text(f'name = "{assets.model}"')
    assert [path.name for path in Run(tmp_path).checkpoints] == ["step-999999", "step-1000000"]
    assert smoke_checkpoint(str(folder / "step-best"), assets) == last

    def rule(name: str) -> str | None:
        return checkpoint_rule({"train.num_steps": "0", "model.initial_checkpoint": str(folder / name)})

    assert rule("step-1000000") == "final" and rule("gone") is None
    assert {rule(name) for name in ("step-999999", *copies)} == {"chosen"}


def test_an_adaptation_with_fewer_trials_than_planned_has_a_note(tmp_path: Path) -> None:
    runs = [tmp_path / "tips", tmp_path / "reflexion"]
    for run in runs:
        trials = ("train.num_steps = 0", "evaluation.num_trials = 3", f'evaluation.memory = "{run.name}"')
        write_config(run, settings=trials)
        for _ in range(2):
            write_evaluation(run, 0, dict.fromkeys(TASKS, 1.0))
    said = notes(compare(runs))
    assert "tips made 2 of 3 trials" in said
    assert not any("reflexion made" in note for note in said)  # every task is solved


def test_the_scoring_of_options_is_named_with_the_scores(tmp_path: Path) -> None:
    """With the released scoring, some goals are impossible: a score below 1 may be the best one."""
    runs = [
        make_run(
            tmp_path / scoring,
            algorithm=algorithm,
            settings=('environment.type = "webshop"', f'environment.option_scoring = "{scoring}"'),
        )
        for scoring, algorithm in (("fixed", "rapo"), ("released", "grpo"))
    ]
    comparison = compare(runs)
    mark = "Some goals cannot reach the full score (environment.option_scoring = released)."
    assert [note for note in notes(comparison) if "full score" in note] == [f"released: {mark}"]
    [settings] = [table for table in tables(comparison) if table.title == "Settings that differ"]
    assert {row[0]: row[1:] for row in settings.rows}["environment.option_scoring"] == (
        "released",
        "fixed",
    )
    page = markdown_page(comparison)
    assert mark in page


def test_settings_of_later_versions_do_not_split_a_group(tmp_path: Path) -> None:
    """Earlier versions recorded none of them; the table of differences shows them as they were recorded."""
    plain = 'environment.type = "house"', "update.num_epochs = 1"
    added = (
        'environment.context = "chat"', "environment.window.steps = 2", "environment.max_answers = 1",
        "algorithm.invalid_penalty = 0.0", 'algorithm.statistics = "rollouts"', 'algorithm.bonus = "none"',
        'update.mini_batch_samples = "none"',
    )  # fmt: skip
    earlier = make_run(tmp_path / "a", seed=1, settings=plain)
    later = make_run(tmp_path / "b", seed=2, settings=[*plain, *added])
    assert len(compare([earlier, later]).groups) == 1
    penalized = [line.replace("penalty = 0.0", "penalty = 0.1") for line in added]
    other = make_run(tmp_path / "c", seed=3, settings=[*plain, *penalized])
    comparison = compare([later, other])
    assert [key for key, _ in comparison.settings] == ["algorithm.invalid_penalty"]
    assert sorted(dict(comparison.settings)["algorithm.invalid_penalty"]) == ["0.0", "0.1"]
    windows = [
        make_run(tmp_path / name, seed=number, settings=[*plain, 'environment.context = "window"', line])
        for number, (name, line) in enumerate((("d", "environment.window.steps = 2"),
                                               ("e", "environment.window.steps = 5")))
    ]  # fmt: skip
    assert [key for key, _ in compare(windows).settings] == ["environment.window.steps"]


def test_the_older_name_of_gigpo_s_statistics_does_not_split_a_group(tmp_path: Path) -> None:
    older = 'algorithm.episode_statistics = "turns"'
    earlier = make_run(tmp_path / "a", algorithm="gigpo", seed=1, settings=[older])
    newer = 'algorithm.statistics = "samples"'
    later, both = (
        make_run(tmp_path / name, algorithm="gigpo", seed=2, settings=settings)
        for name, settings in (("b", [newer]), ("c", [older, newer]))
    )
    assert len(compare([earlier, later]).groups) == len(compare([earlier, both]).groups) == 1
