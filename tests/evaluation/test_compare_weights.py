"""What a comparison must not take for independent or finished trainings, and what belongs to their cost."""

from pathlib import Path

import pytest

from outrider.evaluation.compare import Incomparable, compare
from outrider.metrics import MetricsWriter
from tests.evaluation.test_compare import make_run, step_values, task_scores, write_config, write_evaluation

ASKED = ("train.num_steps = 100",)


def group(folder: Path, algorithm: str, share: float, *settings: str) -> list[Path]:
    return [
        make_run(
            folder / f"{algorithm}-{seed}",
            algorithm=algorithm,
            seed=seed,
            last=task_scores(share, seed=seed),
            settings=settings,
        )
        for seed in range(3)
    ]


def test_a_run_that_was_stopped_early_decides_nothing(tmp_path: Path) -> None:
    done = group(tmp_path, "arpo", 0.9, "train.num_steps = 12")
    [pair] = compare([*done, *group(tmp_path, "grpo", 0.2, "train.num_steps = 12")]).pairs
    assert pair.verdict.winner == "arpo"
    [pair] = compare([*done, *group(tmp_path / "stopped", "grpo", 0.2, *ASKED)]).pairs
    assert pair.verdict.winner is None and any("of 100" in reason for reason in pair.verdict.reasons)
    [pair] = compare(
        [*done, *group(tmp_path / "budget", "grpo", 0.2, *ASKED, "train.max_policy_tokens = 5")]
    ).pairs
    assert pair.verdict.winner == "arpo"  # a token budget ends a run before its steps are done


def evaluated(folder: Path, seed: int, checkpoint: str) -> Path:
    write_config(
        folder, seed=seed, settings=("train.num_steps = 0", f'model.initial_checkpoint = "{checkpoint}"')
    )
    write_evaluation(folder, 0, task_scores(0.5, seed=seed))
    return folder


def test_seeds_of_an_evaluation_are_no_trainings(tmp_path: Path) -> None:
    with pytest.raises(Incomparable, match="same weights"):
        compare([evaluated(tmp_path / str(seed), seed, "a/step-1") for seed in range(3)])


def test_a_method_is_called_by_its_preset(tmp_path: Path) -> None:
    runs = group(tmp_path / "a", "grpo", 0.9, 'algorithm.preset = "dapo-paper"') + group(
        tmp_path / "b", "grpo", 0.2
    )
    assert {one.label for one in compare(runs).groups} == {"dapo-paper", "grpo"}


def test_checkpoints_that_are_only_evaluated_are_told_apart(tmp_path: Path) -> None:
    result = compare([evaluated(tmp_path / name, 0, name) for name in ("a", "b")])
    assert len(result.groups) == 2 and result.pairs[0].verdict.winner is None


def test_b11_tips_and_what_a_fault_discarded_are_policy_tokens(tmp_path: Path) -> None:
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
