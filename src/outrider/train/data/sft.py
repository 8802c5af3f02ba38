"""Cold start: supervised fine-tuning on expert rollouts, in exactly the ids that rollouts have."""

import math
from collections.abc import Callable, Sequence

import torch

from outrider.algorithms.common.losses import weighted_loss
from outrider.errors import DataError
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.train.learning_settings import ColdStartSettings
from outrider.train.update.pack import RolloutPath
from outrider.train.update.policy import Policy
from outrider.train.update.ranks import pack_for_rank, padded_micro_batches


def successful_paths(traces: Sequence[Trace]) -> list[RolloutPath]:
    """Expert rollouts that the environment calls solved, with weight 1 on every policy token.

    Raises DataError when none is left: a cold start on nothing would pass in silence.
    """
    paths: list[RolloutPath] = []
    for trace in traces:
        for leaf, path in trace.rollouts():
            if not leaf.success:
                continue
            for node in path:
                if node.trainable:
                    node.credit = (1.0,) * len(node.token_ids)
            paths.append(RolloutPath(nodes=path, rollout_index=len(paths), group=len(paths)))
    if not paths:
        raise DataError("no expert rollout solved its task: there is nothing to imitate")
    return paths


def cold_start(
    policy: Policy,
    paths: Sequence[RolloutPath],
    settings: ColdStartSettings,
    *,
    run_seed: int,
    max_tokens: int,
    on_step: Callable[[int, int, dict[str, float]], None],
) -> int:
    """Negative log-likelihood, mean over the tokens of the batch; the learning rate falls linearly to a
    tenth. A batch that is skipped because its gradient is not finite advances neither the warm-up nor the
    decay.

    ``on_step(done, total, metrics)`` is called after every optimiser step. Returns the number of steps.
    """
    size = settings.batch_size
    orders = [
        stream(run_seed, "cold start order", epoch).permutation(len(paths))
        for epoch in range(settings.num_epochs)
    ]
    batches = [
        [paths[i] for i in order[start : start + size]]
        for order in orders
        for start in range(0, len(order), size)
    ]
    num_skipped = 0
    for number, batch in enumerate(batches):
        num_applied = number - num_skipped
        warm = min(1.0, (num_applied + 1) / max(1, settings.warmup_steps))
        rate = settings.learning_rate * warm * (1.0 - 0.9 * num_applied / len(batches))
        values = _step(policy, batch, rate, max_tokens)
        num_skipped += int(values["grad/num_skipped"])
        on_step(number + 1, len(batches), values)
    return len(batches)


def _step(
    policy: Policy, batch: Sequence[RolloutPath], learning_rate: float, max_tokens: int
) -> dict[str, float]:
    num_tokens = sum(len(node.token_ids) for path in batch for node in path.nodes if node.credit is not None)
    total = 0.0
    ranks = policy.ranks
    for micro in padded_micro_batches(pack_for_rank(ranks.share(batch), ranks, max_tokens=max_tokens), ranks):
        if micro is None:
            policy.dummy_forward().backward()
            continue
        scores = policy.score(micro)
        micro = micro.like(scores.logprobs_T)
        weights = torch.full_like(
            micro.advantages_T, 1.0 / num_tokens
        )  # of the batch, not of the micro-batch
        loss = weighted_loss(losses=-scores.logprobs_T * micro.advantages_T, weights=weights)
        loss.backward()
        total += float(loss.detach())
    total = sum(ranks.gather(total))
    norm = policy.step(learning_rate=learning_rate)
    return {
        "sft/loss": total,
        "sft/num_tokens": float(num_tokens),
        "sft/num_examples": float(len(batch)),
        "grad/norm": norm,
        "grad/num_skipped": float(not math.isfinite(norm)),
    }
