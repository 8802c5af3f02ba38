"""From an engine's decoding steps to the display: a batch of long rollouts shows that it is alive before the
first one ends.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from outrider.watch.progress import Progress

_WINDOW: Final = 50  # decoding steps that the speed looks back on


class TokenMeter:
    """Call it with the number of tokens of every decoding step: it shows tokens so far, and how many per
    second lately.

    ``num_done`` tells how many units of the stage are complete. While it is None (the parts are still being
    made, and what they decode is nobody's progress), tokens are counted and not shown.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.num_done: Callable[[], int] | None = None
        self.num_tokens = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def __call__(self, num_tokens: int) -> None:
        """Count what one decoding step wrote."""
        self.num_tokens += num_tokens
        if self.num_done is None:
            return
        self._recent.append((time.monotonic(), self.num_tokens))
        (began, before), (now, total) = self._recent[0], self._recent[-1]
        speed = {"tokens/s": round((total - before) / (now - began))} if now > began else {}
        self._progress.advance(self.num_done(), generated=self.num_tokens, **speed)
