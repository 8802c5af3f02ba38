"""Runs a command in this process's group until the command ends or standard input does, and then kills the
group: ``python keeper.py COMMAND ...``. Whoever started it holds the other end of its input, so that the
command ends with that process, however it ends. The standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_PATIENCE_S = 2.0


def keep(command: list[str]) -> None:
    """Never returns: the group's end is this process's."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's workers block SIGINT, and what they start
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_listens)
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    status = child.wait()
    with contextlib.suppress(OSError):  # nobody may be left to read it
        print(f"the command ended with status {status}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _listens() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is ignored here would be ignored there


def _end_with_input(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    keep(sys.argv[1:])
