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
    snapshot = _pickled_copy(hook.snapshot(), f"{name}.snapshot()")
    for _ in range(2):
        copy.restore(_pickled_copy(snapshot, f"{name}.snapshot()"))
        require(equal(copy.snapshot(), snapshot), f"{name}: a restored copy is not what was taken")
    before = _pickled_copy(hook.gathered(), f"{name}.gathered()")
    hook.absorb(_pickled_copy(copy.gathered(), f"{name}.gathered()"))
    require(
        equal(hook.snapshot(), snapshot), f"{name}.absorb changes what a copy needs: after_group does that"
    )
    require(equal(hook.gathered(), before), f"{name}: a copy that did nothing has gathered something")


def _pickled_copy(value: Any, label: str) -> Any:
    """As another process gets it."""
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(f"{label} cannot go to another process: {error}") from error


def equal(left: Any, right: Any) -> bool:
    """Whether plain data with arrays in it is the same, bit by bit."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.asarray(left).dtype == np.asarray(right).dtype and np.array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
