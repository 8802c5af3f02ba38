"""Who started whom, on this machine."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def lives(pid: int) -> bool:
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def send_signal(pid: int, how: signal.Signals) -> None:
    """Send a signal, and wait until it has ended or stopped the process: its threads may go on for
    milliseconds.
    """
    os.kill(pid, how)
    while _state(pid) not in "ZXT":
        time.sleep(0.001)


def parent_of(pid: int) -> int:
    """0 of one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> str:
    """Its words, or the title that it took; empty of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    return [one for one in found if parent_of(one) == pid]


def descendants(pid: int) -> list[int]:
    """Its children, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parents.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found, left = list[int](), [pid]
    while left:
        own = parents.get(left.pop(), [])
        found += own
        left += own
    return found


def wait_until_ended(pids: Iterable[int], *, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < until, f"{[(pid, command_of(pid)[:80]) for pid in left]} live on"
        time.sleep(0.02)
