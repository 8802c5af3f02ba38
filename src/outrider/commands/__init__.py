"""The commands of ``outrider``: each module has the arguments of its commands and the functions that run
them. Heavy imports wait until a command needs them.
"""

import argparse


def positive(text: str) -> int:
    """A number of at least one; a type for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
