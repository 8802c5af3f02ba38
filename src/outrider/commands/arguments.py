"""Common parts of several commands."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def positive(text: str) -> int:
    """A number of things, at least one; a type of argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def overrides(parsed: argparse.Namespace) -> list[str]:
    """Settings of the command line that stand above the recipe."""
    return [*parsed.overrides, *([f"model.name={parsed.model}"] if parsed.model else [])]
