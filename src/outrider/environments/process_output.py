"""The output of a simulator's process: read to its end, so that the process never blocks on a full pipe."""

import threading
from collections import deque
from typing import IO


def drained(stream: IO[bytes] | None, keep: deque[bytes]) -> threading.Thread:
    """Read a pipe to its end in the background; the bound of ``keep`` is how many lines are held."""

    def read() -> None:
        if stream is not None:
            with stream:
                keep.extend(stream)

    thread = threading.Thread(target=read, name="simulator-output", daemon=True)
    thread.start()
    return thread
