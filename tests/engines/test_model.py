"""Loading: what would be computed wrongly is refused, what cannot be found is one clear line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local import model as module
from outrider.engines.local.attention import Segment, TreePlan
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import (
    LanguageModel,
    Precision,
    load_model,
    longest_context,
    resolve_precision,
)
from outrider.engines.local.processor import Processor
from outrider.errors import ModelError
from tests.tiny import save_tiny_model, tiny_tokenizer

SIZES = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "eos_token_id": 1, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def saved(folder: Path, config: PreTrainedConfig, *, scale: float = 1.0) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def check_unpacked(folder: str, why: str, *, precision: Precision = "float32") -> LanguageModel:
    """Refused where a packed model is asked for, with the reason; otherwise the reason of the other path."""
    with pytest.raises(ModelError, match=why):
        load_model(folder, precision=precision, forward="packed")
    loaded = load_model(folder, precision=precision)
    assert loaded.unpacked is not None and why in loaded.unpacked.why
    with pytest.raises(ModelError, match=why):
        LocalEngine(loaded)
    with pytest.raises(ModelError, match=why):
        loaded.hidden(
            torch.ones(1, 1).long(), torch.zeros(1, 1).long(), TreePlan(segments=(Segment(length=1),))
        )
    return loaded


def test_a_soft_cap_is_not_packed(tmp_path: Path) -> None:
    loaded = check_unpacked(saved(tmp_path, Gemma2Config(**SIZES, sliding_window=8)), "soft cap")
    assert loaded.unpacked is not None and not loaded.unpacked.has_plain_head
    assert loaded.context_length == 64  # the window binds the packed path alone


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_logits_with_a_known_factor_are_packed_and_others_are_not(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, GraniteConfig(**SIZES, logits_scaling=8.0))
    assert load_model(folder, precision=precision).unpacked is None
    monkeypatch.setattr("outrider.engines.local.attention.logit_factor", lambda config: 1.0)
    loaded = check_unpacked(folder, "changes its logits", precision=precision)
    assert loaded.unpacked is not None and not loaded.unpacked.has_plain_head


def test_attention_that_our_own_leaves_something_out_of_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture may hand something to attention that the packed path has never heard of."""

    def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        output, weights = eager_attention_forward(module, query, key, value, mask, **options)
        return output * 1.1, weights

    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.eager_attention_forward", eager)
    check_unpacked(saved(tmp_path, Qwen2Config(**SIZES), scale=5.0), "not plain causal attention")


def test_a_model_that_looks_ahead_is_refused_on_both_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact on no path: whatever it predicts depends on what it is to predict."""

    def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query, key, value, None, **options)

    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.eager_attention_forward", eager)
    folder = saved(tmp_path, Qwen2Config(**SIZES), scale=5.0)
    with pytest.raises(ModelError, match="no left-to-right model; packed: its attention is not plain causal"):
        load_model(folder, precision="float32")


def test_contexts_stay_within_a_sliding_window_and_are_exact_there(tmp_path: Path) -> None:
    folder = saved(tmp_path, MistralConfig(**SIZES, sliding_window=24))
    loaded = load_model(folder, precision="float32")
    assert loaded.context_length == 24
    ids = torch.arange(3, 27)[None]
    ours = loaded.head(loaded.hidden(ids, torch.arange(24)[None], TreePlan(segments=(Segment(length=24),))))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(
        input_ids=ids
    ).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def check_exact_over_the_context(folder: str, *, expected: int) -> None:
    """The whole context in one row, and a short sequence beside it, against transformers' own attention."""
    loaded = load_model(folder, precision="float32")
    assert loaded.context_length == expected
    long, short = (torch.arange(num) % 90 + 3 for num in (expected, 9))
    plan = TreePlan(segments=(Segment(length=expected), Segment(length=9)))
    positions = torch.cat([torch.arange(expected), torch.arange(9)])
    ours = loaded.logits(torch.cat([long, short]), positions, plan)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for part, ids in zip(ours.split([expected, 9]), (long, short), strict=True):
        torch.testing.assert_close(part, model(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip


def test_longrope_stays_within_the_original_length(tmp_path: Path) -> None:
    """Phi-3.5: behind it every position would turn by other factors, also those whose keys are cached."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
        "max_position_embeddings": 160,
        "pad_token_id": 0,
    }
    config = Phi3Config(**sizes, rope_parameters=dict(LONGROPE), original_max_position_embeddings=40)
    check_exact_over_the_context(saved(tmp_path, config, scale=5.0), expected=40)


def test_dynamic_rotation_stays_within_the_length_where_it_is_constant(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    check_exact_over_the_context(
        saved(tmp_path, LlamaConfig(**SIZES, rope_parameters=rope), scale=5.0), expected=64
    )


def test_longrope_in_one_kind_of_layer_binds_them_all() -> None:
    rope = {
        "full_attention": dict(LONGROPE),
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(max_position_embeddings=160, sliding_window=100, rope_parameters=rope)
    assert longest_context(config, "tiny") == 40


def test_lengths_of_a_nested_configuration_are_its_text_model_s() -> None:
    text = Gemma3TextConfig(max_position_embeddings=160, sliding_window=100)
    assert longest_context(Gemma3Config(text_config=text), "tiny") == 100


def test_a_model_without_a_longest_context_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"^model 'bloom' declares no longest context"):
        longest_context(BloomConfig(), "bloom")


RECURRENT = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LAYERS = ["linear_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def if_known(model_type: str, **settings: Any) -> list[PreTrainedConfig]:
    """Nothing where transformers is older than the model: 5.0 does not have all of these."""
    return [CONFIG_MAPPING[model_type](**settings)] if model_type in CONFIG_MAPPING else []


@pytest.mark.parametrize(
    "config",
    [
        *if_known("qwen3_5_text", **SIZES, **RECURRENT, layer_types=LAYERS),
        Qwen3NextConfig(
            **SIZES, **RECURRENT, **EXPERTS, shared_expert_intermediate_size=24, layer_types=LAYERS
        ),
        Lfm2Config(**{**SIZES, "pad_token_id": 0}, layer_types=["conv", "full_attention"]),
        # both in every layer
        FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=8),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_that_carry_state_past_the_plan_are_not_packed(
    config: PreTrainedConfig, precision: Precision, tmp_path: Path
) -> None:
    """They take any argument and ignore the plan: one sequence's state would flow into the next."""
    # fresh weights would hardly use their context
    check_unpacked(saved(tmp_path, config, scale=5.0), "recurrent or convolution", precision=precision)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1)],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_alone_is_accepted_in_every_precision(
    config: PreTrainedConfig, precision: Precision, tmp_path: Path
) -> None:
    assert load_model(saved(tmp_path, config), precision=precision).context_length == 64


@pytest.mark.parametrize(("reasons", "why"), [(",a,,b,", ""), (",a,,b,c", "a"), ("a,b,c", "a"), (",,", "")])
def test_most_probes_decide_in_bfloat16_which_rounds_badly_in_some(
    reasons: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one alone in float32. Each has other token ids, and an exception counts as a reason."""
    folder = saved(tmp_path, LlamaConfig(**SIZES))
    seen: list[list[int]] = []

    def differs(loaded: LanguageModel, ids: torch.Tensor) -> str:
        seen.append(ids.tolist())
        reason = reasons.split(",")[len(seen) - 1]
        if reason == "b":
            raise ModelError(reason)
        return reason

    monkeypatch.setattr(module, "_difference", differs)
    unpacked = load_model(folder, precision="bfloat16").unpacked
    assert (unpacked.why if unpacked else "") == why
    assert len({tuple(ids) for ids in seen}) == len(seen) == len(reasons.split(","))
    seen.clear()
    unpacked = load_model(folder, precision="float32").unpacked
    assert (unpacked.why if unpacked else "") == reasons.split(",")[0] and len(seen) == 1


def test_contexts_stay_within_one_chunk_of_chunked_attention(tmp_path: Path) -> None:
    assert (
        load_model(
            saved(tmp_path, LlamaConfig(**SIZES, attention_chunk_size=24)), precision="float32"
        ).context_length
        == 24
    )


def test_a_model_whose_backbone_cannot_be_had_is_not_packed(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size_mlp": 48, "num_local_experts": 2}
    check_unpacked(saved(tmp_path, Llama4TextConfig(**sizes)), "no backbone")


@pytest.mark.parametrize("name", ["no/such-model-at-all", "/nowhere"])
def test_a_missing_model_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the variable is read once, at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        load_model(name, precision="float32")
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vendor", "flags", "packs", "expected"),
    [
        ("GenuineIntel", {"avx2", "avx512_bf16", "amx_tile", "amx_bf16"}, True, torch.bfloat16),
        # ONEDNN_MAX_CPU_ISA=AVX2
        ("GenuineIntel", {"avx2", "avx512_bf16", "amx_tile", "amx_bf16"}, False, torch.float32),
        ("GenuineIntel", {"avx2", "avx512bw", "avx512_bf16"}, True, torch.float32),
        ("AuthenticAMD", {"avx2", "avx512bw", "avx512_bf16"}, True, torch.bfloat16),
        ("AuthenticAMD", {"avx2", "avx512bw", "avx512_bf16"}, False, torch.float32),
        ("AuthenticAMD", {"avx2"}, False, torch.float32),
    ],
)
def test_auto_precision_is_bfloat16_only_where_the_processor_multiplies_it(
    vendor: str,
    flags: set[str],
    packs: bool,
    expected: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never where it is slow, and never where it cannot be packed."""
    processor = Processor(model="a test's", instruction_sets=frozenset(flags), vendor=vendor)
    monkeypatch.setattr("outrider.engines.local.model.read_processor", lambda: processor)
    monkeypatch.setattr(onednn, "can_pack", lambda dtype: packs)
    assert load_model(str(save_tiny_model(tmp_path)), precision="auto").dtype is expected


def test_auto_precision_without_the_gpu_that_was_asked_for_names_one() -> None:
    if not torch.cuda.is_available():
        assert resolve_precision("auto", "cuda") == "float32"


def test_auto_is_float32_on_a_gpu_that_only_emulates_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_native in (False, True):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, is_native=is_native: is_native or including_emulation,
        )
        assert resolve_precision("auto", "cuda") == ("bfloat16" if is_native else "float32")


def test_a_tiny_llama_loads(tmp_path: Path) -> None:
    assert load_model(str(save_tiny_model(tmp_path)), precision="float32").context_length == 512
