"""Token weights, KL estimators and ratios."""

import math
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.losses import (
    Aggregation,
    clipped_surrogate_per_token,
    kl_per_token,
    token_weights,
    weighted_loss,
)
from outrider.algorithms.sampler_correction import (
    log_ratio,
    shaped_ratio,
)
from outrider.training.update import success_weights
from tests.vectors import load_vectors

CASES = load_vectors("kl_importance_aggregation")


def flat(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


def aggregate(
    losses: Any, mask: Any, kind: Any, *, num_rollouts: int, max_length: int | None = None
) -> float:
    rows = torch.tensor(mask).bool()
    weights = token_weights(
        kind=kind,
        rollout_index=torch.arange(len(rows)).repeat_interleave(rows.shape[1]),
        num_rollouts=num_rollouts,
        max_length=max_length,
        mask=rows.reshape(-1),
        dtype=torch.float64,
    )
    return float(weighted_loss(losses=flat(losses), weights=weights))


def test_aggregation_vectors() -> None:
    """The last row is fully masked: it counts as a sequence when ``num_rollouts`` says so."""
    case = CASES["agg.verl_0.9.1"]
    losses, mask, expected = case["inputs"]["loss_mat"], case["inputs"]["loss_mask"], case["expected"]
    for name, kind, num_rollouts, max_length in (
        ("token-mean", "token_mean", 6, None),
        ("token-sum", "token_sum", 6, None),
        ("seq-mean-token-sum", "sequence_mean_token_sum", 5, None),
        ("seq-mean-token-mean", "sequence_mean_token_mean", 5, None),
        ("seq-mean-token-mean(global_batch_size=6)", "sequence_mean_token_mean", 6, None),
        ("seq-mean-token-sum-norm(scale=16)", "constant_length", 5, 16),
        ("seq-mean-token-sum-norm", "constant_length", 5, 7),
    ):
        value = aggregate(losses, mask, kind, num_rollouts=num_rollouts, max_length=max_length)
        assert value == pytest.approx(expected[name], abs=1e-8), name


def test_old_forks_do_not_divide_by_the_number_of_sequences() -> None:
    """A known upstream fault: five sequences, so their value is five times ours."""
    case = CASES["agg.old_verl_forks"]
    losses, mask, expected = case["inputs"]["loss_mat"], case["inputs"]["loss_mask"], case["expected"]
    ours = aggregate(losses, mask, "constant_length", num_rollouts=5, max_length=7)
    assert expected["seq-mean-token-sum-norm"] == pytest.approx(5.0 * ours)


BATCH = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-1, 1), st.floats(-2, 0), st.floats(-2, 2), st.booleans()),
    min_size=1,
    max_size=20,
)


@given(
    batch=BATCH,
    kind=st.sampled_from(get_args(Aggregation)),
    garbage=st.sampled_from([math.nan, math.inf, -math.inf, 7.0]),
)
def test_masked_tokens_change_nothing(batch: Any, kind: Any, garbage: float) -> None:
    """Not the loss, not the gradient, not the denominators - whatever the masked values are, NaN included."""
    columns = list(zip(*batch, strict=True))
    mask = torch.tensor(columns[4])
    keep = torch.nonzero(mask)[:, 0]
    max_length = 9 if kind in ("constant_length", "sum_over_length") else None
    results = []
    for rows in (torch.arange(len(batch)), keep):
        logprobs = flat(columns[1])
        advantages = flat(columns[3])
        logprobs[~mask], advantages[~mask] = garbage, garbage
        logprobs.requires_grad_()
        weights = token_weights(
            kind=kind,
            rollout_index=torch.tensor(columns[0])[rows],
            num_rollouts=4,
            max_length=max_length,
            mask=mask[rows],
            dtype=torch.float64,
        )
        surrogate = clipped_surrogate_per_token(
            logprobs=logprobs[rows], old_logprobs=flat(columns[2])[rows], advantages=advantages[rows]
        )
        loss = weighted_loss(losses=surrogate.losses, weights=weights)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        results.append((loss.item(), gradient))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    assert torch.equal(results[0][1][keep], results[1][1][keep]) and not results[0][1][~mask].any()


def test_a_fault_in_a_trained_token_is_not_hidden() -> None:
    losses = torch.tensor([1.0, math.nan])
    assert math.isnan(float(weighted_loss(losses=losses, weights=torch.ones(2))))


def test_token_weights_without_effect_or_outside_are_errors() -> None:
    index = torch.tensor([0, 1])
    wrong_lengths: list[tuple[Any, dict[str, Any]]] = [
        ("token_mean", {"max_length": 8}),
        ("constant_length", {}),
        ("constant_length", {"max_length": 0}),
    ]
    for kind, arguments in wrong_lengths:
        with pytest.raises(ValueError, match="max_length"):
            token_weights(kind=kind, rollout_index=index, num_rollouts=2, **arguments)
    for wrong in (torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match="outside"):
            token_weights(kind="sequence_mean_token_mean", rollout_index=wrong, num_rollouts=2)
    nothing = token_weights(
        kind="token_mean", rollout_index=index, num_rollouts=2, mask=torch.zeros(2, dtype=torch.bool)
    )
    assert nothing.tolist() == [0.0, 0.0] and nothing.dtype == torch.float32


def test_kl_vectors() -> None:
    case = CASES["kl.verl.extremes"]
    logprobs, reference = flat(case["inputs"]["log_prob"]), flat(case["inputs"]["ref_log_prob"])
    k1, k2, k3 = (
        kl_per_token(estimator=name, logprobs=logprobs, reference_logprobs=reference)
        for name in ("k1", "k2", "k3")
    )
    # upstream leaves k1 and k2 unclamped, and clamps the *value* of k3 to 10, whose gradient is then 0
    inside = slice(1, 4)
    np.testing.assert_allclose(k1[inside], case["expected"]["kl"][inside])
    np.testing.assert_allclose(k2[inside], case["expected"]["mse"][inside])
    assert case["expected"]["low_var_kl"][1] == 10.0
    np.testing.assert_allclose(k3[2:4], case["expected"]["low_var_kl"][2:4], rtol=1e-12)
    np.testing.assert_allclose(
        k3[[0, 1, 4]], [math.expm1(20.0) - 20.0, math.expm1(5.0) - 5.0, math.expm1(-20.0) + 20.0]
    )
    assert k1[[0, 4]].tolist() == [-20.0, 20.0]
    for small in CASES["arpo.kl_penalty"]["cases"]:
        arguments: dict[str, Any] = {
            "logprobs": flat([small["logprob"]]),
            "reference_logprobs": flat([small["ref_logprob"]]),
        }
        for name, key in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")):
            estimator: Any = name
            assert float(kl_per_token(estimator=estimator, **arguments)) == pytest.approx(
                small[key], abs=1e-7
            )


def test_kl_values_and_gradients_in_expectation() -> None:
    """Enumerated over a five-way categorical: what each estimator estimates, and where its gradient
    points.
    """
    generator = np.random.default_rng(0)
    logits = torch.tensor(generator.normal(size=5), requires_grad=True)
    reference = torch.log_softmax(torch.tensor(generator.normal(size=5)), dim=0)
    logprobs = torch.log_softmax(logits, dim=0)
    policy = logprobs.detach().exp()
    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, logits, retain_graph=True)
    for estimator, unbiased, direction in (
        ("k1", True, torch.zeros(5, dtype=torch.float64)),
        ("k2", False, reverse_gradient),
        ("k3", True, forward_gradient),
        ("k3_ratio", True, reverse_gradient),
    ):
        extra = {"old_logprobs": logprobs.detach()} if estimator == "k3_ratio" else {}
        values = kl_per_token(
            estimator=estimator,  # type: ignore[arg-type]
            logprobs=logprobs,
            reference_logprobs=reference,
            **extra,
        )
        expected = (policy * values).sum()
        assert (abs(expected.item() - reverse.item()) < 1e-12) is unbiased
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        np.testing.assert_allclose(gradient, direction, atol=1e-12)


def test_kl_old_logprobs_belong_to_one_estimator() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="k3_ratio"):
        kl_per_token(estimator="k3_ratio", logprobs=zeros, reference_logprobs=zeros)
    with pytest.raises(ValueError, match="k3_ratio"):
        kl_per_token(estimator="k2", logprobs=zeros, reference_logprobs=zeros, old_logprobs=zeros)


def test_log_ratio_clamp_and_retrieval_shaping() -> None:
    values = log_ratio(logprobs=flat([30.0, -30.0, 1.0]), reference_logprobs=flat([0.0, 0.0, 0.5]))
    assert values.tolist() == [20.0, -20.0, 0.5]
    shaped = shaped_ratio(ratio=flat([1.0, 2.0, 0.5]), scale=flat([1.0, 1.025, 1.05]))
    np.testing.assert_allclose(shaped, [1.0, 2.05, 0.525])


def test_the_likelihood_term_weighs_every_token_of_successful_rollouts_the_same() -> None:
    """By hand: rollouts 0 and 2 succeeded; one of 2's tokens is a demonstrator's, over two micro-batches."""
    paths: Any = [SimpleNamespace(succeeded=success) for success in (True, False, True)]
    batches: Any = [
        SimpleNamespace(
            rollout_index_T=torch.tensor([0, 1, 0]), is_off_policy_T=torch.tensor([False, False, False])
        ),
        SimpleNamespace(rollout_index_T=torch.tensor([2, 2]), is_off_policy_T=torch.tensor([True, False])),
    ]
    weights = success_weights(paths, batches)
    assert [each.tolist() for each in weights] == [
        pytest.approx([1 / 3, 0.0, 1 / 3]),
        pytest.approx([0.0, 1 / 3]),
    ]
    failures = success_weights([SimpleNamespace(succeeded=False)] * 3, batches)  # type: ignore[list-item]
    assert all(not each.any() for each in failures)
