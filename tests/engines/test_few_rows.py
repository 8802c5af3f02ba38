"""The decoding step's own forward pass: the modules' values for every family, and never stale or unsupported
weights.
"""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from outrider.engines.base import Request
from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.attention import (
    IMPLEMENTATION,
    DecodePlan,
    Prefill,
    PrefillPlan,
    Segment,
    SlotCache,
    TreePlan,
    register,
)
from outrider.engines.local.cpu_kernels import FewRows, fuse
from outrider.engines.local.engine import LocalEngine
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings
from tests.engines.test_fused import SIZES, tiny
from tests.tiny import tiny_model


def family(kind: type, dtype: torch.dtype) -> nn.Module:
    register()
    model = tiny(kind(**SIZES, tie_word_embeddings=kind is not Qwen3Config), dtype)
    model.config._attn_implementation = IMPLEMENTATION
    fuse(model)
    return model


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_modules(kind: type, dtype: torch.dtype) -> None:
    if not onednn.can_pack(dtype):
        pytest.skip(f"no packed layers of {dtype} on this processor: the modules decode (test_local)")
    model = family(kind, dtype)
    few = FewRows(model)
    assert few.is_supported
    ids = torch.randint(0, 61, (1, 25), generator=torch.Generator().manual_seed(1))
    plan = TreePlan(segments=(Segment(length=11), Segment(length=14, ancestors=(0,))))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False, plan=plan).logits
        found = few.logits(ids, torch.arange(25)[None], plan)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, wanted, **tolerance)


def test_a_decoding_step_reads_the_slots() -> None:
    model = family(LlamaConfig, torch.float32)
    lengths = torch.tensor([3, 5])
    ids = torch.randint(0, 61, (2, 6), generator=torch.Generator().manual_seed(2))

    def run(step: object) -> torch.Tensor:
        cache = SlotCache(dtype=torch.float32, device=torch.device("cpu"))
        cache.reserve(2, 8)
        rows = (Prefill(start=0, end=3, slot=0, cached=0), Prefill(start=3, end=8, slot=1, cached=0))
        packed = torch.cat([ids[0, :3], ids[1, :5]])[None]
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
        model.base_model(
            input_ids=packed,
            position_ids=positions,
            use_cache=False,
            plan=PrefillPlan(cache=cache, rows=rows),
        )
        unseen = torch.arange(6)[None, None, None] > lengths[:, None, None, None]
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
        plan = DecodePlan(cache=cache, lengths_B=lengths, mask_B11T=mask, rows_B=torch.arange(2))
        newest = ids[torch.arange(2), lengths][:, None]
        return step(newest, lengths[:, None], plan)  # type: ignore[operator,no-any-return]

    with torch.no_grad():
        wanted = run(
            lambda newest, at, plan: (
                model(input_ids=newest, position_ids=at, use_cache=False, plan=plan).logits
            )
        )
        found = run(FewRows(model).logits)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_an_engine_whose_weights_moved_does_not_decode_with_the_old_ones() -> None:
    lm = tiny_model()
    fuse(lm.model)
    engine = LocalEngine(lm)
    assert FewRows(lm.model).is_supported

    def logprobs(name: str) -> tuple[float, ...]:
        request = Request(request_id=name, token_ids=(5, 6, 7, 8), max_tokens=6, seed=3)
        return engine.generate([request])[0].logprobs

    before = logprobs("a")
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.mul_(1.2)
    engine.load(engine.weight_version + 1)
    fresh = LocalEngine(lm).generate([Request(request_id="b", token_ids=(5, 6, 7, 8), max_tokens=6, seed=3)])[
        0
    ]
    after = logprobs("c")
    assert after != before and after == fresh.logprobs


@pytest.mark.parametrize("built_before", [False, True])
def test_an_adapter_is_decoded_with(built_before: bool) -> None:
    """peft wraps a plain layer and lends its weight: read through the wrapper, the adapter would be ignored
    in silence.
    """
    pytest.importorskip("peft")
    lm = tiny_model()
    fuse(lm.model)
    request = Request(request_id="a", token_ids=(5, 6, 7), max_tokens=5, seed=3)
    engine = LocalEngine(lm)
    if built_before:
        engine.generate([request])
    policy = Policy(
        lm,
        OptimizerSettings(learning_rate=1e-3),
        lora=LoraSettings(rank=2, target_modules=("q_proj", "down_proj")),
    )
    assert not FewRows(lm.model).is_supported
    with torch.no_grad():
        for name, master in policy.masters.items():
            if "lora_B" in name:
                master.fill_(0.3)
    policy.round_masters()
    if built_before:
        engine.load(engine.weight_version + 1)
    else:
        engine = LocalEngine(lm)
    generation = engine.generate([request])[0]
    ids = torch.tensor([[*request.token_ids, *generation.token_ids]])
    with torch.no_grad():
        plan = TreePlan(segments=(Segment(length=ids.shape[1]),))
        logits = lm.model(input_ids=ids, use_cache=False, plan=plan).logits[0].log_softmax(-1)
    wanted = [float(logits[2 + i, token]) for i, token in enumerate(generation.token_ids)]
    assert generation.logprobs == pytest.approx(wanted, abs=1e-4)


def test_other_modules_use_the_plain_forward_pass() -> None:
    plain = tiny_model()  # not fused: a norm could be anything
    assert not FewRows(plain.model).is_supported
    wrapped = tiny_model()
    fuse(wrapped.model)
    layer = wrapped.model.base_model.layers[0].mlp

    class Adapter(nn.Linear):
        """An adapter replaces a linear layer by a class of its own."""

    layer.down_proj = Adapter(layer.down_proj.in_features, layer.down_proj.out_features)
    assert not FewRows(wrapped.model).is_supported
    assert (
        len(
            LocalEngine(wrapped)
            .generate([Request(request_id="a", token_ids=(5, 6), max_tokens=2, seed=0)])[0]
            .token_ids
        )
        > 0
    )
