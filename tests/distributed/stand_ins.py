"""A Ray whose calls have their results at once."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from outrider.distributed.worker import JobResult
from outrider.errors import ProcessLost


class ActorMethod:
    """A method of an actor, called in this process."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **given: Any) -> "ActorMethod":
        assert given == {"concurrency_group": "play"}
        return self


class InstantRay:
    """Results and exceptions are their own references; one call is ready at a time, the first one first."""

    exceptions = SimpleNamespace(RayTaskError=(), OutOfMemoryError=(), RayError=())

    def put(self, one: Any) -> Any:
        return one

    def wait(self, calls: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return calls[:1], calls[1:]

    def get(self, one: Any) -> Any:
        if isinstance(one, Exception):
            raise one
        return one


class HashableResult(JobResult):
    """A result that can be a key, like a reference of Ray."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class HashableFault(ProcessLost):
    """A fault that can be a key, like a reference of Ray."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
