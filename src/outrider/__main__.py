"""``python -m outrider``, and the command ``outrider``."""

import signal
from typing import NoReturn


def program() -> NoReturn:
    """The command line as a process. A Ctrl-C while the interpreter imports it or winds up ends it without a
    traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise the shell ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outrider.cli import main

    signal.signal(signal.SIGINT, handler)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(status)


if __name__ == "__main__":
    program()
