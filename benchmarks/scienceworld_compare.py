"""EMPO² and GRPO on one ScienceWorld task, from one cold start per seed, at an equal number of policy tokens.
Needs Java.

    python benchmarks/scienceworld_compare.py --out runs/scienceworld [--seeds 2] [--first-seed 0]
                                              [--variations 6]
                                              [--recipe recipes/scienceworld-cpu.toml] [key=value ...]

A cold start imitates the walkthroughs of training variations. EMPO² and GRPO then train on the first
``--variations`` of them, few enough that a task recurs and has its own tips: one memory per task, ranked by
score, whatever the recipe sets. They are evaluated on test variations without tips; GRPO stops after the step
that reaches EMPO²'s policy tokens, including its tips. Repeat the command to continue stopped runs. Prints
Markdown: mean returns (the simulator's score times ``reward_scale``) with bootstrap intervals over the
variations, success with Wilson intervals, and costs. Two processes with different ``--first-seed`` may share
a folder; a last call prints all seeds.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from comparison import (
    at_equal_tokens,
    evaluations,
    from_checkpoint,
    is_after_training,
    median,
    policy_tokens,
    records,
    train,
)

from outrider.printing import score
from outrider.rollout.evaluate import interval

AFTER_COLD_START: Final = "after cold start"
# few variations, each several times
PER_TASK: Final = ("algorithm.memory.scope=task", "algorithm.memory.rank=score")
GRPO: Final = ("algorithm.memory_probability=0", "algorithm.intrinsic_coefficient=0")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variations", type=int, default=6)
    parser.add_argument("--recipe", default="recipes/scienceworld-cpu.toml")
    arguments, overrides = parser.parse_known_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for seed in seeds:
        play_seed(
            arguments.out,
            [arguments.recipe, f"seed={seed}", *PER_TASK, *overrides],
            seed,
            num_variations=arguments.variations,
        )
    print(
        "\n\n".join([panel(arguments.out, seeds), scores(arguments.out, seeds), costs(arguments.out, seeds)])
    )


def play_seed(out: Path, given: Sequence[str], seed: int, *, num_variations: int) -> None:
    """The three runs of a seed, each unless it is finished."""
    cold, empo2, grpo = (folder(out, name, seed) for name in ("cold", "empo2", "grpo"))
    train(cold, [*given, "train.num_steps=0"], last_label=AFTER_COLD_START)
    start = [*given, *from_checkpoint(cold), f"environment.num_train_variations={num_variations}"]
    train(empo2, start)
    train(grpo, [*start, *GRPO, *at_equal_tokens(empo2)])


def folder(out: Path, name: str, seed: int) -> Path:
    """Where a run of a seed lies."""
    return out / f"{name}-{seed}"


def panel(out: Path, seeds: Sequence[int]) -> str:
    """Return the tasks of all evaluations. Raises SystemExit if they differ."""
    runs = [folder(out, name, seed) for name in ("cold", "empo2", "grpo") for seed in seeds]
    played = {
        (one["panel_hash"], one["num_tasks"], one["temperature"]) for run in runs for one in evaluations(run)
    }
    if len({digest for digest, _, _ in played}) != 1:
        raise SystemExit(f"these evaluations are not of one panel: {sorted(played)}")
    digest = next(iter(played))[0]
    sizes = sorted({number for _, number, _ in played})
    faults = sum(one["num_faults"] for run in runs for one in evaluations(run))
    temperatures = sorted({temperature for _, _, temperature in played})
    return (
        f"Panel {digest}: {' to '.join(map(str, sizes))} variations scored, {faults} faults, "
        f"temperature {', '.join(f'{one:g}' for one in temperatures)}."
    )


def scores(out: Path, seeds: Sequence[int]) -> str:
    """Return return and success of every seed, and their means if there are several."""
    head = ["seed", "before", AFTER_COLD_START, "after EMPO² (policy tokens)", "after GRPO (policy tokens)"]
    rows, found = [], []
    for seed in seeds:
        cold, empo2, grpo = (folder(out, name, seed) for name in ("cold", "empo2", "grpo"))
        before, imitated = evaluations(cold)[0], evaluations(cold)[-1]
        ends = [next(one for one in evaluations(run) if is_after_training(one)) for run in (empo2, grpo)]
        found.append([before, imitated, *ends])
        tokens = ["", "", f" ({policy_tokens(empo2):,})", f" ({policy_tokens(grpo):,})"]
        rows.append([str(seed), *(cell(one) + spent for one, spent in zip(found[-1], tokens, strict=True))])
    if len(found) > 1:
        columns = zip(*found, strict=True)
        rows.append(
            ["mean", *(f"{mean_return(column):.3f}; {mean_success(column):.1f} %" for column in columns)]
        )
    return table(head, rows)


def cell(evaluation: Mapping[str, Any]) -> str:
    """``return [low, high]; success % [low, high]``."""
    returns = list(evaluation["task_returns"].values())
    low, high = interval(returns, binary=False)
    found = evaluation["metric"]["score"]
    success = score(found["value"], found["ci_low"], found["ci_high"])
    return f"{evaluation['mean_return']:.3f} [{low:.3f}, {high:.3f}]; {success}"


def mean_return(column: Sequence[Mapping[str, Any]]) -> float:
    return fmean(one["mean_return"] for one in column)


def mean_success(column: Sequence[Mapping[str, Any]]) -> float:
    """In percent."""
    return fmean(100 * one["metric"]["score"]["value"] for one in column)


def costs(out: Path, seeds: Sequence[int]) -> str:
    """Medians over the training steps."""
    head = [
        "",
        "seed",
        "steps",
        "s/step",
        "policy tokens/step",
        "of tips",
        "groups without signal",
        "reward, first to last step",
    ]
    rows = []
    for name, title in (("empo2", "EMPO²"), ("grpo", "GRPO")):
        for seed in seeds:
            run = folder(out, name, seed)
            lines = records(run)
            acted, tips = (median(run, key) for key in ("tokens/policy", "tokens/remarks"))
            silent = fmean(line["group/fraction_without_signal"] for line in lines)
            rewards = f"{lines[0]['reward/mean']:.2f} to {lines[-1]['reward/mean']:.2f}"
            numbers = [
                f"{median(run, 'time/step'):.0f}",
                f"{acted + tips:,.0f}",
                f"{tips:,.0f}",
                f"{silent:.2f}",
            ]
            rows.append([title, str(seed), str(len(lines)), *numbers, rewards])
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    main()
