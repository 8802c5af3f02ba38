"""Groups of rollouts with forks, ragged lengths and groups without a signal, and every kind of update."""

import random

import numpy as np

from outrider.algorithms.advantages import RolloutAdvantages
from outrider.algorithms.base import ObjectiveSettings, write_advantages
from outrider.config import validate
from outrider.trace import Leaf, Node, Trace
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Task

TEXT = Message(role="user", content="")
VOCABULARY = 99  # of the tiny model
_OF_THE_UPDATE = {
    "loss", "aggregation", "max_length", "kl_weight", "kl_estimator", "sampler_correction",
    "sampler_rejection", "positive_nll", "entropy_bonus", "old_context", "student_mask", "shaping",
    "clip_own", "weight_cap", "distill",
}  # fmt: skip


def distinct_objectives() -> dict[str, ObjectiveSettings]:
    """Every algorithm and preset, without those whose update equals that of an earlier one."""
    from tests.algorithms.test_every_objective import EVERY

    found: dict[str, ObjectiveSettings] = {}
    seen: set[str] = set()
    for name, table in EVERY.items():
        algorithm = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": table}).algorithm
        update = str((algorithm.type, algorithm.model_dump(include=_OF_THE_UPDATE)))
        if update not in seen:
            found[name] = algorithm
        seen.add(update)
    return found


def groups(num: int, *, rollouts: int = 4, seed: int = 0, longest: int = 40) -> list[Trace]:
    """Every second group has a fork; the third has equal returns, and so no gradient."""
    dice = random.Random(seed)
    return [_group(number, rollouts, dice, longest) for number in range(num)]


def _group(number: int, rollouts: int, dice: random.Random, longest: int) -> Trace:
    trace = Trace(task=Task(key=f"task {number}", question=""), modes=("plain",) * rollouts)

    def add(parent: Node | None, origin: Origin, size: int) -> Node:
        ids = tuple(dice.randrange(VOCABULARY) for _ in range(size))
        measured = {
            "logprobs": tuple(-3 * dice.random() for _ in ids),
            "entropies": (0.5,) * size,
            "weight_version": 0,
        }
        return trace.append(
            parent=None if parent is None else parent.node_id,
            origin=origin,
            token_ids=ids,
            message=TEXT,
            **(measured if origin is Origin.POLICY else {}),
        )

    root = add(None, Origin.PROMPT, dice.randint(10, longest))
    shared = add(root, Origin.POLICY, dice.randint(5, longest // 2)) if number % 2 else None
    for rollout in range(rollouts):
        tip = shared if shared is not None and rollout % 2 else root
        for _ in range(dice.randint(1, 2)):
            tip = add(tip, Origin.POLICY, dice.randint(3, longest))
            tip = add(tip, Origin.ENVIRONMENT, 5)
        tip = add(tip, Origin.POLICY, 2)
        value = 1.0 if number == 2 else dice.choice([0.0, 1.0])
        trace.finish(
            Leaf(
                node_id=tip.node_id,
                rollout=rollout,
                outcome=Outcome.FINISHED,
                episode_return=value,
                success=value > 0.5,
            )
        )
    trace.number_by_rollout()
    credit(trace)
    return trace


def credit(trace: Trace) -> None:
    """Standardised returns; a group of equal ones gets zeros."""
    returns = np.array([leaf.episode_return for leaf, _ in trace.rollouts()], dtype=float)
    values = (returns - returns.mean()) / (returns.std() + 1e-6)
    assigned = np.ones(len(values), dtype=bool)
    given = RolloutAdvantages(values=values, assigned=assigned, has_signal=bool(values.any()), reason=None)
    write_advantages(trace, given, attribution="soft")
