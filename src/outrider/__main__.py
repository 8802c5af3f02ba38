"""``python -m outrider``, and the command ``outrider``."""

import signal
from typing import NoReturn

from outrider.cli import main


def program() -> NoReturn:
    """The command line as a process. A Ctrl-C while the interpreter winds up ends it without a traceback."""
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(status)


if __name__ == "__main__":
    program()
