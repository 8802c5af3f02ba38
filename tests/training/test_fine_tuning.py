"""Supervised fine-tuning: the mean negative log-likelihood over the tokens of a batch, for any
micro-batches.
"""

import itertools

import pytest
import torch

from outrider.engines.local.model import LanguageModel
from outrider.errors import DataError
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.training.cold_start import cold_start, successful_paths
from outrider.training.packing import RolloutPath
from outrider.training.settings import ColdStartSettings
from outrider.types import Origin
from tests.tiny import tiny_model
from tests.training.test_pack_update import (  # noqa: F401
    Recorder,
    assert_equal_gradients,
    double_precision,
    eager,
    gradients_of,
    padded_logprobs,
    random_trace,
    shift,
)


class Scheduled(Recorder):
    """Records the learning rates of its steps."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, shift)
        self.rates: list[float | None] = []

    def step(self, *, learning_rate: float | None = None) -> float:
        self.rates.append(learning_rate)
        return super().step(learning_rate=learning_rate)


def solved(*, num: int = 3) -> tuple[list[Trace], list[RolloutPath]]:
    """Groups with shared prompts, of which every other rollout was solved; what was credited before must not
    matter.
    """
    traces = [random_trace(seed, key=str(seed)) for seed in range(num)]
    for rollout, leaf in itertools.chain.from_iterable(trace.leaves.items() for trace in traces):
        leaf.success = leaf.episode_return is not None and rollout % 2 == 0
    return traces, successful_paths(traces)


@pytest.mark.parametrize(
    "max_tokens", [40, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 10_000))]
)
def test_every_step_is_the_mean_over_the_tokens_of_its_batch(max_tokens: int) -> None:
    _, paths = solved()
    chosen = ColdStartSettings(num_examples=5, num_epochs=2, batch_size=2, learning_rate=0.5, warmup_steps=2)
    model = tiny_model(dtype=torch.float64)
    plain, policy = eager(model), Scheduled(model)
    losses: list[dict[str, float]] = []
    num_steps = cold_start(
        policy,
        paths,
        chosen,
        run_seed=4,
        max_tokens=max_tokens,
        on_step=lambda done, total, values: losses.append(values),
    )
    orders = [stream(4, "cold start order", epoch).permutation(len(paths)) for epoch in range(2)]
    batches = [
        [paths[i] for i in order[start : start + 2]] for order in orders for start in range(0, len(order), 2)
    ]
    assert num_steps == len(batches) == len(losses) == len(policy.gradients) > 4
    for batch, found, values in zip(batches, policy.gradients, losses, strict=True):
        logprobs = torch.cat(padded_logprobs(plain, batch))
        assert values["sft/loss"] == pytest.approx(-logprobs.mean().item(), rel=1e-12)
        assert (values["sft/num_tokens"], values["sft/num_examples"]) == (len(logprobs), len(batch))
        assert_equal_gradients(found, gradients_of(plain, -logprobs.mean()), 1e-12)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(shift(name, parameter))
    falling = [0.5 * (1.0 - 0.9 * number / num_steps) for number in range(num_steps)]
    # the first of two steps of a warm-up
    assert policy.rates == pytest.approx([0.5 * falling[0], *falling[1:]])


def test_a_skipped_batch_advances_neither_warm_up_nor_decay() -> None:
    class Skipping(Scheduled):
        def step(self, *, learning_rate: float | None = None) -> float:
            norm = super().step(learning_rate=learning_rate)
            return float("nan") if len(self.rates) in (1, 4) else norm

    def rates_of(kind: type[Scheduled]) -> list[float | None]:
        policy = kind(tiny_model(dtype=torch.float64))
        chosen = ColdStartSettings(num_examples=5, num_epochs=2, batch_size=2, warmup_steps=2)
        _, paths = solved()
        cold_start(policy, paths, chosen, run_seed=4, max_tokens=40, on_step=lambda *_: None)
        return policy.rates

    plain, skipping = rates_of(Scheduled), rates_of(Skipping)
    assert skipping[1:4] == plain[:3] and skipping[4:] == plain[2 : len(plain) - 2]
    assert skipping[0] == plain[0]


def test_only_policy_tokens_of_solved_rollouts_are_imitated() -> None:
    traces, paths = solved()
    kept = [path for trace in traces for leaf, path in trace.rollouts() if leaf.success]
    assert [path.nodes for path in paths] == kept and [path.rollout_index for path in paths] == list(
        range(len(kept))
    )
    for path in kept:
        for node in path:
            assert node.origin is not Origin.POLICY or node.credit == (1.0,) * len(node.token_ids)
            assert node.origin is Origin.POLICY or node.credit is None
    for leaf in itertools.chain.from_iterable(trace.leaves.values() for trace in traces):
        leaf.success = False
    with pytest.raises(DataError, match="nothing to imitate"):
        successful_paths(traces)
