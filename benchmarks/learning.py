"""What every method learns at equal policy tokens: on the toy suite, and on the Factbook task with the real
model.

    python -m benchmarks.learning toys --out DIR [--seeds 10] [--toys lock corridor hidden]
                                                 [--methods grpo rapo ...]
    python -m benchmarks.learning factbook --out DIR [--seeds 3] [--policy-tokens N]
                                                     [--methods ...] [section.field=value ...]
    ... --processes 2       as many concurrent trainings, with one thread each; --status prints the progress

You can stop the command at any time and repeat it to continue; --only-report prints the finished trainings.
With --processes, a failed training is reported at the end and the others continue; a killed one is resumed.
Two calls may share a folder, also with different --first-seed; a last call with all seeds prints them
together. Tables are printed and written to DIR/toys.md and DIR/factbook.md. The toys take minutes, the
Factbook a quarter of an hour per method and seed on two cores.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.learning_factbook import Plan, compare_all, factbook_jobs, launch_outrider, train_all
from benchmarks.learning_jobs import Job, Runner, log_file
from benchmarks.learning_methods import Method
from benchmarks.learning_status import progress, status_table
from benchmarks.learning_tables import factbook_notes, factbook_table, toy_table
from benchmarks.learning_toys import ARENAS, play_all, toy_jobs
from outrider.errors import ConfigError, OutriderError
from outrider.training.policy import set_threads


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed or was stopped, 2 bad configuration, 130 interrupted."""
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.methods:  # --methods consumes all following words
        rest += [one for one in parsed.methods if "=" in one]
        parsed.methods = [one for one in parsed.methods if "=" not in one]
    if rest and (
        parsed.task != "factbook" or not all("=" in one and not one.startswith("-") for one in rest)
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if parsed.processes is not None and parsed.processes < 1:
            raise ConfigError("--processes must be at least 1")
        return toys(parsed) if parsed.task == "toys" else factbook(parsed, rest)
    except OutriderError as error:
        print(f"benchmarks.learning: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("benchmarks.learning: interrupted; repeat the command to continue", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description="What every method learns."
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, num_seeds, told in (
        ("toys", 10, "three toys"),
        ("factbook", 3, "the Factbook with the real model"),
    ):
        task = tasks.add_parser(name, help=told)
        task.add_argument("--out", type=Path, required=True, help="folder of the results")
        task.add_argument("--seeds", type=int, default=num_seeds)
        task.add_argument("--first-seed", type=int, default=0)
        task.add_argument("--methods", nargs="+", metavar="METHOD", help="only these")
        task.add_argument(
            "--processes",
            type=int,
            metavar="N",
            help="N trainings at a time, each in a process of one thread",
        )
        task.add_argument(
            "--status", action="store_true", help="run nothing, print the progress and the remaining time"
        )
        # arguments of the processes of --processes
        task.add_argument("--no-report", action="store_true", help=argparse.SUPPRESS)
        task.add_argument(
            "--only-report", action="store_true", help="run nothing, print the finished trainings"
        )
        if name == "toys":
            task.add_argument("--toys", nargs="+", choices=[arena.name for arena in ARENAS])
            task.add_argument(
                "--policy-tokens", type=int, help="budget on every toy (default: each toy's own)"
            )
        else:
            task.add_argument("--recipe", type=Path, default=Path("recipes/factbook-two-hops.toml"))
            task.add_argument(
                "--policy-tokens",
                type=int,
                help="budget of every run (default: the tokens of RAPO in the recipe's steps)",
            )
    return parser


def toys(parsed: argparse.Namespace) -> int:
    """Play and show the toy suite."""
    set_threads(1)
    arenas = [arena for arena in ARENAS if not parsed.toys or arena.name in parsed.toys]
    every = [method for arena in arenas for method in arena.methods()]
    wanted = {method.key for method in choose_methods(every, parsed.methods)}
    plans = [
        (arena, chosen, parsed.policy_tokens or arena.max_policy_tokens)
        for arena in arenas if (chosen := [method for method in arena.methods() if method.key in wanted])
    ]  # fmt: skip
    failed = False
    if parsed.processes or parsed.status:
        jobs = [
            job for arena, chosen, tokens in plans
            for job in toy_jobs(parsed.out, arena, chosen, seeds=_seeds(parsed), max_policy_tokens=tokens)
        ]  # fmt: skip
        failed = run_jobs(parsed, jobs)
        if parsed.status:
            return 0
        parsed.only_report = True
    parts = []
    for arena, chosen, tokens in plans:
        results = play_all(
            parsed.out, arena, chosen, seeds=_seeds(parsed), max_policy_tokens=tokens,
            only_load=parsed.only_report, note=_note
        )  # fmt: skip
        if parsed.no_report:
            continue
        table = toy_table(chosen, results, toy=arena.name, num_seeds=parsed.seeds).text
        played = f"About {tokens:,} policy tokens a run, seeds {_seeds(parsed)[0]} to {_seeds(parsed)[-1]}."
        parts.append(f"### {arena.title}\n\n{played}\n\n{table}")
        _write(parsed.out / "toys.md", "\n\n".join(parts))
    print("\n\n".join(parts))
    return int(failed)


def factbook(parsed: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train the unfinished runs and print the comparison after every seed."""
    plan = Plan(
        recipe=parsed.recipe,
        out=parsed.out.resolve(),
        seeds=_seeds(parsed),
        policy_tokens=parsed.policy_tokens,
        overrides=with_one_thread(overrides) if parsed.processes else tuple(overrides),
    )
    chosen = choose_methods(plan.methods(), parsed.methods)

    def report() -> None:
        comparison = compare_all(plan, chosen)
        if comparison is not None:
            notes = "\n".join(f"- {note}" for note in factbook_notes(chosen, comparison))
            text = f"{factbook_table(chosen, comparison).text}\n\n{notes}".strip()
            _write(plan.out / "factbook.md", text)
            print(text, flush=True)

    if parsed.status or parsed.processes:
        failed = run_jobs(parsed, factbook_jobs(plan, chosen))
        if not parsed.status:
            report()
        return int(failed)
    if parsed.only_report:
        report()
    else:
        train_all(plan, chosen, launch=launch_outrider, after_seed=report)
    return 0


def run_jobs(parsed: argparse.Namespace, jobs: Sequence[Job]) -> bool:
    """Run the jobs or print their status. Returns whether one failed."""
    out, num_processes = parsed.out.resolve(), parsed.processes or 1
    failed: dict[str, str] = {}
    if not parsed.status:
        out.mkdir(parents=True, exist_ok=True)
        failed = Runner(jobs=jobs, folder=out, num_processes=num_processes, note=_note).run()
    Console().print(status_table(progress(jobs, out), num_processes=num_processes))
    for name, reason in failed.items():
        _note(f"FAILED {name}: {reason} ({log_file(out, name)})")
    return bool(failed)


def with_one_thread(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides, with one thread unless they name a number."""
    given = any(one.startswith("num_threads=") for one in overrides)
    return tuple(overrides) if given else (*overrides, "num_threads=1")


def _seeds(parsed: argparse.Namespace) -> range:
    return range(parsed.first_seed, parsed.first_seed + parsed.seeds)


def choose_methods(every: Sequence[Method], wanted: Sequence[str] | None) -> list[Method]:
    """Return the chosen methods in the order of the table. Raises ConfigError for an unknown method."""
    known = list(dict.fromkeys(method.key for method in every))
    if unknown := [key for key in wanted or () if key not in known]:
        raise ConfigError(f"unknown methods {', '.join(unknown)}; known: {', '.join(known)}")
    return [method for method in every if not wanted or method.key in wanted]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
