"""RAPO against GRPO on the task of the demo, from one cold start, at an equal number of policy tokens, over
seeds.

    python benchmarks/demo_compare.py --out runs/compare [--rapo runs/demo] [--seeds 3]
                                                         [--recipe recipes/demo.toml] [key=value ...]

Repeat the command to continue stopped runs. Prints held-out scores with 95 % intervals, seconds and policy
tokens per step, and executed tool calls.
"""

import argparse
from pathlib import Path

from comparison import at_equal_tokens, evaluations, from_checkpoint, median, records, train
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.printing import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rapo", type=Path, help="a finished RAPO run to use for the first seed")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--recipe", default="recipes/demo.toml")
    arguments, overrides = parser.parse_known_args()
    rows = []
    for seed in range(arguments.seeds):
        rapo = arguments.out / f"rapo-{seed}"
        if seed == 0 and arguments.rapo and (arguments.rapo / "report.html").exists():
            rapo = arguments.rapo
        given = [arguments.recipe, f"seed={seed}", *overrides]
        train(rapo, given)
        grpo = arguments.out / f"grpo-{seed}"
        train(grpo, [*given, *from_checkpoint(rapo), "algorithm.num_hybrid=0", *at_equal_tokens(rapo)])
        rows += [("RAPO", seed, rapo), ("GRPO", seed, grpo)]
    Console().print(scores(rows), costs(rows))


def scores(rows: list[tuple[str, int, Path]]) -> Table:
    table = Table("algorithm", "seed", "evaluation", "score", "tasks", title="held-out score, no retrieval")
    for name, seed, run in rows:
        for one in evaluations(run):
            found = one["metric"]["score"]
            told = Text(score(found["value"], found["ci_low"], found["ci_high"]))
            table.add_row(name, str(seed), one["label"], told, str(one["num_tasks"]))
    return table


def costs(rows: list[tuple[str, int, Path]]) -> Table:
    columns = (
        "algorithm",
        "seed",
        "steps",
        "s/step",
        "policy tokens/step",
        "tool calls/step",
        "reward first",
        "reward last",
    )
    table = Table(*columns, title="cost")
    for name, seed, run in rows:
        lines = records(run)
        cells = [median(run, key) for key in ("time/step", "tokens/policy", "rollout/num_tool_calls")]
        rewards = [f"{lines[0]['reward/mean']:.2f}", f"{lines[-1]['reward/mean']:.2f}"]
        table.add_row(
            name,
            str(seed),
            str(len(lines)),
            f"{cells[0]:.1f}",
            f"{cells[1]:.0f}",
            f"{cells[2]:.0f}",
            *rewards,
        )
    return table


if __name__ == "__main__":
    main()
