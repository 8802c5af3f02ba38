"""The commands of ``outrider``: each module has the arguments and what is done with them. Heavy imports wait
until a command needs them.
"""

import argparse

from outrider import __version__
from outrider.commands import buffer, critic, doctor, eval, pack, plan, prompt, push, replay, train, view


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. A command is a function of what was parsed, in ``command``; it returns the
    exit status.
    """
    parser = argparse.ArgumentParser(prog="outrider", description="Train LLM agents to explore.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(interrupted="")  # how to go on after Ctrl-C, where that is possible
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        train,
        prompt,
        plan,
        eval,
        buffer,
        critic,
        replay,
        push,
        view,
        pack,
        doctor,
    ):
        module.add(commands)
    return parser
