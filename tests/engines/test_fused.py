"""Norms, gated MLPs, attention and the vocabulary projection in blocks: the values and gradients of the plain
modules.
"""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outrider.algorithms.distill_losses import divergence_per_token
from outrider.engines.local import attention as segment_attention
from outrider.engines.local import cpu_kernels as fused
from outrider.engines.local import cpu_kernels as rotary
from outrider.engines.local.attention import IMPLEMENTATION, Segment, TreePlan, register
from outrider.engines.local.processor import Processor
from outrider.training import policy as chunked_logprobs
from outrider.training.policy import score_logits, score_tokens

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def tiny(config: LlamaConfig | Qwen2Config | Qwen3Config, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a forgotten weight
            parameter.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_model_computes_the_bits_of_the_plain_one(
    kind: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_FUSED_BLOCK", 32 * 7)  # several blocks of rows, the last one shorter
    plain = tiny(kind(**SIZES), dtype)
    monkeypatch.setattr(rotary, "_ROTARY_BLOCK", 32 * 4)
    register()
    plain.config._attn_implementation = IMPLEMENTATION
    ours = copy.deepcopy(plain)
    fused.fuse(ours)
    assert sum("forward" in vars(module) for module in ours.modules()) >= 9
    ids = torch.randint(0, 61, (1, 25), generator=torch.Generator().manual_seed(1))
    plan = TreePlan(segments=(Segment(length=11), Segment(length=14, ancestors=(0,))))
    wanted, found = (model(input_ids=ids, use_cache=False, plan=plan).logits for model in (plain, ours))
    assert torch.equal(wanted, found)
    for logits in (wanted, found):
        torch.log_softmax(logits.float(), -1)[..., 3].sum().backward()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for (name, one), (_, other) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name, **tolerance)


def test_transformers_own_attention_and_caches_work_on_a_fused_model() -> None:
    plain = tiny(LlamaConfig(**SIZES), torch.float32)
    ours = copy.deepcopy(plain)
    fused.fuse(ours)
    ids = torch.arange(9)[None]
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": 60}
    assert torch.equal(plain.generate(ids, **options), ours.generate(ids, **options))


@given(rows=st.integers(1, 3), tokens=st.integers(1, 9), heads=st.integers(1, 3), half=st.integers(1, 4))
def test_rotation_and_its_gradient(rows: int, tokens: int, heads: int, half: int) -> None:
    x = torch.randn(rows, tokens, heads, 2 * half, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, tokens, half, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    one, other = x.chunk(2, dim=-1)
    wanted = x * cos[:, :, None] + torch.cat((-other, one), dim=-1) * sin[:, :, None]
    assert torch.equal(rotary._Rotate.apply(x, cos, sin), wanted)
    assert torch.autograd.gradcheck(lambda y: rotary._Rotate.apply(y, cos, sin), (x,))


def test_a_copy_of_a_fused_model_uses_its_own_weights() -> None:
    model = tiny(LlamaConfig(**SIZES), torch.float32)
    fused.fuse(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    ids = torch.arange(9)[None]
    before = model(input_ids=ids).logits
    other(input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.allclose(other(input_ids=ids).logits, before)


@pytest.fixture
def onednn_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on other processors and for small weights."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(fused, "_MIN_WEIGHT", 1)
    monkeypatch.setattr(fused, "prefers_onednn", lambda: True)


@pytest.mark.usefixtures("onednn_everywhere")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (64,), (65,), (1, 133), (2, 3)])
def test_products_of_onednn_and_their_gradients(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows and gradients with any strides and of any number, against float64."""
    monkeypatch.setattr(fused, "_MAX_OUTPUTS", 4)
    generator = torch.Generator().manual_seed(0)
    sizes = ((*shape, 14), (9, 7), (9,), (*shape, 9))
    wide, weight, bias, outer = (torch.randn(size, generator=generator) for size in sizes)
    given = [wide[..., ::2], weight, *([bias] if has_bias else [])]
    exact = [one.double().requires_grad_() for one in given]
    ours = [one.detach().requires_grad_() for one in given]
    wanted, found = nn.functional.linear(*exact), fused.linear(*ours)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for gradient in (outer, torch.ones(()).expand_as(outer)):
        slopes = torch.autograd.grad(found, ours, gradient, retain_graph=True)
        right = torch.autograd.grad(wanted, exact, gradient.double(), retain_graph=True)
        for one, other in zip(slopes, right, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    if len(shape) == 1:
        written = fused.linear_into(torch.empty(*shape, 9), given[0], weight, bias if has_bias else None)
        torch.testing.assert_close(written.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("onednn_everywhere")
def test_a_product_of_onednn_keeps_only_what_its_gradient_needs() -> None:
    layer, rows = nn.Linear(6, 5), torch.randn(4, 6, requires_grad=True)
    layer.weight.requires_grad_(False)
    output = fused.linear(rows, layer.weight, layer.bias)
    assert output.grad_fn is not None
    assert output.grad_fn.saved_tensors[0] is None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        [slope] = torch.autograd.grad(output.square().sum(), rows, create_graph=True)
        slope.sum().backward()


@pytest.mark.usefixtures("onednn_everywhere")
def test_a_layer_with_such_products_is_freed_with_its_last_reference() -> None:
    """A forward that is bound to its layer would keep the weight until the garbage collector runs."""
    layer = nn.Linear(6, 5)
    fused.fuse(layer)
    assert "forward" in vars(layer)
    left = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("onednn_everywhere")
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_model_with_products_of_onednn(kind: type) -> None:
    """Its logits, gradients, copies and packed layers, beside the plain model."""
    plain = tiny(kind(**SIZES), torch.float32)
    model = copy.deepcopy(plain)
    fused.fuse(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all("forward" in vars(module) for module in linears)
    ids = torch.arange(9)[None]
    losses = []
    for one in (plain, model):
        hidden = one.base_model(input_ids=ids).last_hidden_state[0]
        losses.append(score_tokens(hidden, ids[0], one.get_output_embeddings())[0])
        losses[-1].sum().backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=name, rtol=1e-4, atol=1e-5)
    before = model(input_ids=ids).logits
    with torch.no_grad(), fused.PackedLinears(model).active():
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.allclose(other(input_ids=ids).logits, before)


def test_the_library_of_products_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zen 5 with AVX-512 in torch; not Zen 4, Intel, or a torch that is limited to AVX2."""
    choose = fused.prefers_onednn.__wrapped__

    def chosen(vendor: str, family: int, capability: str) -> bool:
        found = Processor(model="", instruction_sets=frozenset(), vendor=vendor, family=family)
        monkeypatch.setattr(fused, "read_processor", lambda: found)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return bool(choose())

    works = torch.backends.mkldnn.is_available()
    assert chosen("AuthenticAMD", 26, "AVX512") == works
    assert not chosen("AuthenticAMD", 25, "AVX512") and not chosen("GenuineIntel", 26, "AVX512")
    assert not chosen("AuthenticAMD", 26, "AVX2")


def test_norm_and_gate_gradients_in_float64_by_finite_differences() -> None:
    gate, up = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(fused._SwiGlu.apply, (gate, up))


def test_the_norm_s_gradient_against_a_float64_reference() -> None:
    torch.manual_seed(0)
    x, weight, outer = torch.randn(50, 24), torch.rand(24) + 0.5, torch.randn(50, 24)
    x32, w32 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    fused._RmsNorm.apply(x32, w32, 1e-5).mul(outer).sum().backward()
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    (w64 * x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5) * outer.double()).sum().backward()
    torch.testing.assert_close(x32.grad.double(), x64.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w32.grad.double(), w64.grad, rtol=1e-5, atol=1e-5)


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    keys, values = (
        tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value)
    )
    scores = scale * query @ keys.transpose(2, 3)
    visible = torch.ones(scores.shape[2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ values


@pytest.mark.parametrize("num_before", [0, 70])
def test_attention_s_gradient_in_bfloat16_against_a_float64_reference(num_before: int) -> None:
    """Within 1 % in the norm: two blocks of queries, scores with a standard deviation of 1, inputs that
    bfloat16 holds exactly.
    """
    torch.manual_seed(0)
    shapes = ((1, 6, 200, 16), *[(1, 2, num_before + 200, 16)] * 2)
    ours = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    outer = torch.randn(shapes[0]).bfloat16()
    output = segment_attention.causal_attention(*ours, 0.25)
    assert "_CpuAttention" in type(output.grad_fn).__name__
    output.backward(outer)
    wanted = written_out(*exact, 0.25)
    wanted.backward(outer.double())
    found = [output.detach(), *(tensor.grad for tensor in ours)]
    for one, other in zip(found, [wanted.detach(), *(tensor.grad for tensor in exact)], strict=True):
        error = float((one.double() - other).norm() / other.norm())
        assert error < 0.01, error


@given(
    rows=st.integers(1, 3), num_new=st.integers(1, 12), num_before=st.integers(0, 9),
    kv_heads=st.integers(1, 3), repeats=st.integers(1, 3), seed=st.integers(0, 2**32 - 1),
    way=st.sampled_from(["fused", "products", "lower right", "repeatable", "products forward"]),
)  # fmt: skip
def test_attention_and_its_gradients_equal_a_written_out_softmax(
    rows: int, num_new: int, num_before: int, kv_heads: int, repeats: int, seed: int, way: str
) -> None:
    """The backward passes: the fused kernel's, that of bfloat16, and a GPU's, which computes the attention
    again; a GPU's mask; and the forward pass of bfloat16. Those of bfloat16 have small blocks here.
    """
    torch.manual_seed(seed)
    shapes = ((rows, kv_heads * repeats, num_new, 4), *[(rows, kv_heads, num_before + num_new, 4)] * 2)
    ours = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    plain = [tensor.detach().clone().requires_grad_() for tensor in ours]
    outer = torch.randn(shapes[0], dtype=torch.float64)
    small = {
        "_NUM_SCORES": 20,
        "_MOST_SCORES": 60,
        "_FEW_QUERIES": 2,
        "_QUERY_BLOCK": 5,
        "_QUERY_STEP": 3,
        "_KEY_STEP": 2,
    }
    if way == "products":
        with patch.multiple(segment_attention, **small, _KEY_BLOCK=4):
            output = segment_attention._CpuAttention.apply(*ours, 0.3)
            output.backward(outer)
    else:
        attend = {
            "fused": segment_attention.causal_attention,
            "lower right": segment_attention._lower_right,
            "repeatable": segment_attention._RepeatableAttention.apply,
            "products forward": segment_attention._products,
        }[way]
        with patch.multiple(segment_attention, **small, _KEY_BLOCK=4):
            output = attend(*ours, 0.3)
        output.backward(outer)
    wanted = written_out(*plain, 0.3)
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-10)
    (wanted * outer).sum().backward()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_scores", [1, 100, 10_000])
def test_a_decoding_step_with_plain_products_equals_a_written_out_softmax(
    num_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows of different lengths, each alone, two at a time, and all at once."""
    monkeypatch.setattr(segment_attention, "_NUM_SCORES", num_scores)
    monkeypatch.setattr(segment_attention, "_KEY_BLOCK", 3)
    monkeypatch.setattr(segment_attention, "prefers_products", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 0, 7, 2, 6]
    cache = segment_attention.SlotCache(dtype=torch.float64, device=torch.device("cpu"))
    cache.reserve(len(lengths), 8)
    query, key, value = (
        torch.randn(5, heads, 1, 4, dtype=torch.float64, generator=generator) for heads in (6, 2, 2)
    )
    module: Any = SimpleNamespace(layer_idx=0)
    for stored in cache.layer(0, key):
        stored.copy_(torch.randn(stored.shape, dtype=torch.float64, generator=generator))
    plan = segment_attention.DecodePlan(
        cache=cache,
        lengths_B=torch.tensor(lengths),
        mask_B11T=segment_attention.decode_mask(torch.tensor(lengths), 8, dtype=torch.float64),
        rows_B=torch.arange(5),
    )
    output = plan.attend(module, query, key, value, 0.3)
    keys, values = cache.layer(0, key)
    for row, length in enumerate(lengths):
        seen = (row, slice(None), slice(length + 1))
        wanted = written_out(query[row][None], keys[seen][None], values[seen][None], 0.3)
        torch.testing.assert_close(output[row][None], wanted.transpose(1, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_before", [0, 70])
def test_attention_in_bfloat16_is_within_a_percent_with_either_kernel(
    num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a float64 reference, in the norm."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape).bfloat16() for shape in ((1, 6, 200, 16), *[(1, 2, num_before + 200, 16)] * 2)
    ]
    wanted = written_out(*(tensor.double() for tensor in tensors), 0.25)
    outputs = []
    for is_fast in (True, False):
        monkeypatch.setattr(segment_attention, "_has_fast_products", lambda is_fast=is_fast: is_fast)
        outputs.append(segment_attention.causal_attention(*tensors, 0.25))
        assert (outputs[-1].double() - wanted).norm() < 0.01 * wanted.norm()
    assert not torch.equal(*outputs)


def test_a_gpu_s_backward_pass_is_in_the_strict_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode that only warns, a GPU's kernels add in any order."""
    modes: list[tuple[bool, bool]] = []
    fused_attention = segment_attention._attend

    def recorded(*given_: Any) -> torch.Tensor:
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        modes.append((torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled() and strict))
        return fused_attention(*given_)

    monkeypatch.setattr(segment_attention, "_attend", recorded)
    ours = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        segment_attention._RepeatableAttention.apply(*ours, 0.3).sum().backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    segment_attention._RepeatableAttention.apply(*ours, 0.3).sum().backward()
    assert modes == [(False, False), (True, True), (False, False), (True, False)]


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_other_devices_have_a_repeatable_backward_pass_whatever_trains(trained: int) -> None:
    """Adapters may train keys or values only."""
    shapes = (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)
    ours = [torch.randn(shape, device="meta").requires_grad_(i == trained) for i, shape in enumerate(shapes)]
    output = segment_attention.causal_attention(*ours, 0.3)
    assert "_RepeatableAttention" in type(output.grad_fn).__name__
    with torch.no_grad():
        assert segment_attention.causal_attention(*ours, 0.3).grad_fn is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plain_linear", [True, False])
def test_scored_tokens_equal_a_whole_softmax(
    bias: bool, plain_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of four chunks of two rows, of which one is kept; another module than nn.Linear takes the
    general way.
    """
    for name, rows in (("_BLOCK", 8), ("_CHUNK", 2), ("_CPU_CHUNK", 2)):
        monkeypatch.setattr(chunked_logprobs, name, rows)
    torch.manual_seed(0)
    head = nn.Linear(6, 19, bias=bias, dtype=torch.float64)
    hidden = torch.randn(21, 6, dtype=torch.float64, requires_grad=True)
    targets, outer = torch.randint(0, 19, (21,)), torch.randn(21, dtype=torch.float64)
    logprobs, entropies = score_tokens(hidden, targets, head if plain_linear else nn.Sequential(head))
    (logprobs * outer).sum().backward()
    found = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    whole = torch.log_softmax(head(hidden), dim=-1)
    wanted = whole.gather(1, targets[:, None])[:, 0]
    (wanted * outer).sum().backward()
    torch.testing.assert_close(logprobs, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropies, -(whole.exp() * whole).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    assert not entropies.requires_grad
    for one, other in zip(
        found, [hidden.grad, *(parameter.grad for parameter in head.parameters())], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("of", ["entropies", "both"])
@pytest.mark.parametrize("plain_linear", [True, False])
def test_the_gradient_of_entropies_equals_that_of_a_whole_softmax(
    plain_linear: bool, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block has saved probabilities, the others are computed again; one logit is far below the
    others, so that its probability rounds to 0.
    """
    for name, rows in (("_BLOCK", 8), ("_CHUNK", 2), ("_CPU_CHUNK", 2)):
        monkeypatch.setattr(chunked_logprobs, name, rows)
    torch.manual_seed(1)
    head = nn.Linear(6, 19, dtype=torch.float64)
    head.bias.data[3] = -1e4
    hidden = torch.randn(21, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(4, 19, (21,))
    outer, bonus = torch.randn(2, 21, dtype=torch.float64)
    logprobs, entropies = score_tokens(
        hidden, targets, head if plain_linear else nn.Sequential(head), trains_entropy=True
    )
    whole = torch.log_softmax(head(hidden), dim=-1)
    wanted = -(whole.exp() * whole).sum(-1)
    torch.testing.assert_close(entropies, wanted, rtol=1e-12, atol=1e-12)
    inputs = [hidden, head.weight, head.bias]
    loss, expected = (entropies * bonus).sum(), (wanted * bonus).sum()
    if of == "both":
        loss = loss + (logprobs * outer).sum()
        expected = expected + (whole.gather(1, targets[:, None])[:, 0] * outer).sum()
    for one, other in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trains_entropy", [False, True])
@pytest.mark.parametrize("plain_linear", [True, False])
def test_the_gradient_of_a_support_equals_that_of_a_whole_softmax(
    plain_linear: bool, trains_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are the most likely tokens of another head; the first block has saved probabilities, the others
    are computed again.
    """
    for name, rows in (("_BLOCK", 8), ("_CHUNK", 2), ("_CPU_CHUNK", 2)):
        monkeypatch.setattr(chunked_logprobs, name, rows)
    torch.manual_seed(2)
    head, teacher = (nn.Linear(6, 19, dtype=torch.float64) for _ in "ab")
    hidden = torch.randn(21, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 19, (21,))
    with torch.no_grad():
        *_, best, ids = score_tokens(hidden, targets, teacher, support=5)
        wanted = torch.log_softmax(teacher(hidden), dim=-1).topk(5)
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(best, wanted.values, rtol=1e-12, atol=1e-12)
    outer, outer_K = torch.randn(21, dtype=torch.float64), torch.randn(21, 5, dtype=torch.float64)
    logprobs, entropies, supported = score_tokens(
        hidden, targets, head if plain_linear else nn.Sequential(head), trains_entropy=trains_entropy,
        support=ids,
    )  # fmt: skip
    whole = torch.log_softmax(head(hidden), dim=-1)
    torch.testing.assert_close(supported, whole.gather(1, ids), rtol=1e-12, atol=1e-12)
    loss = (logprobs * outer).sum() + (supported * outer_K).sum()
    expected = (whole.gather(1, targets[:, None])[:, 0] * outer).sum()
    expected = expected + (whole.gather(1, ids) * outer_K).sum()
    if trains_entropy:
        loss, expected = loss + entropies.sum(), expected - (whole.exp() * whole).sum()
    inputs = [hidden, head.weight, head.bias]
    for one, other in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_gradients_of_a_support_are_numerically_right() -> None:
    torch.manual_seed(3)
    head = nn.Linear(3, 7, dtype=torch.float64)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(7)[:3] for _ in range(4)])

    def loss(states: torch.Tensor) -> torch.Tensor:
        logprobs, _, supported = score_tokens(states, torch.tensor([0, 6, 2, 3]), head, support=ids)
        return (supported.exp() * supported).sum() + 0.3 * logprobs.sum()

    # not gradcheck, which differentiates twice
    (slopes,) = torch.autograd.grad(loss(hidden), hidden)
    step = 1e-5 * torch.eye(12, dtype=torch.float64).view(12, 4, 3)
    with torch.no_grad():
        found = [(loss(hidden + each) - loss(hidden - each)) / 2e-5 for each in step]
    torch.testing.assert_close(torch.stack(found).view(4, 3), slopes, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_divergences_of_whole_distributions_equal_those_of_a_support_of_all_tokens(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_logprobs, "_CHUNK", 4)
    torch.manual_seed(4)
    head, other = (nn.Linear(6, 19, dtype=torch.float64) for _ in "ab")
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 19, (9,))
    with torch.no_grad():
        *_, states = score_tokens(2.0 * hidden, targets, other, support="all")
        *_, best, ids = score_tokens(2.0 * hidden, targets, other, support=19)
    teacher = chunked_logprobs.FullTeacher(hidden_TE=states, head=other, alpha=alpha)
    *_, divergence = score_tokens(hidden, targets, head, support=teacher)
    *_, supported = score_tokens(hidden, targets, head, support=ids)
    wanted = divergence_per_token(supported, best, alpha=alpha, tail=False)
    torch.testing.assert_close(divergence, wanted, rtol=1e-12, atol=1e-12)
    inputs = [hidden, head.weight, head.bias]
    for one, two in zip(
        torch.autograd.grad(divergence.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert other.weight.grad is None


def test_the_entropy_bonus_of_recorded_logits() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    _, entropies = score_logits(logits, torch.tensor([0, 0]), trains_entropy=True)
    (slopes,) = torch.autograd.grad(entropies.sum(), logits)
    assert entropies.tolist() == pytest.approx([0.83239558184, 1.09861228867], abs=1e-11)
    recorded = [-0.282587451079, 0.14077035747, 0.14181709361]
    assert slopes[0].tolist() == pytest.approx(recorded, abs=1e-11)
    assert slopes[1].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)


def test_a_frozen_head_gets_no_gradient() -> None:
    head = nn.Linear(6, 19).requires_grad_(False)
    hidden = torch.randn(3, 6, requires_grad=True)
    score_tokens(hidden, torch.tensor([1, 2, 3]), head)[0].sum().backward()
    assert head.weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("rows", [9, 600])
def test_scoring_multiplies_with_the_vocabulary_three_times(rows: int) -> None:
    """Once forward and twice backward; before, the backward pass computed all logits again. It still does
    beyond a block.
    """
    head, hidden = nn.Linear(6, 19, bias=False), torch.randn(rows, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        score_tokens(hidden, torch.zeros(rows, dtype=torch.int64), head)[0].sum().backward()
    once = 2 * 6 * 19
    assert counter.get_total_flops() == once * (3 * rows + max(0, rows - chunked_logprobs._BLOCK))


def test_scores_cannot_be_differentiated_twice() -> None:
    """The gradient takes the memory of the kept probabilities: a second pass must not read it."""
    hidden = torch.randn(3, 6, requires_grad=True)
    logprobs, _ = score_tokens(hidden, torch.tensor([1, 2, 3]), nn.Linear(6, 19))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
