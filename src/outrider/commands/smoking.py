"""The option ``--smoke`` of the commands that have one."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.printing import print_lines

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
    make_settings: Callable[[Sequence[str]], "RunSettings"],
    overrides: Sequence[str],
    *,
    enabled: bool,
    dry_run: bool,
) -> Iterator[list[str]]:
    """What ``--smoke`` sets above the overrides ``overrides``: nothing where it is not on. Where a command only
    ``dry_run`` its settings, nothing is written and no server runs.
    """
    if not enabled:
        yield []
        return
    from outrider.smoke import stand_ins
    from outrider.smoke.shrink import describe_omissions, smoke_overrides

    settings, names = make_settings(overrides), stand_ins.smoke_assets()
    if omissions := describe_omissions(settings):
        print_lines(omissions, to_stderr=True)
    if dry_run:
        yield smoke_overrides(settings, names, server=stand_ins.NO_SERVER)
        return
    stand_ins.write(names)
    with stand_ins.server() as url:
        yield smoke_overrides(settings, names, server=url)


def resolve_trajectories(file: Path) -> Path:
    """A file of trajectories, or under ``--smoke`` the chats that stand in for one that is not there."""
    from outrider.smoke import stand_ins

    stand_ins.write(names := stand_ins.smoke_assets())
    return file if file.exists() else names.trajectories
