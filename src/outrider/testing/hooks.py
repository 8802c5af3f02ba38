"""The contract of hooks that have copies in other processes (:class:`outrider.rollout.hooks.Portable`)."""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.rollout.hooks import Hook, Portable
from outrider.testing.common import require
from outrider.trace import Trace


def check_copies(hooks: Sequence[Hook], copies: Sequence[Hook], groups: Iterable[Trace]) -> None:
    """Show ``groups`` to ``hooks``, and let ``copies``, made of the same settings, become what they are then.

    Checked of every hook that is portable: what is taken, and what is handed back, goes through pickle; a
    copy that was restored is what was taken, twice too; to absorb changes no memory, which ``after_group``
    alone does.
    """
    require(len(hooks) == len(copies), "other hooks for the same settings")
    for trace in groups:
        for leaf in trace.leaves.values():
            leaf.reflection = f"tip {leaf.rollout} of {trace.task.key}"
        for hook in hooks:
            hook.after_group(trace)
    for hook, copy in zip(hooks, copies, strict=True):
        if isinstance(hook, Portable):
            require(isinstance(copy, Portable), f"{type(hook).__name__} is portable, its copy is not")
            _check(hook, copy)  # type: ignore[arg-type]


def _check(hook: Portable, copy: Portable) -> None:
    name = type(hook).__name__
    taken = _sent(hook.snapshot(), f"{name}.snapshot()")
    for _ in range(2):
        copy.restore(_sent(taken, f"{name}.snapshot()"))
        require(equal(copy.snapshot(), taken), f"{name}: a restored copy is not what was taken")
    before = _sent(hook.gathered(), f"{name}.gathered()")
    hook.absorb(_sent(copy.gathered(), f"{name}.gathered()"))
    require(equal(hook.snapshot(), taken), f"{name}.absorb changes what a copy needs: after_group does that")
    require(equal(hook.gathered(), before), f"{name}: a copy that did nothing has gathered something")


def _sent(value: Any, what: str) -> Any:
    """As another process gets it."""
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(f"{what} cannot go to another process: {error}") from error


def equal(one: Any, other: Any) -> bool:
    """Whether plain data with arrays in it is the same, bit by bit."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
