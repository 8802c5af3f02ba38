"""The contract of an algorithm (:mod:`outrider.algorithms.algorithm`)."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings
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


def check_algorithm(
    algorithm: Algorithm | Callable[[], Algorithm],
    *,
    num_steps: int = 2,
    without_effect: Sequence[str] = (),
) -> None:
    """Give an algorithm the groups of a few steps, made up, with faults and without spread.

    ``algorithm`` is one that has seen nothing, or what makes one. Checked: modes that depend on step and
    group alone; credit that is finite, the same every time, and only on what an update may train on; a flag
    of signal that agrees with the advantages; nothing for a rollout that a fault ended; numbers among its own
    settings that change some advantage, if it changes nothing but advantages (``without_effect`` names those
    that may have none); measurements under declared names; a memory that is the same after a
    checkpoint; hooks whose copies in other processes are what they are, where they can have any
    (:class:`outrider.rollout.hooks.Portable`).
    """
    make = _maker(algorithm)
    first, other = make(), make()
    declare(getattr(first, "metrics", ()))
    require(
        isinstance(first, Algorithm),
        f"{type(first).__name__} is no subclass of outrider.algorithms.algorithm.Algorithm",
    )
    require(isinstance(first.objective, ObjectiveSettings), "objective is no ObjectiveSettings")
    require(isinstance(first.hooks, tuple), "hooks is no tuple")
    require_picklable("the settings", first.objective)
    for step in range(num_steps):
        groups, same = _step(first, step), _step(other, step)
        results = _assign_advantages(first, groups)
        _assign_advantages(other, same)
        for trace, result in zip(groups, results, strict=True):
            _check_advantages(trace, result)
        require(
            _assigned_values(groups) == _assigned_values(same),
            f"step {step}: other credit for the same groups",
        )
    _check_effects(first, without_effect)
    if first.remembers:
        _check_memory(first, make(), num_steps)
    check_copies(first.hooks, make().hooks, _step(first, num_steps))


def _maker(algorithm: Any) -> Callable[[], Algorithm]:
    if hasattr(algorithm, "assign_advantages") and not isinstance(algorithm, type):
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
        groups.append(build_group(values, key=f"task-{group}", modes=modes))
    return groups


def build_group(
    returns: Sequence[float | None], *, key: str, modes: Sequence[str], num_turns: Sequence[int] = ()
) -> Trace:
    """A group of rollouts of two turns with these returns; None: a fault ended it. ``num_turns`` gives every
    rollout its own number of turns.
    """
    trace = Trace(task=Task(key=key, question="?"), modes=modes)
    root = trace.append(
        parent=None,
        origin=Origin.PROMPT,
        token_ids=(1, 2),
        message=Message(role="user", content=f"question {key}"),
    )
    for rollout, value in enumerate(returns):
        last = root
        for turn in range(num_turns[rollout] if num_turns else 2):
            ids = tuple(5 + (rollout + turn + i) % 4 for i in range(2 + rollout % 3))
            message = Message(role="assistant", content=f"turn {turn} of {rollout}")
            logprobs = tuple(-0.5 - 0.1 * i for i in range(len(ids)))
            last = trace.append(
                parent=last.node_id, origin=Origin.POLICY, token_ids=ids, message=message, logprobs=logprobs,
                entropies=tuple(-2 * logprob for logprob in logprobs),
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


def _assign_advantages(algorithm: Algorithm, groups: Sequence[Trace]) -> list[GroupAdvantages]:
    try:
        results = algorithm.advantages(groups)
    except Exception as error:
        raise AssertionError(f"credit raises: {type(error).__name__}: {error}") from error
    require(len(results) == len(groups), f"credit of {len(groups)} groups has {len(results)} entries")
    return results


def _check_advantages(trace: Trace, result: GroupAdvantages) -> None:
    key = trace.task.key
    values = np.asarray(result.advantages.values)
    require(
        len(values) == len(trace.leaves),
        f"{key}: {len(values)} advantages for {len(trace.leaves)} rollouts",
    )
    require(bool(np.isfinite(values).all()), f"{key}: an advantage is not finite: {values.tolist()}")
    _check_flag(trace, result)
    for leaf, path in trace.rollouts():
        if leaf.episode_return is None:
            require(
                leaf.advantage is None,
                f"{key}: rollout {leaf.rollout}, which a fault ended, has an advantage",
            )
        for node in path:
            written = node.credit is not None or node.shares is not None
            require(
                node.receives_advantages or not written,
                f"{key}: credit on a node that the policy did not write",
            )
            if node.credit is not None:
                require(len(node.credit) == len(node.token_ids), f"{key}: credit is not one value per token")
                require_finite({str(i): value for i, value in enumerate(node.credit)}, f"{key}: credit")
    for name, measured in result.measurements.items():
        try:
            declared_metric(name)
        except UndeclaredMetric as error:
            raise AssertionError(f"{error}: declare it in the class's metrics") from error
        require_finite({f"{name}[{i}]": float(value) for i, value in enumerate(measured)}, key)


def _check_flag(trace: Trace, result: GroupAdvantages) -> None:
    """``has_signal`` says what the advantages say: metrics and dynamic sampling count groups by it."""
    key, advantages = trace.task.key, result.advantages
    values = np.asarray(advantages.values)
    require(
        advantages.has_signal or not values.any(),
        f"{key}: advantages are {values.tolist()}, and has_signal is False (reason {advantages.reason!r}): "
        "outrider.algorithms.base.with_values sets both",
    )
    has_advantages = any(
        any(node.credit or ()) or any(any(share.credit) for share in (node.shares or {}).values())
        for node in trace.nodes
    )
    require(
        not advantages.has_signal or values.any() or has_advantages,
        f"{key}: every advantage is 0, and has_signal is True",
    )


_OTHER_PARTS: Final = ("modes_of", "choose_tasks", "augment", "token_loss", "measure")
_FACTORS: Final = (0.0, 0.5, 2.0, 10.0)


def _check_effects(algorithm: Any, without_effect: Sequence[str]) -> None:
    """A number among the settings that a class adds changes some advantage. Only for a class that has no
    other place where it could have an effect, and that is made from its settings alone.
    """
    settings = getattr(algorithm, "settings", None)
    if not isinstance(settings, ObjectiveSettings) or algorithm.hooks:
        return
    if any(getattr(type(algorithm), name) is not getattr(Algorithm, name) for name in _OTHER_PARTS):
        return
    if type(settings).token_loss is not ObjectiveSettings.token_loss:
        return
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        is_own = name not in ObjectiveSettings.model_fields and name not in without_effect
        if not is_own or isinstance(value, bool) or not isinstance(value, float):
            continue
        variants = _setting_variants(type(settings), settings, name, value)
        try:
            known, effects = (
                _measure_effects(type(algorithm)(settings)),
                [_measure_effects(type(algorithm)(other)) for other in variants],
            )
        except Exception:  # it is made of more than its settings
            return
        require(
            not effects or any(other != known for other in effects),
            f"the setting {name} changes no advantage, whatever its value is (check_algorithm(..., "
            f"without_effect=[{name!r}]) if that is meant)",
        )


def _setting_variants(kind: type[Any], settings: Any, name: str, value: float) -> list[Any]:
    """The settings with other values of one number, as far as they are valid."""
    variants = []
    for other in {*(value * factor for factor in _FACTORS), 0.0, 1.0, 0.1, 100.0} - {value}:
        with suppress(ValueError):
            variants.append(kind.model_validate({**settings.model_dump(), name: other}))
    return variants


def _measure_effects(algorithm: Any) -> list[Any]:
    """What is written for groups whose returns, turns, tokens and step rewards differ, over some steps."""
    effects: list[Any] = []
    for step in range(4):
        modes = tuple(algorithm.modes_of(step, 0))
        returns = [((3 * rollout + 2 * step) % 5) / 4 - 0.25 * (step == 2) for rollout in range(len(modes))]
        turns = [1 + (rollout + step) % 3 for rollout in range(len(modes))]
        varied = build_group(returns, key="effects", modes=modes, num_turns=turns)
        equal = build_group([step / 4] * len(modes), key="equal", modes=modes, num_turns=turns)
        groups = [varied, equal]
        for number, node in enumerate(node for trace in groups for node in trace.nodes if node.trainable):
            node.reward = (number % 3) / 4
            node.metadata |= {"invalid": number % 2 == 0, "num_tool_calls": number % 3, "tools": []}
        _assign_advantages(algorithm, groups)
        effects.append(_rounded(_assigned_values(groups)))
    return effects


def _rounded(value: Any) -> Any:
    """With numbers to nine digits: what only rounds in another way is no effect."""
    if isinstance(value, float):
        return round(value, 9) + 0.0
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _assigned_values(groups: Sequence[Trace]) -> list[Any]:
    return [
        (leaf.advantage, [(node.credit, node.ratio_scale) for node in path])
        for trace in groups
        for leaf, path in trace.rollouts()
    ]


def _check_memory(algorithm: Any, fresh: Any, num_steps: int) -> None:
    """Checks that JSON and arrays of a checkpoint are all that counts."""
    state, arrays = algorithm.state()
    require(
        all(isinstance(value, np.ndarray) for value in arrays.values()),
        "state: arrays holds what is no array",
    )
    try:
        plain = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state cannot be written as JSON: {error}") from error
    fresh.restore(plain, {name: value.copy() for name, value in arrays.items()})
    groups, same = _step(algorithm, num_steps), _step(fresh, num_steps)
    _assign_advantages(algorithm, groups)
    _assign_advantages(fresh, same)
    require(_assigned_values(groups) == _assigned_values(same), "other credit after state and restore")
