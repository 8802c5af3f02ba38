"""The command line: arguments in, an exit status out; every expected error is one line on stderr.

A module of ``outrider.commands`` has the arguments of its commands (``add_NAME``) and the functions that run
them. Only the module of the chosen command is imported.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Final

from outrider import __version__
from outrider.errors import ConfigError, OutriderError
from outrider.printing import print_lines
from outrider.signals import exit_on_second_signal, is_interruption, reraise_lost_interrupts

Command = Callable[[argparse.Namespace], int]
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "train": ("train", "train from a recipe, or continue a run"),
    "prompt": (
        "prompt",
        "print the first prompt of a task: messages, text as the chat template renders it, ids",
    ),
    "plan": ("plan", "memory, tokens and seconds that a recipe needs, and whether it fits"),
    "eval": ("eval", "evaluate on a recipe's held-out panel, or on named task sets"),
    "buffer": ("buffer", "step-trace buffers"),
    "critic": ("critic", "train a critic on recorded trajectories (Retrospex)"),
    "replay": ("replay", "replay the rollouts of a recorded training step, without a model"),
    "inspect-log": ("replay", "an evaluation as a log file of inspect-ai"),
    "compare": ("replay", "compare runs over seeds: scores with intervals, tests, curves at equal cost"),
    "export": ("push", "a run's weights as a Hugging Face folder"),
    "serve": ("serve", "serve a run's policy at an OpenAI-compatible endpoint (extra: agent)"),
    "push": ("push", "a run's weights, or a data set, with a card to the Hugging Face hub"),
    "view": ("view", "look at runs in the browser (extra: view)"),
    "watch": ("view", "follow a run from another terminal (Ctrl-C ends only that)"),
    "report": ("view", "write report.html of a run: one page, no script, no server"),
    "pack": ("pack", "pack runs into a folder that others can verify (docs/packs.md)"),
    "verify": ("pack", "check a pack: its files, its tables, and one row that is rerun"),
    "doctor": ("doctor", "what works on this machine"),
    "list": ("doctor", "every plug-in, where it comes from, and what it is"),
    "new": ("doctor", "a small package with a plug-in of your own, its test and a recipe"),
    "init": ("doctor", "write a commented recipe to start from"),
}
"""Name of a command -> its module in ``outrider.commands``, and its line in the help."""


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


def make_parser(commands: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser that knows all commands by name, and the arguments of ``commands``.

    A parsed command is a function of the arguments, in ``command``, which returns the exit status.
    """
    parser = argparse.ArgumentParser(prog="outrider", description="Train LLM agents to explore.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(interrupted="")  # how to continue after Ctrl-C, if that is possible
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, meaning) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=meaning)
        if name in commands:
            add_arguments = getattr(
                import_module(f"outrider.commands.{module}"), f"add_{name.replace('-', '_')}"
            )
            add_arguments(subparser)
    return parser


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 if the command does not take the arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # The command is the first argument that is no option: the options in front of it take no value.
    parser = make_parser([argument for argument in arguments if not argument.startswith("-")][:1])
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (
        not all("=" in item and not item.startswith("-") for item in rest) or "overrides" not in parsed
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse accepts positional arguments in one block only; overrides may stand anywhere
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _resume_hint(parsed: argparse.Namespace) -> str:
    """The end of the line about an interruption; empty if the command cannot be continued."""
    template: str = parsed.interrupted
    run = vars(parsed).get("resume") or vars(parsed).get("run")
    return template.replace("{run}", shlex.quote(str(run or "RUN")))
