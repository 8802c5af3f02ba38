"""Runs a command in this process's group until the command or standard input ends, then kills the group.

The process that starts it keeps the other end of standard input open, so that the command and its children
end with that process, however it dies. This file runs as a script and uses only the standard library.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO

STATUS_PREFIX = "ended with status "
_PATIENCE_S = 2.0


def supervised_command(
    command: Sequence[str], *, stdin_fd: int | None = None, status_fd: int = 2
) -> list[str]:
    """The command line that runs ``command`` under the supervisor; start it in a session of its own.

    Args:
        command: the command and its arguments.
        stdin_fd: file descriptor for the command's standard input; None for none.
        status_fd: file descriptor for one line about the end: the command, :data:`STATUS_PREFIX` and its
            status (negative for a signal), or why it cannot be started.
    """
    stdin = str(-1 if stdin_fd is None else stdin_fd)
    return [sys.executable, "-I", "-S", __file__, stdin, str(status_fd), *command]


def drain_output(stream: "IO[bytes] | None", lines: "deque[bytes]") -> threading.Thread:
    """Read a pipe to its end in the background, so that the process never blocks on a full pipe. The last
    lines, up to the maximum length of ``lines``, are stored there.
    """

    def read() -> None:
        if stream is not None:
            with stream:
                lines.extend(stream)

    thread = threading.Thread(target=read, name="simulator-output", daemon=True)
    thread.start()
    return thread


def _supervise(stdin_fd: int, status_fd: int, command: list[str]) -> None:
    """Never returns, because this process is part of the group that it kills."""

    def restore_sigterm() -> None:  # a child inherits ignored signals
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers and their children block SIGINT
    stdin = subprocess.DEVNULL if stdin_fd < 0 else stdin_fd
    try:
        child = subprocess.Popen(command, stdin=stdin, preexec_fn=restore_sigterm)
        threading.Thread(target=_end_with_input, daemon=True).start()
        line = f"{STATUS_PREFIX}{child.wait()}"
    except OSError as error:
        line = f"cannot be started: {error}"
    try:
        os.write(status_fd, f"{command[0]} {line}\n".encode())
    finally:  # the reader may be gone
        os.killpg(0, signal.SIGKILL)


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(_PATIENCE_S)  # if the command ends in this time, the group is killed at once
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
