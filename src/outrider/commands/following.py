"""``outrider watch``: the loop that shows a run until it ends."""

import time
from pathlib import Path
from typing import Final

from rich.live import Live
from rich.text import Text

from outrider.printing import one_line, say
from outrider.terminal import Terminal
from outrider.watch.run_summary import summary_lines
from outrider.watch.watching import Seen, look

_EVERY_S: Final = 1.0


def follow(run: Path, *, once: bool) -> int:
    """Print where the run is until it ends, then its summary; exit status 0. Where output is no terminal,
    whenever a step, a stage or a note has come.

    Ctrl-C ends this and nothing of the run.
    """
    try:
        seen = look(run)
        if not once and seen.status == "running":
            seen = _followed(run, seen)
    except KeyboardInterrupt:
        say("outrider: no longer watching, which the run does not notice", to_stderr=True)
        return 0
    say(*seen.lines)
    if seen.status != "running":
        say(*summary_lines(run))
    return 0


def _followed(run: Path, seen: Seen) -> Seen:
    """The run when it no longer runs."""
    console = Terminal()
    if not console.is_terminal or console.is_dumb_terminal:
        while seen.status == "running":
            say(*seen.lines)
            before = seen.told
            while seen.told == before:
                time.sleep(_EVERY_S)
                seen = look(run)
        return seen
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while seen.status == "running":
            drawn = Text("\n".join(map(one_line, seen.lines)), no_wrap=True, overflow="ellipsis")
            live.update(drawn, refresh=True)
            time.sleep(_EVERY_S)
            seen = look(run)
    return seen
