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
from outrider.commands import Parser, all_parsers, describe
from outrider.errors import ConfigError, OutriderError
from outrider.printing import print_lines
from outrider.signals import exit_on_second_signal, is_interruption, reraise_lost_interrupts
from outrider.suggestions import did_you_mean

Command = Callable[[argparse.Namespace], int]
GROUPS: Final = ("run", "inspect", "compare", "data", "share", "machine")
_QUIET: Final = {
    "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error", "DATASETS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
"""Environment variables that keep progress bars and messages of other libraries out of a log."""
COMMANDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "init": ("doctor", "run", "write a commented recipe to start from"),
    "new": ("doctor", "run", "write a small package with a plug-in, its test and a recipe"),
    "train": ("train", "run", "train from a recipe, or continue a run"),
    "eval": ("eval", "run", "evaluate a model on a recipe's tasks or on a task set"),
    "critic": ("critic", "run", "train a critic on recorded trajectories (Retrospex)"),
    "explain": ("explain", "inspect", "explain a setting, a section, a type or a metric"),
    "prompt": ("prompt", "inspect", "print the first prompt of a task: messages, text, ids"),
    "watch": ("view", "inspect", "follow a run from another terminal"),
    "view": ("view", "inspect", "open runs in the browser (extra: view)"),
    "why": ("why", "inspect", "look for known problems in a run, with the numbers"),
    "replay": ("replay", "inspect", "replay the rollouts of a training step without a model"),
    "compare": ("replay", "compare", "compare runs over seeds: intervals, tests, curves"),
    "protocol": ("protocol", "compare", "compare recipes and runs with published protocols"),
    "verify": ("pack", "compare", "check a pack: files, tables and one row that is rerun"),
    "data": ("data", "data", "list, download and check published data sets"),
    "buffer": ("buffer", "data", "build, import, inspect and query step-trace buffers"),
    "report": ("view", "share", "write report.html of a run, a page that needs no server"),
    "export": ("push", "share", "write the weights of a run as a Hugging Face folder"),
    "serve": ("serve", "share", "serve the policy of a run at an OpenAI-compatible endpoint"),
    "push": ("push", "share", "upload weights or a data set to the Hugging Face hub"),
    "pack": ("pack", "share", "pack runs into a folder that others can verify"),
    "inspect-log": ("replay", "share", "write an evaluation as a log file of inspect-ai"),
    "doctor": ("doctor", "machine", "check what works on this machine"),
    "plan": ("plan", "machine", "estimate memory, tokens and seconds of a recipe"),
    "list": ("doctor", "machine", "list every plug-in and preset, and what it is"),
}
"""Name of a command -> its module in ``outrider.commands``, its group in the help, and its line there. The
function ``add_NAME`` of the module adds its arguments, with a description and examples (``describe``).
"""


_START: Final = (
    "examples:",
    "  outrider train recipes/demo.toml --smoke --run runs/smoke   # seconds on a CPU",
    "  outrider train recipes/demo.toml --run runs/demo",
    "  outrider report runs/demo",
)


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
        has_terminal = sys.stdout is not None and sys.stdout.isatty()
        if "progress" in parsed and (parsed.progress in ("plain", "json", "none") or not has_terminal):
            for name, value in _QUIET.items():  # before the libraries are imported
                os.environ.setdefault(name, value)
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
    parser = Parser(prog="outrider", usage="outrider [-h] [--version] COMMAND ...")
    describe(
        parser, "Train LLM agents to explore. `outrider COMMAND --help` prints the arguments of a command."
    )
    parser.add_argument("--version", action="version", version=__version__, help="print the version and exit")
    parser.set_defaults(interrupted="")  # how to continue after Ctrl-C, if that is possible
    subparsers = parser.add_subparsers(
        required=True, prog="outrider", metavar="COMMAND", dest="command_name", help=argparse.SUPPRESS
    )
    parser.epilog = _grouped_commands()
    for name, (module, _, _) in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        if name in commands:
            add_arguments = getattr(
                import_module(f"outrider.commands.{module}"), f"add_{name.replace('-', '_')}"
            )
            add_arguments(subparser)
    return parser


def _grouped_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = []
    for group in GROUPS:
        lines += ["", f"{group}:"]
        lines += [
            f"  {name:{width}}  {meaning}" for name, (_, owner, meaning) in COMMANDS.items() if owner == group
        ]
    return "\n".join([*lines, "", *_START]).lstrip("\n")


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 if the command does not take the arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # The command is the first argument that is no option: the options in front of it take no value.
    parser = make_parser([argument for argument in arguments if not argument.startswith("-")][:1])
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (
        not all("=" in item and not item.startswith("-") for item in rest) or "overrides" not in parsed
    ):
        chosen = next(
            inner for inner in all_parsers(parser) if inner.prog == f"outrider {parsed.command_name}"
        )
        options = {option for inner in all_parsers(chosen) for option in inner._option_string_actions}
        hint = did_you_mean(rest[0].partition("=")[0], options) if rest[0].startswith("-") else ""
        chosen.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:  # argparse accepts positional arguments in one block only; overrides may stand anywhere
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def _resume_hint(parsed: argparse.Namespace) -> str:
    """The end of the line about an interruption; empty if the command cannot be continued."""
    template: str = parsed.interrupted
    run = vars(parsed).get("resume") or vars(parsed).get("run")
    return template.replace("{run}", shlex.quote(str(run or "RUN")))
