"""RAPO against GRPO on the demo's task, from one cold start, at an equal number of policy tokens, over seeds.

    python benchmarks/demo_compare.py --out runs/compare [--rapo runs/demo] [--seeds 3] [--recipe recipes/demo.toml] [key=value ...]

Every run is resumable: a second call continues where the first was stopped. Prints held-out scores with 95 % intervals,
seconds and policy tokens a step, and executed tool calls.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


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
        train(rapo, [arguments.recipe, f"seed={seed}", *overrides])
        tokens = int(records(rapo)[-1]["tokens/policy_total"])
        grpo = arguments.out / f"grpo-{seed}"
        start = [f"model.initial_checkpoint={rapo / 'checkpoints' / 'step-000000'}", "cold_start.num_examples=0"]
        equal = ["algorithm.num_hybrid=0", f"train.max_policy_tokens={tokens}", "train.num_steps=1000"]
        train(grpo, [arguments.recipe, f"seed={seed}", *overrides, *start, *equal])
        rows += [("RAPO", seed, rapo), ("GRPO", seed, grpo)]
    Console().print(scores(rows), costs(rows))


def train(run: Path, arguments: list[str]) -> None:
    """Start, continue or skip a run."""
    if (run / "report.html").exists() and any(e["label"].startswith("after") and e["step"] > 0 for e in evaluations(run)):
        return
    target = ["--resume", str(run)] if (run / "config.toml").exists() else [*arguments, "--run", str(run)]
    subprocess.run([sys.executable, "-m", "outrider", "train", *target], check=True)


def evaluations(run: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def records(run: Path) -> list[dict]:  # type: ignore[type-arg]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def scores(rows: list[tuple[str, int, Path]]) -> Table:
    table = Table("algorithm", "seed", "evaluation", "score %", "95 % interval", "tasks", title="held-out score, no retrieval")
    for name, seed, run in rows:
        for one in evaluations(run):
            score = one["metric"]["score"]
            interval = f"{100 * score['ci_low']:.1f} - {100 * score['ci_high']:.1f}"
            table.add_row(name, str(seed), one["label"], f"{100 * score['value']:.1f}", interval, str(one["num_tasks"]))
    return table


def costs(rows: list[tuple[str, int, Path]]) -> Table:
    columns = ("algorithm", "seed", "steps", "s/step", "policy tokens/step", "tool calls/step", "reward first", "reward last")
    table = Table(*columns, title="cost")
    for name, seed, run in rows:
        lines = records(run)
        cells = [
            statistics.median(line[key] for line in lines) for key in ("time/step", "tokens/policy", "rollout/num_tool_calls")
        ]
        rewards = [f"{lines[0]['reward/mean']:.2f}", f"{lines[-1]['reward/mean']:.2f}"]
        table.add_row(name, str(seed), str(len(lines)), f"{cells[0]:.1f}", f"{cells[1]:.0f}", f"{cells[2]:.0f}", *rewards)
    return table


if __name__ == "__main__":
    main()
