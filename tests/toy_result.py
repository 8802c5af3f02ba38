"""What a training on a toy comes to. Without torch: tables are made where there is none."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One training run. ``expected_return`` is exact, at temperature 1 and without retrieval, the mean over
    the locks.

    ``num_on_policy_rewards`` counts rewarded rollouts without a retrieved step, ``num_hybrid_rewards`` those
    with one.
    """

    expected_return: float
    sampled_return: float
    num_policy_tokens: int
    num_rollouts: int
    num_steps: int
    num_on_policy_rewards: int
    num_hybrid_rewards: int
