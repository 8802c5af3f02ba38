"""Which requests of the running batch were asked to stop, from whatever thread."""

from collections.abc import Iterable


class Cancellations:
    """A batch has a set of its own: a call that comes as its batch ends stops nothing of the next."""

    def __init__(self) -> None:
        self._batch: tuple[frozenset[str], set[str]] = (frozenset(), set())

    def begin(self, request_ids: Iterable[str]) -> None:
        """These requests run now, and no others."""
        self._batch = (frozenset(request_ids), set())

    def cancel(self, request_id: str) -> None:
        """Mark a request of the running batch; one that is not running is none of ours."""
        running, cancelled = self._batch  # read once: the batch may change between the question and the mark
        if request_id in running:
            cancelled.add(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._batch[1]
