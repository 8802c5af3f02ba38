"""Tool calls of GRPO and ARPO at equal numbers of leaves, with a real model on the questions of the demo,
without updates.

    python benchmarks/tool_budget.py --checkpoint runs/demo/checkpoints/step-000000
                                     [--leaves 8] [--groups 16] [key=value ...]

Calls in a shared prefix count once. The paper (arXiv 2507.19849, Fig. 7) claims about half of GRPO's calls in
training.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from outrider.config import load_settings
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import Scheduler
from outrider.training.components import Components
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.training.step_metrics import branch_metrics, rollout_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/factbook-two-hops.toml"))
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16)
    arguments, overrides = parser.parse_known_args()
    half = arguments.leaves // 2
    sides = {
        "GRPO": [f"algorithm.first_wave={arguments.leaves}"],
        "ARPO": [f"algorithm.first_wave={half}"],
        "ARPO, threshold": [f"algorithm.first_wave={half}", "algorithm.decision=threshold"],
        "ARPO, forks at random": [f"algorithm.first_wave={half}", "algorithm.entropy_weight=0"],
    }
    columns = ("", "calls", "calls a leaf", "calls shared", "forks", "return", "policy tokens", "seconds")
    table = Table(*columns, title=f"{arguments.groups} groups of {arguments.leaves} leaves")
    for name, chosen in sides.items():
        table.add_row(name, *row(arguments, [*chosen, *overrides]))
    Console().print(table)


def row(arguments: argparse.Namespace, overrides: list[str]) -> list[str]:
    fixed = [
        f"model.initial_checkpoint={arguments.checkpoint}",
        f"algorithm.group_size={arguments.leaves}",
        "train.tasks_per_step=1",
        "cold_start.num_examples=0",
    ]
    text = (
        arguments.recipe.read_text().replace('type = "rapo"', 'type = "arpo"').replace("num_hybrid = 4\n", "")
    )
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(text)
        settings = load_settings(RunSettings, file=recipe, overrides=[*fixed, *overrides])
        parts = build(
            settings, buffer_path=Path(folder) / "buffer", resumed=False, on_tokens=lambda _: None, note=print
        )
        began = time.perf_counter()
        report = scheduler(parts).run(
            parts.train_tasks[: arguments.groups], modes=parts.algorithm.modes, training_step=0
        )
        seconds = time.perf_counter() - began
        parts.factory.close()
    values = rollout_metrics(report.traces) | branch_metrics(report.traces)
    shown = (
        "rollout/num_tool_calls",
        "rollout/tool_calls_per_leaf",
        "rollout/num_tool_calls_shared",
        "branch/num_forks",
    )
    cells = [f"{values.get(key, 0.0):.4g}" for key in (*shown, "reward/mean", "tokens/policy")]
    return [*cells, f"{seconds:.1f}"]


def scheduler(parts: Components) -> Scheduler:
    settings = parts.settings
    return Scheduler(
        engine=parts.engine,
        renderer=parts.renderer,
        factory=parts.factory,
        limits=settings.limits,
        sampling=Sampling(stop=parts.task_set.stop),
        run_seed=settings.seed,
        hooks=parts.algorithm.hooks,
        max_concurrent=settings.num_concurrent,
    )


if __name__ == "__main__":
    main()
