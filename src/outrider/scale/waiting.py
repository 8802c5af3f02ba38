"""Waiting for other processes: with a limit, and with a line that says who is gone and how to go on."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from outrider.errors import ClusterFault, OutriderError, ProcessLost

AGAIN: Final = "continue from the newest checkpoint with --resume"
_TICK_S: Final = 0.5  # how long a signal may have to wait


def results(
    ray: Any,
    calls: Mapping[str, Any],
    *,
    action: str,
    limit_s: float,
    setting: str,
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """What each call returned, in order. ``calls``: by who was called (``engine 1``). ``watch`` is called all
    the while.

    Raises what a call raised where it is an error of ours, and ClusterFault for a process that broke or died
    in ``action``, or did not end it within ``limit_s`` of ``setting``.
    """
    owners = {reference: process for process, reference in calls.items()}
    waiting = list(owners)
    until = time.monotonic() + limit_s
    while waiting:
        tick = min(_TICK_S, max(0.0, until - time.monotonic()))
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=tick)
        for call in ready:
            _get(ray, call, owners[call], action)
        if watch is not None:
            watch()
        if waiting and not ready and time.monotonic() >= until:
            raise timeout_error(owners[waiting[0]], action, limit_s, setting)
    return [_get(ray, reference, process, action) for process, reference in calls.items()]


def outcomes(
    ray: Any, calls: Mapping[str, Any], *, action: str, watch: Callable[[], Mapping[str, ProcessLost]]
) -> dict[str, Any]:
    """What each call returned, or the :class:`ProcessLost` of a process that it broke with: the others are
    waited for. ``watch`` is called all the while; it names those that are not waited for any more.

    Raises any other error of a call.
    """
    answers: dict[str, Any] = {}
    while missing := {reference: process for process, reference in calls.items() if process not in answers}:
        ready, _ = ray.wait(list(missing), num_returns=1, timeout=_TICK_S)
        for call in ready:
            answers[missing[call]] = get_answer(ray, call, missing[call], action)
        answers |= {
            process: fault
            for process, fault in watch().items()
            if process in calls and process not in answers
        }
    return answers


def get_answer(ray: Any, reference: Any, process: str, action: str) -> Any:
    """What a call returned, or the :class:`ProcessLost` that it broke with. Raises any other error of it."""
    try:
        return _get(ray, reference, process, action)
    except ProcessLost as fault:
        return fault


def timeout_error(process: str, action: str, limit_s: float, setting: str) -> ProcessLost:
    """The error for a process that does not answer."""
    return ProcessLost(
        f"{process} did not end {action} within {limit_s:g} s ({setting}); {AGAIN}", process, is_silent=True
    )


def add_location(error: ProcessLost, location: str | None) -> ProcessLost:
    """The same error with the task and the place that the process was last seen at."""
    if not location:
        return error
    fault, separator, rest = str(error).partition("; ")
    return ProcessLost(
        f"{fault}, last seen at {location.replace('; ', ', ')}{separator}{rest}",
        error.process,
        error.is_silent,
    )


def _get(ray: Any, reference: Any, process: str, action: str) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:
        raise convert_error(ray, error, process, action) from error


def convert_error(ray: Any, error: Exception, process: str, action: str) -> Exception:
    """A typed error for whatever Ray raises of a call; any other error as it is."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, OutriderError):
        return cause
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return ProcessLost(f"{process} was ended in {action} by Ray's memory monitor; {AGAIN}", process)
    if isinstance(error, ray.exceptions.RayTaskError):
        reason = (str(cause or error).strip() or type(error).__name__).splitlines()[-1]
        return ClusterFault(
            f"{process} broke in {action}: {type(cause or error).__name__}: {reason[:300]}; {AGAIN}"
        )
    if getattr(error, "actor_init_failed", False):
        reason = str(error).strip().splitlines()[-1].strip()
        return ClusterFault(f"{process} could not start: {reason[:300]}")
    if isinstance(error, ray.exceptions.RayError):
        return ProcessLost(f"{process} died in {action} ({type(error).__name__}); {AGAIN}", process)
    return error
