"""Whether the engine that sampled has the weights of the trainer: their log-probs of the same tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.algorithms.common.token_loss import TokenLossInputs
from outrider.errors import EngineFault
from outrider.train.update.policy import Policy


def logprob_mismatch(inputs: TokenLossInputs, is_older_T: Tensor | None) -> Tensor:
    """|trainer - engine| in nats, of the tokens that the policy wrote in this step with the weights that it
    has (all of them without ``is_older_T``).
    """
    excluded_T = inputs.is_off_policy_T if is_older_T is None else inputs.is_off_policy_T | is_older_T
    return (inputs.old_logprobs.trainer_T - inputs.engine_logprobs_T)[~excluded_T].abs()


def check_logprob_mismatch(policy: Policy, mismatches: Sequence[Tensor], limit: float) -> None:
    """Raises EngineFault where the mean gap of all ranks is above ``limit``, and drops the gradients.

    The mean over all tokens of the mini-batch: that of a micro-batch would depend on the split, and a short
    one is noisy.
    """
    # float64: near the limit the verdict must not hang on how a float32 sum was split.
    values = torch.cat(
        [mismatch for each in policy.ranks.gather(list(mismatches)) for mismatch in each]
    ).double()
    mismatch = float(values.mean()) if len(values) else 0.0
    if not mismatch <= limit:  # NaN too
        policy.drop_gradients()
        raise EngineFault(
            f"trainer and engine disagree by {mismatch:.4f} nats a token before an update (limit {limit})"
        )
