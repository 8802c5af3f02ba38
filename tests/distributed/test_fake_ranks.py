"""The memory of one of 8 trainer ranks with a 7B model, on fake tensors in a fake process group: torch's
tracker counts the bytes of our sharding, a forward and backward pass, and an optimizer step. `outrider plan`
must be a close upper bound.

FSDP2 runs as on a CPU, without streams, and the update has one micro-batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from outrider.distributed import fsdp
from outrider.engines.local import attention
from outrider.engines.local.attention import Segment, TreePlan
from outrider.planning.memory import Training, rank_bytes
from outrider.planning.shape import ModelShape, find_shape
from outrider.training import policy as policies
from outrider.training.policy import SingleRank, checkpoint_layers
from outrider.training.settings import LoraSettings, OptimizerSettings

RANKS: Final = 8
TOKENS: Final = 2048  # of the micro-batch
SLACK: Final = 1.15  # of the plan over the tracker


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def save_config(shape: ModelShape, folder: Path) -> str:
    """The configuration of a model with the shape; it has no weights."""
    Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, tie_word_embeddings=shape.is_tied,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def peak_bytes(folder: str, num_tokens: int, **trained: Any) -> int:
    """Bytes of a rank's tensors at the peak of a forward and backward pass and an optimizer step, when the
    moments exist.
    """
    # built as for a GPU, but in the CPU's memory: a build of torch for CPUs has no fake GPU
    found = fsdp.empty_model(folder, device="cuda")
    precision = torch.bfloat16
    fsdp.choose_empty(found.model, seed=0, precision=precision, **trained)
    checkpoint_layers(found.model)
    scoring = fsdp.shard(found.model, size=RANKS, precision=precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fsdp.allocate(scoring, found.model)
        policy = fsdp.ShardedPolicy(found, scoring, OptimizerSettings(), ranks=SingleRank())
        for master in policy.masters.values():
            master.grad = torch.zeros_like(master)
        policy.optimizer.step()
        policy.drop_gradients()
        ids_N, positions_N = torch.zeros(num_tokens, dtype=torch.long), torch.arange(num_tokens)
        plan = TreePlan(segments=(Segment(length=num_tokens),))
        with FSDPMemTracker(scoring, policy.optimizer) as tracker:
            logprobs_U, _ = scoring(ids_N, positions_N, plan, positions_N[:-1], ids_N[1:])
            (-logprobs_U.sum()).backward()
            policy.optimizer.step()
            policy.drop_gradients()
    [snapshot] = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


@pytest.mark.parametrize(
    ("num_layers", "lora_rank", "trained_layers"),
    [
        pytest.param(4, None, None, id="4 layers"),
        pytest.param(2, 16, None, marks=pytest.mark.long, id="2 layers, adapters"),
        pytest.param(2, None, 1, marks=pytest.mark.long, id="2 layers, one trained"),
        pytest.param(28, None, None, marks=pytest.mark.slow, id="28 layers"),
        pytest.param(28, 16, None, marks=pytest.mark.slow, id="28 layers, adapters"),
    ],
)
@pytest.mark.usefixtures("fake_ranks")
def test_the_plan_is_a_close_upper_bound_of_a_rank_s_peak(
    num_layers: int,
    lora_rank: int | None,
    trained_layers: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the GPU's block of logits, and its attention, which stores no scores
    monkeypatch.setattr(policies, "_CPU_CHUNK", policies._CHUNK)
    monkeypatch.setattr(attention, "causal_attention", attention._attend)
    shape = replace(find_shape("Qwen/Qwen2.5-7B-Instruct"), num_layers=num_layers)
    lora = None if lora_rank is None else LoraSettings(rank=lora_rank)
    folder = save_config(shape, tmp_path)
    found = peak_bytes(folder, TOKENS, lora=lora, trained_layers=trained_layers)
    training = Training(
        on_cpu=True,
        ranks=RANKS,
        max_tokens=TOKENS,
        checkpointed=True,
        lora_rank=lora_rank,
        lora_targets=() if lora is None else tuple(lora.target_modules),
        trained_layers=trained_layers,
    )
    planned = sum(rank_bytes(shape, training).values())
    assert found <= planned <= SLACK * found


@pytest.mark.parametrize(("device", "freed"), [("cuda", ["empty_cache"]), ("cpu", [])])
def test_a_rank_returns_cached_memory_after_gradients_and_gathered_weights_are_gone(
    device: str, freed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on the same GPU wakes up next."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    policy: Any = fsdp.ShardedPolicy.__new__(fsdp.ShardedPolicy)
    policy.language_model = SimpleNamespace(device=torch.device(device))
    policy.optimizer = SimpleNamespace(zero_grad=lambda set_to_none: calls.append("gradients"))
    policy.scoring = SimpleNamespace(reshard=lambda: calls.append("reshard"))
    policy.masters = {}
    policy.ranks, policy.settings, policy.num_steps = SingleRank(), OptimizerSettings(), 0
    policy.optimizer.param_groups = []
    policy.step()
    assert calls == ["gradients", "reshard", *freed]
