"""The commands of ``outrider``: each module has the arguments and what is done with them. Heavy imports wait
until a command needs them.
"""

import argparse

from outrider import __version__
from outrider.commands import buffer as buffers
from outrider.commands import critic as critics
from outrider.commands import doctor as workplace
from outrider.commands import eval as evaluation
from outrider.commands import pack as packs
from outrider.commands import plan as planning
from outrider.commands import prompt as prompts
from outrider.commands import push as pushing
from outrider.commands import replay as looking
from outrider.commands import train as training
from outrider.commands import view as viewing


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands. A command is a function of what was parsed, in ``command``; it returns the
    exit status.
    """
    parser = argparse.ArgumentParser(prog="outrider", description="Train LLM agents to explore.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(interrupted="")  # how to go on after Ctrl-C, where that is possible
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        training,
        prompts,
        planning,
        evaluation,
        buffers,
        critics,
        looking,
        pushing,
        viewing,
        packs,
        workplace,
    ):
        module.add(commands)
    return parser
