"""The contract of an algorithm (:mod:`outrider.algorithms.algorithm`)."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.base import GroupCredit, ObjectiveSettings
from outrider.metrics import UndeclaredMetric, declare, declared_metric
from outrider.testing.common import require, require_finite, require_picklable
from outrider.testing.hooks import check_copies
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task

# One group each: spread, none, faults among them, only faults, one that is left.
_RETURNS: tuple[tuple[float | None, ...], ...] = (
    (0.0, 1.0),
    (1.0, 1.0),
    (None, 0.5, 1.0),
    (None,),
    (2.0, None, None),
)


def check_algorithm(algorithm: Algorithm | Callable[[], Algorithm], *, num_steps: int = 2) -> None:
    """Give an algorithm the groups of a few steps, made up, with faults and without spread.

    ``algorithm`` is one that has seen nothing, or what makes one. Checked: modes that depend on step and
    group alone; credit that is finite, the same every time, and only on what an update may train on; nothing
    for a rollout that a fault ended; measurements under declared names; a memory that is the same after a
    checkpoint; hooks whose copies in other processes are what they are, where they can have any
    (:class:`outrider.rollout.hooks.Portable`).
    """
    make = _maker(algorithm)
    one, other = make(), make()
    declare(getattr(one, "metrics", ()))
    require(
        isinstance(one, Algorithm),
        f"{type(one).__name__} is no subclass of outrider.algorithms.algorithm.Algorithm",
    )
    require(isinstance(one.objective, ObjectiveSettings), "objective is no ObjectiveSettings")
    require(isinstance(one.hooks, tuple), "hooks is no tuple")
    require_picklable("the settings", one.objective)
    for step in range(num_steps):
        groups, same = _step(one, step), _step(other, step)
        found = _credit(one, groups)
        _credit(other, same)
        for trace, credit in zip(groups, found, strict=True):
            _check_credit(trace, credit)
        require(_written(groups) == _written(same), f"step {step}: other credit for the same groups")
    if one.remembers:
        _check_memory(one, make(), num_steps)
    check_copies(one.hooks, make().hooks, _step(one, num_steps))


def _maker(algorithm: Any) -> Callable[[], Algorithm]:
    if hasattr(algorithm, "credit") and not isinstance(algorithm, type):
        return lambda: copy.deepcopy(algorithm)
    return algorithm  # type: ignore[no-any-return]


def _step(algorithm: Algorithm, step: int) -> list[Trace]:
    groups = []
    for group, returns in enumerate(_RETURNS):
        modes = tuple(algorithm.modes_of(step, group))
        require(
            modes and all(isinstance(mode, str) for mode in modes),
            f"modes_of({step}, {group}) gives {modes!r}",
        )
        require(
            modes == tuple(algorithm.modes_of(step, group)),
            f"modes_of({step}, {group}) gives others when asked again",
        )
        values = [returns[i % len(returns)] for i in range(len(modes))]
        groups.append(group_of(values, key=f"task-{group}", modes=modes))
    return groups


def group_of(returns: Sequence[float | None], *, key: str, modes: Sequence[str]) -> Trace:
    """A group of rollouts of two turns with these returns; None: a fault ended it."""
    trace = Trace(task=Task(key=key, question="?"), modes=modes)
    root = trace.append(
        parent=None,
        origin=Origin.PROMPT,
        token_ids=(1, 2),
        message=Message(role="user", content=f"question {key}"),
    )
    for rollout, value in enumerate(returns):
        last = root
        for turn in range(2):
            ids = tuple(5 + (rollout + turn + i) % 4 for i in range(2 + rollout % 3))
            said = Message(role="assistant", content=f"turn {turn} of {rollout}")
            logprobs = tuple(-0.5 - 0.1 * i for i in range(len(ids)))
            last = trace.append(
                parent=last.node_id, origin=Origin.POLICY, token_ids=ids, message=said, logprobs=logprobs,
                entropies=tuple(-2 * one for one in logprobs),
            )  # fmt: skip
            seen = Message(role="user", content=f"state {turn} of {key}")
            last = trace.append(parent=last.node_id, origin=Origin.ENVIRONMENT, token_ids=(3,), message=seen)
        trace.finish(
            Leaf(
                node_id=None if value is None else last.node_id,
                rollout=rollout,
                outcome=Outcome.TOOL_FAULT if value is None else Outcome.FINISHED,
                episode_return=value,
                success=value == 1.0,
            )
        )
    return trace


def _credit(algorithm: Algorithm, groups: Sequence[Trace]) -> list[GroupCredit]:
    try:
        found = algorithm.advantages(groups)
    except Exception as error:
        raise AssertionError(f"credit raises: {type(error).__name__}: {error}") from error
    require(len(found) == len(groups), f"credit of {len(groups)} groups has {len(found)} entries")
    return found


def _check_credit(trace: Trace, credit: GroupCredit) -> None:
    key = trace.task.key
    values = np.asarray(credit.advantages.values)
    require(
        len(values) == len(trace.leaves),
        f"{key}: {len(values)} advantages for {len(trace.leaves)} rollouts",
    )
    require(bool(np.isfinite(values).all()), f"{key}: an advantage is not finite: {values.tolist()}")
    for leaf, path in trace.rollouts():
        if leaf.episode_return is None:
            require(
                leaf.advantage is None,
                f"{key}: rollout {leaf.rollout}, which a fault ended, has an advantage",
            )
        for node in path:
            written = node.credit is not None or node.shares is not None
            require(
                node.takes_credit or not written,
                f"{key}: credit on a node that the policy did not write",
            )
            if node.credit is not None:
                require(len(node.credit) == len(node.token_ids), f"{key}: credit is not one value per token")
                require_finite({str(i): value for i, value in enumerate(node.credit)}, f"{key}: credit")
    for name, measured in credit.measurements.items():
        try:
            declared_metric(name)
        except UndeclaredMetric as error:
            raise AssertionError(f"{error}: declare it in the class's metrics") from error
        require_finite({f"{name}[{i}]": float(value) for i, value in enumerate(measured)}, key)


def _written(groups: Sequence[Trace]) -> list[Any]:
    return [
        (leaf.advantage, [(node.credit, node.ratio_scale) for node in path])
        for trace in groups
        for leaf, path in trace.rollouts()
    ]


def _check_memory(one: Any, fresh: Any, num_steps: int) -> None:
    """Checks that JSON and arrays of a checkpoint are all that counts."""
    state, arrays = one.state()
    require(
        all(isinstance(value, np.ndarray) for value in arrays.values()),
        "state: arrays holds what is no array",
    )
    try:
        plain = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state cannot be written as JSON: {error}") from error
    fresh.restore(plain, {name: value.copy() for name, value in arrays.items()})
    groups, same = _step(one, num_steps), _step(fresh, num_steps)
    _credit(one, groups)
    _credit(fresh, same)
    require(_written(groups) == _written(same), "other credit after state and restore")
