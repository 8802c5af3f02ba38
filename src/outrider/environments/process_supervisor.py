"""Runs a command in this process's group until the command ends or standard input does, and then kills the
group. Whoever starts it holds the other end of its input, so that the command, and what it has started, ends
with that process, however it ends. It runs as a script, with the standard library only.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

STATUS_PREFIX = "ended with status "
_PATIENCE_S = 2.0


def supervised_command(
    command: Sequence[str], *, stdin_fd: int | None = None, status_fd: int = 2
) -> list[str]:
    """A command as its keeper's arguments; to be started in a session of its own. ``stdin_fd`` is the
    descriptor of the command's standard input (None: it has none), ``status_fd`` the one that gets a line on
    what became of it: ``ENDED`` and its status (negative: a signal), or why it cannot be started.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(-1 if stdin_fd is None else stdin_fd),
        str(status_fd),
        *command,
    ]


def _supervise(stdin_fd: int, status_fd: int, command: list[str]) -> None:
    """Never returns: the group's end is this process's."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and what they start
    stdin = subprocess.DEVNULL if stdin_fd < 0 else stdin_fd
    try:
        child = subprocess.Popen(command, stdin=stdin, preexec_fn=_restore_sigterm)
        threading.Thread(target=_end_with_input, daemon=True).start()
        line = f"{STATUS_PREFIX}{child.wait()}"
    except OSError as error:
        line = f"cannot be started: {error}"
    try:
        os.write(status_fd, f"{command[0]} {line}\n".encode())
    finally:  # nobody may be left to read it
        os.killpg(0, signal.SIGKILL)


def _restore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is ignored here would be ignored there


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(_PATIENCE_S)  # the command's end is that of all
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
