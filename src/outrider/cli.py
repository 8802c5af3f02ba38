"""The command line: arguments in, an exit status out; every expected error is one line on stderr."""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence

from outrider.commands import make_parser
from outrider.errors import ConfigError, OutriderError
from outrider.printing import print_lines
from outrider.signals import exit_on_second_signal, is_interruption, reraise_lost_interrupts

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run failed for a named reason, 2 bad configuration, 130 interrupted, 143
    ended by a second signal that was SIGTERM."""
    # Before torch loads OpenMP. Spinning without end starves a tool, an embedder or a simulator beside torch;
    # not spinning at all halves the speed of generation (docs/benchmarks.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parsed = None
    try:
        parsed = _parse_arguments(arguments)
        command: Command = parsed.command
        with exit_on_second_signal(_resume_hint(parsed)), reraise_lost_interrupts():
            return command(parsed)
    except (Exception, KeyboardInterrupt) as error:
        if is_interruption(error):
            message, status = f"interrupted{_resume_hint(parsed) if parsed is not None else ''}", 130
        elif isinstance(error, OutriderError):
            message, status = str(error), 2 if isinstance(error, ConfigError) else 1
        elif isinstance(error, OSError):  # a full disk, a folder without permission
            suffix = f": {error.filename}" if error.filename else ""
            message, status = f"{error.strerror or error}{suffix}", 1
        else:
            raise
    print_lines(f"outrider: {message}", to_stderr=True)
    return status


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process with status 2 for arguments that no command takes."""
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (
        not all("=" in item and not item.startswith("-") for item in rest) or "overrides" not in parsed
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positionals in one run only; overrides may stand anywhere
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _resume_hint(parsed: argparse.Namespace) -> str:
    """The end of the line about an interruption; empty where the command does not go on."""
    template: str = parsed.interrupted
    run = vars(parsed).get("resume") or vars(parsed).get("run")
    return template.replace("{run}", shlex.quote(str(run or "RUN")))
