"""``outrider why``: the problems that a run's files show."""

import argparse
from pathlib import Path

from outrider.commands import describe
from outrider.errors import ConfigError, DataError
from outrider.printing import print_lines


def add_why(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``why``."""
    describe(
        parser,
        "Look for known problems in the files of a run, such as missing learning signal, entropy or template "
        "collapse, truncation and unread memory, and print each with its numbers and what to check.",
        "outrider why runs/demo",
    )
    parser.add_argument("run", type=Path, help="run directory, also of a run that is training")
    parser.set_defaults(command=_why)


def _why(parsed: argparse.Namespace) -> int:
    from outrider.commands.view import require_run
    from outrider.viewer.findings import find_problems
    from outrider.viewer.run_reader import read_run

    try:
        require_run(parsed.run)
    except DataError as error:
        raise ConfigError(str(error)) from error  # a wrong argument: exit status 2
    findings = find_problems(parsed.run)
    for finding in findings:
        print_lines(f"{finding.kind}: {finding.text}", f"  look at: {finding.look_at}")
    if not findings:
        num = read_run(parsed.run).num_steps
        print_lines(f"No problem found in {num} step{'' if num == 1 else 's'}.")
    return 0
