"""The option ``--smoke`` of the commands that have one."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.printing import say

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """The option, after which nothing else sets what it shrinks."""
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="all of it in seconds on a CPU: a tiny random model, one step, two tasks, stand-ins for files",
    )


@contextmanager
def smoke(
    settings_of: Callable[[Sequence[str]], "RunSettings"], given: Sequence[str], *, is_on: bool, shows: bool
) -> Iterator[list[str]]:
    """What ``--smoke`` sets above the overrides ``given``: nothing where it is not on. Where a command only
    ``shows`` its settings, nothing is written and no server runs.
    """
    if not is_on:
        yield []
        return
    from outrider.smoke import stand_ins
    from outrider.smoke.shrink import left_out, smoke_overrides

    settings, names = settings_of(given), stand_ins.stand_ins()
    if told := left_out(settings):
        say(told, to_stderr=True)
    if shows:
        yield smoke_overrides(settings, names, server=stand_ins.NO_SERVER)
        return
    stand_ins.write(names)
    with stand_ins.server() as url:
        yield smoke_overrides(settings, names, server=url)


def file_or_stand_in(file: Path) -> Path:
    """A file of trajectories, or under ``--smoke`` the chats that stand in for one that is not there."""
    from outrider.smoke import stand_ins

    stand_ins.write(names := stand_ins.stand_ins())
    return file if file.exists() else names.trajectories
