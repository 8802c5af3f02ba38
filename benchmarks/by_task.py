"""EMPO²'s per-task table and its adaptation curves: one model per task, method and seed, and the effect of
its memory on another task.

    python -m benchmarks.by_task RECIPE [section.key=value ...] --out DIR [--tasks A B ...] [--seeds 3]
        [--first-seed 0] [--methods naive reflexion retrospex grpo empo2] [--critic FILE] [--trials 10]
        [--transfers A:B ...] [--setting 'environment.task_names=["{task}"]']

Table 1 of arXiv 2602.23008: rows are tasks, columns methods. ``--transfers A:B`` (Fig. 1 and 8) evaluates the
weights that a method reached on A for ``--trials`` trials on B, with an initially empty memory and fixed
weights. ``--setting`` is the setting that selects a task. Reflexion has ``--trials`` trials, naive one.
Retrospex requires ``--critic``, a file of ``outrider critic``.

You can stop the command at any time and repeat it to continue: trainings resume from their checkpoints,
interrupted evaluations start again. Several calls may share a folder, with other tasks, methods or seeds;
``--only-report`` runs nothing and prints the finished runs. Output: ``table.md``, ``table.html``,
``adaptation.md`` and ``adaptation.html`` in DIR. ``--smoke`` shortens every run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.by_task_runs import METHODS, TRAINED, Piece, Plan, play, play_smoke
from benchmarks.compare_by_task import compare_by_task, task_report
from outrider.errors import ConfigError, OutriderError
from outrider.evaluation.compare_report import show_report
from outrider.printing import Terminal

TASKS: Final = (
    "chemistry-mix", "chemistry-mix-paint-secondary-color", "chemistry-mix-paint-tertiary-color",
    "find-animal", "find-living-thing", "find-non-living-thing", "find-plant", "identify-life-stages-1",
    "identify-life-stages-2", "lifespan-longest-lived", "lifespan-longest-lived-then-shortest-lived",
    "lifespan-shortest-lived", "power-component", "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity", "test-conductivity-of-unknown-substances", "measure-melting-point-known-substance",
    "use-thermometer",
)  # fmt: skip
"""Of the paper's Table 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed or was stopped, 2 bad configuration, 130 interrupted."""
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    rest += parsed.overrides
    # an option with several values consumes the following words
    for name in ("tasks", "methods", "transfers"):
        given = vars(parsed)[name]
        rest += [one for one in given if "=" in one]
        vars(parsed)[name] = [one for one in given if "=" not in one]
    if not all("=" in one and not one.startswith("-") for one in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        plan = _plan(parsed, rest)
        if not parsed.only_report:
            launch = play_smoke if parsed.smoke else play
            for piece in plan.pieces():
                launch(piece)
        reports = {"table": plan.table(), "adaptation": plan.adaptations()}
        found = {name: [one for one in pieces if one.is_begun] for name, pieces in reports.items()}
        if not any(found.values()):
            raise ConfigError(f"none of these runs is in {parsed.out}: there is nothing to report")
        for name, pieces in found.items():
            _report(parsed.out, name, pieces)
    except OutriderError as error:
        print(f"benchmarks.by_task: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("benchmarks.by_task: interrupted; repeat the command to continue", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.by_task", description="A row a task, a column a method; and adaptation."
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of every run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and tables")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK")
    parser.add_argument("--methods", nargs="+", default=["naive", "reflexion", "grpo", "empo2"])
    parser.add_argument("--seeds", type=int, default=3, help="of each training")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=10, help="of Reflexion and of adaptations")
    parser.add_argument(
        "--transfers", nargs="+", default=[], metavar="A:B", help="adapt a model trained on A to B"
    )
    parser.add_argument("--setting", default='environment.task_names=["{task}"]', metavar="KEY=VALUE")
    parser.add_argument("--critic", type=Path, help="of outrider critic, for retrospex")
    parser.add_argument("--only-report", action="store_true", help="run nothing, print the finished runs")
    parser.add_argument("--smoke", action="store_true", help="every run in its smoke size")
    return parser


def _plan(parsed: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    if unknown := [one for one in parsed.methods if one not in METHODS]:
        raise ConfigError(f"unknown methods {', '.join(unknown)}; known: {', '.join(METHODS)}")
    if "retrospex" in parsed.methods and parsed.critic is None:
        raise ConfigError("retrospex needs --critic FILE, which outrider critic writes")
    if "{task}" not in parsed.setting:
        raise ConfigError("--setting needs {task} where the name of the task belongs")
    transfers = [tuple(one.split(":")) for one in dict.fromkeys(parsed.transfers)]
    if not all(len(one) == 2 and all(one) for one in transfers):
        raise ConfigError("--transfers are pairs of tasks, A:B")
    if transfers and not set(TRAINED) & set(parsed.methods):
        raise ConfigError(f"--transfers need one of {', '.join(TRAINED)} among --methods")
    if parsed.seeds < 1 or parsed.trials < 1:
        raise ConfigError("--seeds and --trials must be at least 1")
    return Plan(
        recipe=parsed.recipe, out=parsed.out, tasks=list(dict.fromkeys(parsed.tasks)),
        methods=list(dict.fromkeys(parsed.methods)),
        seeds=range(parsed.first_seed, parsed.first_seed + parsed.seeds), num_trials=parsed.trials,
        transfers=[(one[0], one[1]) for one in transfers], setting=parsed.setting, critic=parsed.critic,
        overrides=overrides,
    )  # fmt: skip


def _report(out: Path, name: str, pieces: Sequence[Piece]) -> None:
    if pieces:
        given = [f"{piece.column}={piece.run}" for piece in pieces]
        markdown, html = out / f"{name}.md", out / f"{name}.html"
        show_report(task_report(compare_by_task(given)), markdown=markdown, html=html, console=Terminal())


if __name__ == "__main__":
    sys.exit(main())
