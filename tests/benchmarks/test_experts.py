"""Choices of experts that are played again: the same ones change nothing, others do, and weights follow."""

import pytest
import torch
from benchmarks.experts import MODELS, listening, measured, model_of, replaying
from torch import Tensor

TITLES = [title for title, experts in MODELS.items() if experts]


@pytest.mark.parametrize("title", TITLES)
def test_replayed_choices_equal_those_of_the_router(title: str) -> None:
    model = model_of(title, "float32", "unpacked").model
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logits() -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    with listening(model) as heard:
        before = logits()
    choices = {router: torch.cat(passes) for router, passes in heard.items()}
    assert choices and all(choice.shape == (20, 4) for choice in choices.values())
    with replaying(choices):
        assert torch.equal(logits(), before)
    others = {router: (choice + 1) % 16 for router, choice in choices.items()}
    with replaying(others), listening(model) as played:
        assert not torch.allclose(logits(), before, atol=1e-3)
    assert all(torch.equal(torch.cat(played[router]), choice) for router, choice in others.items())
    assert torch.equal(logits(), before)


def test_a_dense_model_has_no_choices_and_a_mismatch_of_rounding() -> None:
    gaps, replayed, others = measured(model_of("Qwen3", "float32", "packed"), num=1)
    assert len(gaps) == 64 and float(gaps.max()) < 1e-4 and others == 0.0
    assert torch.equal(gaps, replayed)


def test_gradients_flow_through_replayed_choices() -> None:
    model = model_of("Qwen3 MoE", "float32", "unpacked").model
    ids = torch.arange(3, 23)[None]
    with torch.no_grad(), listening(model) as heard:
        model(input_ids=ids, use_cache=False)
    gradients = []
    for choices in ({}, {router: torch.cat(passes) for router, passes in heard.items()}):
        model.zero_grad()
        with replaying(choices):
            model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        gradients.append([router.weight.grad.clone() for router in heard])
    for plain, replayed in zip(*gradients, strict=True):
        assert float(plain.abs().max()) > 0
        torch.testing.assert_close(replayed, plain)
