"""Advantages from returns, per group, per batch, per tree and for groups with demonstrations; and selection
of the groups to train on.

Shapes: N rollouts, T policy tokens of the flat packed layout (the tokens of a rollout in order of time).
None or NaN marks a rollout without a return, which no statistic includes and whose advantage is 0. Statistics
count rollouts, not turns or rows, unless documented as tokens. All values are float64. Sums are rounded
once (``fsum``), so that advantages do not depend on the order of the rollouts. If all returns in a group are
equal, every advantage is exactly 0. Sources: docs/algorithms/objectives.md.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
Returns = Sequence[float | None] | Float64Array
Index = Sequence[int] | NDArray[np.int64]
Variance = Literal["sample", "population"]
TreeCombination = Literal["sum", "inner", "nested"]
NoSignalReason = Literal["unscorable", "singleton", "no_spread", "rejected"]
Statistics = Literal["rollouts", "samples"]
TurnAdvantageKind = Literal["group_normalized", "group_centered", "leave_one_out"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutAdvantages:
    """The advantages of one group.

    ``values`` [N] are the advantages. ``assigned`` [N] is False for a rollout without a return (an
    infrastructure fault); its value 0 is a placeholder and must not be trained on. ``has_signal`` is False if
    all advantages are 0; ``reason`` is then one of: no rollout has a return (``unscorable``), only one has
    (``singleton``), all returns are equal (``no_spread``), or rejection sampling dropped all rollouts
    (``rejected``). ``turns`` are the advantages of the policy turns of each rollout, None if they are all
    that of the rollout.
    """

    values: Float64Array
    assigned: BoolArray
    has_signal: bool
    reason: NoSignalReason | None
    turns: tuple[Float64Array, ...] | None = None


def group_normalized_advantages_per_rollout(
    *,
    returns: Returns,
    std_ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    normalize_std: bool = True,
) -> RolloutAdvantages:
    """Compute ``(R_i - mean R) / (std R + eps)`` over one group (GRPO, arXiv 2402.03300 section 4.1).

    A group of one gets 0; upstream libraries return the raw return. A group whose max - min is within 1e-9 *
    max(1, max |R|) gets exactly 0, because a test of ``std == 0`` would amplify rounding noise.

    Args:
        returns: [N]; None or NaN marks a rollout without a return, which neither mean nor std includes.
        std_ddof: 1 for the sample std, 0 for the population std.
        normalize_std: False only centres (Dr. GRPO, arXiv 2503.20783).
        eps: added to the std.

    Raises:
        ValueError: for an empty group, an infinite return or a negative ``eps``.
    """
    if eps < 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    all_returns = _floats(returns)
    if all_returns.size == 0:
        raise ValueError("a group needs at least one rollout")
    assigned = ~np.isnan(all_returns)
    scorable = all_returns[assigned]
    if not has_spread(scorable):
        return _without_signal(assigned)
    centred = scorable - math.fsum(scorable) / scorable.size
    if normalize_std:
        # fsum rounds once, so the result does not depend on the order of the rollouts
        variance = math.fsum(centred * centred) / (scorable.size - std_ddof)
        centred = centred / (math.sqrt(variance) + eps)
    values = np.zeros(assigned.size)
    values[assigned] = centred
    return RolloutAdvantages(values=values, assigned=assigned, has_signal=True, reason=None)


def leave_one_out_advantages_per_rollout(*, returns: Returns) -> RolloutAdvantages:
    """Compute ``R_i - mean_{j != i} R_j`` over one group (RLOO, arXiv 2402.14740).

    The baseline does not depend on rollout i, so the policy gradient is unbiased. Rollouts without a return,
    groups of one and groups without spread are treated as in :func:`group_normalized_advantages_per_rollout`.
    """
    centred = _centred(returns=returns)
    size = int(centred.assigned.sum())
    # R_i minus the mean of the others is n / (n - 1) times R_i minus the mean of all
    return replace(centred, values=centred.values * (size / (size - 1))) if size > 1 else centred


def mean_normalized_advantages_per_rollout(*, returns: Returns) -> RolloutAdvantages:
    """Compute ``(R_i - mean R) / mean R`` over one group (MaxRL, arXiv 2602.02710).

    For returns of 0 and 1 and n rollouts, the expected gradient is that of the log-likelihood of success,
    truncated at order n - 1. Rollouts without a return, groups of one and groups without spread are treated
    as in :func:`group_normalized_advantages_per_rollout`. Raises ValueError for a negative return.
    """
    values = _floats(returns)
    if (values < 0.0).any():
        raise ValueError(
            f"advantage = mean_normalized needs returns of at least 0, a rollout has {np.nanmin(values):g}"
        )
    centred = _centred(returns=returns)
    scored = values[centred.assigned]
    if not centred.has_signal:
        return centred
    # With spread and no negative return the mean is above 0.
    return replace(centred, values=centred.values / (math.fsum(scored) / scored.size))


def pass_at_k_advantages_per_rollout(
    *, success: Sequence[bool | None], k: int, eps: float = 1e-6
) -> RolloutAdvantages:
    """Advantages of the reward pass@k over one group (arXiv 2508.10751, analytical form).

    With c successes of n rollouts, ``rho = 1 - C(n - c, k) / C(n, k)`` is the share of the subsets of k
    rollouts that contain a success, and ``sigma = sqrt(rho (1 - rho))``. A success gets
    ``(1 - rho) / sigma``, a failure ``(1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / sigma``. All
    advantages are 0 if sigma is 0, that is without a success, or with fewer than k failures.

    Args:
        success: [N]; None marks a rollout without a verdict, which does not count.
        k: k = 1 is the z-score with the population std.
        eps: added to sigma.

    Raises:
        ValueError: for an empty group or ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not success:
        raise ValueError("a group needs at least one rollout")
    assigned = np.array([verdict is not None for verdict in success])
    is_success = np.array([bool(verdict) for verdict in success])
    num, num_failures = int(assigned.sum()), int((assigned & ~is_success).sum())
    if num < 2 or num_failures == num or num_failures < k:
        return _without_signal(assigned)
    without_success = math.comb(num_failures, k) / math.comb(num, k)  # 1 - rho
    scale = math.sqrt(without_success * (1.0 - without_success)) + eps
    others_failed = math.comb(num_failures - 1, k - 1) / math.comb(num - 1, k - 1)
    values = np.where(is_success, without_success, without_success - others_failed) / scale
    return RolloutAdvantages(
        values=np.where(assigned, values, 0.0), assigned=assigned, has_signal=True, reason=None
    )


def best_minus_second_advantages_per_rollout(*, returns: Returns) -> RolloutAdvantages:
    """The best rollout of a group gets its return minus the second best return, all others 0 (the reward
    pass@n for graded returns, arXiv 2503.19595; verl's ``grpo_passk`` without its division by the std).

    If two rollouts share the best return, all advantages are 0.
    """
    group = _centred(returns=returns)
    values = np.zeros(group.assigned.size)
    if group.has_signal:
        scored = _floats(returns)
        second, best = np.sort(scored[group.assigned])[-2:]
        if not has_spread(np.array([second, best])):
            return replace(group, values=values, has_signal=False, reason="no_spread")
        values[int(np.nanargmax(scored))] = best - second
    return replace(group, values=values)


_centred = partial(group_normalized_advantages_per_rollout, normalize_std=False)
_REASONS: tuple[NoSignalReason, ...] = ("unscorable", "singleton", "no_spread")  # by the number of returns
_SPREAD_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnScores:
    """The scores of one group: ``turns`` has those of the policy turns of each rollout, the return minus the
    penalty of the turn, and ``rollouts`` their mean (None for a rollout without a return, which has no turn).
    """

    rollouts: Sequence[float | None]
    turns: Sequence[Sequence[float]]

    def population(self, statistics: Statistics) -> list[list[float]]:
        """Return the values of each rollout that mean and std count."""
        if statistics == "samples":
            return [list(turns) for turns in self.turns]
        return [[] if score is None else [score] for score in self.rollouts]


def advantages_per_turn(
    groups: Sequence[TurnScores],
    *,
    statistics: Statistics,
    kind: TurnAdvantageKind = "group_normalized",
    std: Literal["sample", "population", "batch"] = "sample",
) -> list[RolloutAdvantages]:
    """Compute the advantage ``(score - mean P) / F`` of every turn, and of every rollout by its mean score.

    P are the values that ``statistics`` counts in the group: one per rollout, or one per turn. F is 1 for
    ``group_centered``, and ``std P + 1e-6`` for ``group_normalized``. ``leave_one_out`` subtracts the mean of
    the other rollouts' values instead of mean P and has F = 1. With ``std = "batch"``, F is the sample std
    over all groups plus 1e-4: of P, or of the leave-one-out advantages of P. If P has no spread (with
    ``leave_one_out``: P and the turns' scores), all advantages of the group are exactly 0.
    """
    results: list[RolloutAdvantages] = []
    counted: list[float] = []  # over the batch
    for scores in groups:
        parts = scores.population(statistics)
        population = np.array([value for part in parts for value in part], dtype=np.float64)
        assigned = np.array([score is not None for score in scores.rollouts], dtype=np.bool_)
        num_others = [population.size - len(part) for part in parts]
        compared = population
        if kind == "leave_one_out":  # no std: turns may differ from each other even if P has no spread
            compared = np.concatenate([population, *map(np.array, scores.turns)])
        if not has_spread(compared) or (kind == "leave_one_out" and min(num_others) == 0):
            turns = tuple(np.zeros(len(own)) for own in scores.turns)
            results.append(replace(_without_signal(assigned), turns=turns))
            counted += [0.0] * population.size if kind == "leave_one_out" else population.tolist()
            continue
        scale, total = 1.0, math.fsum(population)
        baselines = [total / population.size] * len(parts)
        if kind == "leave_one_out":
            baselines = [(total - math.fsum(part)) / num for part, num in zip(parts, num_others, strict=True)]
        elif kind == "group_normalized" and std != "batch":
            squares = (population - baselines[0]) ** 2
            scale = math.sqrt(math.fsum(squares) / (population.size - (std == "sample"))) + 1e-6
        values = [
            0.0 if score is None else (score - baseline) / scale
            for score, baseline in zip(scores.rollouts, baselines, strict=True)
        ]
        turns = tuple(
            (np.array(own, dtype=np.float64) - baseline) / scale
            for own, baseline in zip(scores.turns, baselines, strict=True)
        )
        results.append(
            RolloutAdvantages(
                values=np.array(values, dtype=np.float64),
                assigned=assigned,
                has_signal=True,
                reason=None,
                turns=turns,
            )
        )
        if kind == "leave_one_out":
            counted += [value - baselines[i] for i, part in enumerate(parts) for value in part]
        else:
            counted += population.tolist()
    if std != "batch":
        return results
    scale = _sample_std(np.array(counted, dtype=np.float64)) + 1e-4
    return [
        replace(result, values=result.values / scale, turns=tuple(own / scale for own in result.turns or ()))
        for result in results
    ]


def batch_scaled_advantages_per_rollout(
    *, returns: Returns, groups: Sequence[Hashable], eps: float = 1e-4
) -> Float64Array:
    """``(R_i - mean of the group) / (std of the batch + eps)`` [N] (TRL, ``scale_rewards = "batch"``).

    The std is the sample std over all returns, so that groups with little spread are not amplified.
    ``groups`` [N] identifies the group of each rollout.
    """
    values = _floats(returns)
    return _over_std(_by_group(_centred, values, groups), counted=values[~np.isnan(values)], eps=eps)


def leave_one_out_batch_normalized_advantages_per_rollout(
    *, returns: Returns, groups: Sequence[Hashable], eps: float = 1e-4
) -> Float64Array:
    """Divide RLOO's advantages by their batch sample std plus ``eps`` [N] (TRL, ``normalize_advantages``).

    Their mean is 0 in every group, so no mean is subtracted, and a group without spread keeps exactly 0.
    """
    values = _floats(returns)
    advantages = _by_group(leave_one_out_advantages_per_rollout, values, groups)
    return _over_std(advantages, counted=advantages[~np.isnan(values)], eps=eps)


def token_rewards_per_token(
    *,
    returns: Returns,
    rollout_index: Index,
    kl_per_token: Float64Array | None = None,
    kl_weight: float = 0.0,
) -> Float64Array:
    """Return token rewards [T]: ``-kl_weight * k1`` on every token, plus the return on the last policy token.

    ``kl_per_token`` is k1 = ``log pi_old - log reference``. The last token of a rollout without a return gets
    NaN.
    """
    values, owners = _floats(returns), np.asarray(rollout_index, dtype=np.int64)
    if (kl_weight != 0.0) != (kl_per_token is not None):
        raise ValueError("kl_weight and kl_per_token belong together")
    rewards = (
        np.zeros(owners.size)
        if kl_per_token is None
        else -kl_weight * np.asarray(kl_per_token, dtype=np.float64)
    )
    # Later tokens overwrite earlier ones, so the index of the last token of each rollout remains.
    last = {int(owner): token for token, owner in enumerate(owners)}
    for owner, token in last.items():
        rewards[token] += values[owner]
    return rewards


def returns_to_go_per_token(
    rewards: Float64Array, *, rollout_index: Index, gamma: float = 1.0
) -> Float64Array:
    """Compute ``G_t = sum_{k >= t} gamma^(k - t) r_k`` [T] over the policy tokens of each rollout.

    Only policy tokens are discounted: a reward reaches the turns before an observation without an additional
    discount for the observation's tokens. Raises ValueError for gamma outside [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    returns_to_go: dict[int, float] = {}
    values = np.zeros(len(rewards))
    # One backward pass with a running return per rollout, because rollouts may be interleaved.
    for token in range(len(rewards) - 1, -1, -1):
        owner = int(rollout_index[token])
        returns_to_go[owner] = float(rewards[token]) + gamma * returns_to_go.get(owner, 0.0)
        values[token] = returns_to_go[owner]
    return values


def whitened_per_token(values: Float64Array, *, variance: Variance = "sample") -> Float64Array:
    """Compute ``(x - mean) / std`` [T] over all tokens of the batch; longer rollouts therefore weigh more.

    NaN is excluded and becomes 0. ``variance`` ``sample`` is verl's convention, ``1 / sqrt(sample variance +
    1e-8)``; ``population`` is OpenRLHF's, ``1 / sqrt(max(population variance, 1e-8))``. Without spread, or
    with fewer than two tokens, all values are exactly 0.
    """
    known = ~np.isnan(values)
    known_values = values[known]
    white = np.zeros(len(values))
    if not has_spread(known_values):
        return white
    centred = known_values - math.fsum(known_values) / known_values.size
    squares = math.fsum(centred * centred)
    scale = (
        squares / (known_values.size - 1) + 1e-8
        if variance == "sample"
        else max(squares / known_values.size, 1e-8)
    )
    white[known] = centred / math.sqrt(scale)
    return white


def reinforce_plus_plus_advantages_per_token(
    *,
    returns: Returns,
    rollout_index: Index,
    gamma: float = 1.0,
    kl_per_token: Float64Array | None = None,
    kl_weight: float = 0.0,
    turn_penalties: Float64Array | None = None,
    turn_index: Index = (),
    variance: Variance = "sample",
) -> Float64Array:
    """Compute the advantages of REINFORCE++ (arXiv 2501.03262): whitened returns-to-go [T] of the rewards
    of :func:`token_rewards_per_token`.

    No groups are needed: one rollout per task is enough. If all returns of a group are equal, its rollouts
    still get advantages relative to the batch. ``turn_penalties`` are subtracted at the last token of each
    turn and reach no other turn; ``turn_index`` [T] is the turn of each token.
    """
    # The NaN reward of a rollout's last token propagates to all its earlier tokens, and whitening excludes
    # NaN.
    rewards = token_rewards_per_token(
        returns=returns, rollout_index=rollout_index, kl_per_token=kl_per_token, kl_weight=kl_weight
    )
    values = returns_to_go_per_token(rewards, rollout_index=rollout_index, gamma=gamma)
    if turn_penalties is not None:
        penalties = token_rewards_per_token(returns=turn_penalties, rollout_index=turn_index)
        values -= returns_to_go_per_token(penalties, rollout_index=turn_index, gamma=gamma)
    return whitened_per_token(values, variance=variance)


def reinforce_plus_plus_baseline_advantages_per_token(
    *, returns: Returns, groups: Sequence[Hashable], rollout_index: Index, variance: Variance = "sample"
) -> Float64Array:
    """REINFORCE++-baseline: ``R_i - mean of the group`` on every token, whitened over the batch's tokens [T].

    Whitening centres again, weighted by tokens: with unequal lengths the advantages of a group may not sum to
    0, and each token of a group without spread gets the same small value instead of 0.
    """
    values = _floats(returns)
    centred = np.where(np.isnan(values), math.nan, _by_group(_centred, values, groups))
    return whitened_per_token(centred[np.asarray(rollout_index, dtype=np.int64)], variance=variance)


def tree_advantages_per_leaf(
    *, returns: Returns, trees: Sequence[Hashable], combination: TreeCombination = "sum", eps: float = 1e-6
) -> RolloutAdvantages:
    """Tree-GRPO (arXiv 2509.21240): z-scores of the leaves of one task, over the task and over each leaf's
    tree.

    ``trees`` [N] identifies the tree of each leaf. ``sum`` adds the z-score over all leaves and the z-score
    within the tree; ``inner`` is only the latter; ``nested`` is the z-score within the tree of the z-scores
    over all leaves. The only leaf of a tree has 0 within the tree.
    """
    values = _floats(returns)
    outer = group_normalized_advantages_per_rollout(returns=values, eps=eps)
    scored = np.where(outer.assigned, outer.values, math.nan) if combination == "nested" else values
    advantages = outer.values.copy() if combination == "sum" else np.zeros(values.size)
    reasons = []
    for members in _members(trees, values.size).values():
        inner = group_normalized_advantages_per_rollout(returns=scored[members], eps=eps)
        advantages[members] += inner.values
        reasons.append(inner.reason)
    has_signal = outer.has_signal if combination == "sum" else None in reasons
    lone = outer.reason or ("singleton" if "no_spread" not in reasons else "no_spread")
    return RolloutAdvantages(
        values=advantages, assigned=outer.assigned, has_signal=has_signal, reason=None if has_signal else lone
    )


def mixed_group_advantages_per_rollout(
    *,
    returns: Returns,
    is_demonstration: Sequence[bool],
    statistics: Literal["mixed", "on_policy"] = "mixed",
    normalize_std: bool = False,
    eps: float = 1e-6,
) -> RolloutAdvantages:
    """LUFFY (arXiv 2504.14945): advantages [N] of one group that contains demonstrations and rollouts of the
    policy.

    ``mixed`` includes demonstrations in mean and std. ``on_policy`` computes both from the policy's rollouts
    only; if these have no spread, a demonstration gets its unscaled distance from their mean. The paper
    divides by the std, the released script does not.
    """
    values = _floats(returns)
    demonstrated = np.asarray(is_demonstration, dtype=np.bool_)
    if demonstrated.size != values.size:
        raise ValueError(f"{values.size} returns with {demonstrated.size} marks of demonstrations")
    if statistics == "mixed":
        return group_normalized_advantages_per_rollout(returns=values, normalize_std=normalize_std, eps=eps)
    own = values[~demonstrated & ~np.isnan(values)]
    advantages = np.zeros(values.size)
    if own.size:
        advantages = np.where(np.isnan(values), 0.0, values - math.fsum(own) / own.size)
    if not has_spread(own):
        advantages[~demonstrated] = 0.0  # exactly 0 instead of the rounding error of the mean
    elif normalize_std:
        advantages /= _sample_std(own) + eps
    has_signal = bool(advantages.any())
    return RolloutAdvantages(
        values=advantages,
        assigned=~np.isnan(values),
        has_signal=has_signal,
        reason=None if has_signal else _REASONS[min(own.size, 2)],
    )


def overlong_penalty(*, length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), between ``-factor`` and 0. Add it to the
    reward.

    It is 0 up to ``max_length - buffer`` tokens, falls linearly to ``-factor`` at ``max_length``, and is
    constant beyond. Raises ValueError unless ``0 < buffer <= max_length`` and ``factor >= 0``.
    """
    if not 0 < buffer <= max_length or factor < 0.0:
        raise ValueError(
            f"invalid overlong penalty: max_length {max_length}, buffer {buffer}, factor {factor}"
        )
    excess = length - (max_length - buffer)
    return -factor * min(1.0, excess / buffer) if excess > 0 else 0.0


def groups_with_spread(
    metric: Returns, *, groups: Sequence[Hashable], tolerance: float = _SPREAD_TOLERANCE
) -> dict[Hashable, list[int]]:
    """Dynamic sampling (DAPO): the groups whose metric is not constant, with the positions of their rollouts,
    in first-seen order.

    Pass the unshaped metric: with a length penalty, groups that are all right or all wrong would have spread.
    A group is constant if max - min is within ``tolerance * max(1, max |x|)`` over its rollouts with a
    metric. A group of one is constant.
    """
    values = _floats(metric)
    members_by_group = _members(groups, values.size)
    return {
        group: members
        for group, members in members_by_group.items()
        if has_spread(values[members][~np.isnan(values[members])], tolerance)
    }


def difficulty_scores(
    predicted: Sequence[float] | Float64Array, *, target: float = 0.5, temperature: float = 1e-3
) -> Float64Array:
    """Return ``-|predicted mean reward - target| / temperature`` (DOTS): the sampling logits of the tasks.

    At the released temperature of 1e-3 this almost always selects the tasks nearest to the target.
    """
    return -np.abs(np.asarray(predicted, dtype=np.float64) - target) / temperature


def replayable_groups(
    keys: Sequence[Hashable], *, mean_rewards: Sequence[float], room: int | None = None
) -> list[int]:
    """RolloutReplay: positions of the stored groups that may be trained on again, oldest first.

    ``keys`` are the tasks of the stored groups, oldest first. Only the newest group of a task is eligible,
    and only if its mean reward is strictly between 0 and 1. ``room`` limits the result to the newest groups,
    those that stay stored when new groups are added.
    """
    newest = {key: position for position, key in enumerate(keys)}
    positions = sorted(position for position in newest.values() if 0.0 < mean_rewards[position] < 1.0)
    return positions if room is None else positions[max(0, len(positions) - max(0, room)) :]


def _without_signal(assigned: BoolArray) -> RolloutAdvantages:
    reason = _REASONS[min(int(assigned.sum()), 2)]
    return RolloutAdvantages(
        values=np.zeros(assigned.size), assigned=assigned, has_signal=False, reason=reason
    )


def _floats(returns: Returns) -> Float64Array:
    values = np.array([math.nan if value is None else float(value) for value in returns], dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError("a return is infinite")
    return values


def _members(groups: Sequence[Hashable], size: int) -> Mapping[Hashable, list[int]]:
    if len(groups) != size:
        raise ValueError(f"{size} returns with {len(groups)} group names")
    members: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    return members


def _by_group(function: Callable[..., Any], values: Float64Array, groups: Sequence[Hashable]) -> Float64Array:
    results = np.zeros(values.size)
    for members in _members(groups, values.size).values():
        results[members] = function(returns=values[members]).values
    return results


def has_spread(values: Float64Array, tolerance: float = _SPREAD_TOLERANCE) -> bool:
    """Whether values differ by more than rounding: relative for large values, absolute for small ones."""
    return values.size > 1 and bool(np.ptp(values) > tolerance * max(1.0, float(np.abs(values).max())))


def _over_std(advantages: Float64Array, *, counted: Float64Array, eps: float) -> Float64Array:
    if eps < 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    # If all advantages are 0 the std may be 0 too, and eps = 0 would then give 0 / 0.
    return advantages / (_sample_std(counted) + eps) if advantages.any() else advantages


def _sample_std(values: Float64Array) -> float:
    if values.size < 2:
        return 0.0
    centred = values - math.fsum(values) / values.size
    return math.sqrt(math.fsum(centred * centred) / (values.size - 1))
