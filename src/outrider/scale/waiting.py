"""Waiting for other processes: with a limit, and with a line that says who is gone and how to go on."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from outrider.errors import ClusterFault, OutriderError, ProcessGone

AGAIN: Final = "continue from the newest checkpoint with --resume"
_TICK_S: Final = 0.5  # how long a signal may have to wait


def results(
    ray: Any,
    calls: Mapping[str, Any],
    *,
    what: str,
    limit_s: float,
    setting: str,
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """What each call returned, in order. ``calls``: by who was called (``engine 1``). ``watch`` is called all
    the while.

    Raises what a call raised where it is an error of ours, and ClusterFault for a process that broke or died
    in ``what``, or did not end it within ``limit_s`` of ``setting``.
    """
    owners = {reference: who for who, reference in calls.items()}
    waiting = list(owners)
    until = time.monotonic() + limit_s
    while waiting:
        tick = min(_TICK_S, max(0.0, until - time.monotonic()))
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=tick)
        for one in ready:
            _got(ray, one, owners[one], what)
        if watch is not None:
            watch()
        if waiting and not ready and time.monotonic() >= until:
            raise silent(owners[waiting[0]], what, limit_s, setting)
    return [_got(ray, reference, who, what) for who, reference in calls.items()]


def outcomes(
    ray: Any, calls: Mapping[str, Any], *, what: str, watch: Callable[[], Mapping[str, ProcessGone]]
) -> dict[str, Any]:
    """What each call returned, or the :class:`ProcessGone` of a process that it broke with: the others are
    waited for. ``watch`` is called all the while; it names those that are not waited for any more.

    Raises any other error of a call.
    """
    found: dict[str, Any] = {}
    while missing := {reference: who for who, reference in calls.items() if who not in found}:
        ready, _ = ray.wait(list(missing), num_returns=1, timeout=_TICK_S)
        for one in ready:
            found[missing[one]] = answered(ray, one, missing[one], what)
        found |= {who: gone for who, gone in watch().items() if who in calls and who not in found}
    return found


def answered(ray: Any, reference: Any, who: str, what: str) -> Any:
    """What a call returned, or the :class:`ProcessGone` that it broke with. Raises any other error of it."""
    try:
        return _got(ray, reference, who, what)
    except ProcessGone as gone:
        return gone


def silent(who: str, what: str, limit_s: float, setting: str) -> ProcessGone:
    """The error for a process that does not answer."""
    return ProcessGone(
        f"{who} did not end {what} within {limit_s:g} s ({setting}); {AGAIN}", who, is_silent=True
    )


def located(gone: ProcessGone, place: str | None) -> ProcessGone:
    """The same error with the task and the place that the process was last seen at."""
    if not place:
        return gone
    fault, separator, rest = str(gone).partition("; ")
    return ProcessGone(
        f"{fault}, last seen at {place.replace('; ', ', ')}{separator}{rest}", gone.who, gone.is_silent
    )


def _got(ray: Any, reference: Any, who: str, what: str) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:
        raise told(ray, error, who, what) from error


def told(ray: Any, error: Exception, who: str, what: str) -> Exception:
    """A typed error for whatever Ray raises of a call; any other error as it is."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, OutriderError):
        return cause
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return ProcessGone(f"{who} was ended in {what} by Ray's memory monitor; {AGAIN}", who)
    if isinstance(error, ray.exceptions.RayTaskError):
        reason = (str(cause or error).strip() or type(error).__name__).splitlines()[-1]
        return ClusterFault(
            f"{who} broke in {what}: {type(cause or error).__name__}: {reason[:300]}; {AGAIN}"
        )
    if getattr(error, "actor_init_failed", False):
        reason = str(error).strip().splitlines()[-1].strip()
        return ClusterFault(f"{who} could not start: {reason[:300]}")
    if isinstance(error, ray.exceptions.RayError):
        return ProcessGone(f"{who} died in {what} ({type(error).__name__}); {AGAIN}", who)
    return error
