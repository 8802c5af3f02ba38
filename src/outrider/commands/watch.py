"""``outrider watch``: the loop that shows a run until it ends."""

import time
from pathlib import Path
from typing import Final

from rich.live import Live
from rich.text import Text

from outrider.printing import Terminal, one_line, print_lines
from outrider.viewer.summary import RunSnapshot, read_snapshot, summary_lines

_POLL_INTERVAL_S: Final = 1.0


def follow(run: Path, *, once: bool) -> int:
    """Print the state of the run until it ends, then its summary; exit status 0. If the output is no
    terminal, print only new lines, at each new step, stage or note.

    Ctrl-C ends this and nothing of the run.
    """
    try:
        state = read_snapshot(run)
        if not once and state.status == "running":
            state = _follow_until_end(run, state)
    except KeyboardInterrupt:
        print_lines("outrider: no longer watching, which the run does not notice", to_stderr=True)
        return 0
    print_lines(*state.lines)
    if state.status != "running":
        print_lines(*summary_lines(run))
    return 0


def _follow_until_end(run: Path, state: RunSnapshot) -> RunSnapshot:
    """The run when it no longer runs."""
    console = Terminal()
    if not console.is_terminal or console.is_dumb_terminal:
        printed: tuple[str, ...] = ()
        while state.status == "running":
            print_lines(*(line for line in state.lines if line not in printed))
            printed, previous = state.lines, state.state_key
            while state.state_key == previous:
                time.sleep(_POLL_INTERVAL_S)
                state = read_snapshot(run)
        return state
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while state.status == "running":
            text = Text("\n".join(map(one_line, state.lines)), no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)
            time.sleep(_POLL_INTERVAL_S)
            state = read_snapshot(run)
    return state
