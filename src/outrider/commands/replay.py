"""``outrider replay``, ``compare`` and ``inspect-log``: what is done with runs that are on disk."""

import argparse
from pathlib import Path

from outrider.commands import describe
from outrider.errors import ConfigError
from outrider.printing import plural, print_lines


def add_replay(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replay``."""
    describe(
        parser,
        "Play the recorded rollouts of a training step again, without a model, and print every difference in "
        "observations and rewards. The exit status is 1 if there is one.",
        "outrider replay runs/demo --step 3",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="training step, from 1")
    parser.set_defaults(command=_replay)


def add_inspect_log(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``inspect-log``."""
    describe(
        parser,
        "Write an evaluation as a log file that you can open with inspect view of inspect-ai.",
        "outrider inspect-log runs/demo --out logs/demo.eval",
    )
    parser.add_argument("run", type=Path, help="run directory, or one of eval --tasks")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.eval", help="new file")
    parser.add_argument(
        "--evaluation",
        type=int,
        metavar="N",
        help="line of evaluations.jsonl, from 0 (default: the last one)",
    )
    parser.set_defaults(command=_inspect_log)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``compare``."""
    describe(
        parser,
        "Compare finished runs. Runs that differ in their seed alone are one method: the tables show means "
        "with intervals, tests of every two methods, and curves at equal cost.",
        "outrider compare runs/rapo-0 runs/rapo-1 runs/grpo-0 runs/grpo-1",
        "outrider compare runs/rapo runs/grpo --html comparison.html",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run directories, usually several seeds of each method",
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="also write tables, verdicts and notes as Markdown"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write them as one page with figures of the curves"
    )
    parser.set_defaults(command=_compare)


def _replay(parsed: argparse.Namespace) -> int:
    from outrider.training.replay import replay_step

    return replay_step(parsed.run, parsed.step)


def _inspect_log(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.inspect_log import load_run_evaluation, load_tasks_evaluation, write_log
    from outrider.evaluation.results import RESULTS

    if not (parsed.run / RESULTS).is_file():
        evaluation = load_run_evaluation(parsed.run, parsed.evaluation)
    elif parsed.evaluation is None:
        evaluation = load_tasks_evaluation(parsed.run)
    else:
        raise ConfigError("--evaluation is for run directories: an evaluation of tasks is one")
    write_log(evaluation, parsed.out)
    num_rollouts = len(evaluation.rollouts)
    print_lines(
        *evaluation.notes,
        f"{parsed.out}: {plural(num_rollouts, 'rollout')}; open it with inspect view --log-dir "
        f"{parsed.out.parent}",
    )
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    from outrider.evaluation.compare_report import compare_runs
    from outrider.printing import Terminal

    return compare_runs(parsed.runs, markdown=parsed.markdown, html=parsed.html, console=Terminal())
