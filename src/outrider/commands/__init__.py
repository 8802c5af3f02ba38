"""The commands of ``outrider``: each module has the arguments of its commands and the functions that run
them. Heavy imports wait until a command needs them.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from outrider.suggestions import did_you_mean

WIDTH: Final = 80
"""Columns of the help; a narrower terminal gets narrower lines."""
_INVALID_CHOICE: Final = re.compile(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser that suggests the closest name for an unknown command or choice, and prints the lines of its
    description and epilog unchanged. Its sub-parsers are of this class, too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        if match := _INVALID_CHOICE.fullmatch(message):
            name, word, choices = match.groups()
            hint = did_you_mean(word, [choice.strip(" '") for choice in choices.split(",")])
            if name in ("COMMAND", "ACTION"):
                message = f"unknown command {word!r}{hint or '.'} {self.prog} --help lists the commands"
            else:
                message += hint
        super().error(message)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=24, width=width - 2)


def describe(parser: argparse.ArgumentParser, text: str, *examples: str) -> None:
    """Set the description of the help, and the examples below the arguments."""
    parser.description = textwrap.fill(text, WIDTH - 8)
    title = "examples:" if len(examples) > 1 else "example:"
    parser.epilog = "\n".join([title, *(f"  {example}" for example in examples)]) if examples else None


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and all of its sub-parsers."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from all_parsers(subparser)


def add_progress(parser: argparse.ArgumentParser) -> None:
    """The option ``--progress``."""
    parser.add_argument(
        "--progress",
        choices=("auto", "rich", "plain", "none"),
        default="auto",
        help="form of the log (default: auto, rich on a terminal and plain in a file)",
    )


def positive(text: str) -> int:
    """A number of at least one; a type for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
