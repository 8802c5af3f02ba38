"""The output of a simulator's process: read to its end, so that the process never blocks on a full pipe."""

import threading
from collections import deque
from typing import IO


def drain_output(stream: IO[bytes] | None, lines: deque[bytes]) -> threading.Thread:
    """Read a pipe to its end in the background; the bound of ``lines`` is how many lines are held."""

    def read() -> None:
        if stream is not None:
            with stream:
                lines.extend(stream)

    thread = threading.Thread(target=read, name="simulator-output", daemon=True)
    thread.start()
    return thread
