"""A cancel call of another thread that is under way when its batch ends."""

import threading
from collections.abc import Callable, Sequence

from outrider.engines.base import Engine, Generation, Request


def next_batch_after_a_late_cancel(
    build: Callable[[Callable[[int], None]], Engine], requests: Sequence[Request]
) -> list[Generation]:
    """The same requests again, after a cancel of the first that asked while they ran and marked it when they
    had ended.
    """
    running, ended = threading.Event(), threading.Event()
    asked: list[str] = []

    class Late(str):
        """Hashed once for the question whether it runs, and once for the mark."""

        __slots__ = ()
        __eq__ = str.__eq__

        def __hash__(self) -> int:
            if asked:
                running.set()
                assert ended.wait(20)
            asked.append(self)
            return str.__hash__(self)

    thread = threading.Thread(target=lambda: engine.cancel(Late(requests[0].request_id)))

    def on_tokens(_: int) -> None:
        if not asked and not thread.is_alive():
            thread.start()
            assert running.wait(20)

    engine = build(on_tokens)
    engine.generate(requests)
    ended.set()
    thread.join()
    assert len(asked) == 2
    return engine.generate(requests)
