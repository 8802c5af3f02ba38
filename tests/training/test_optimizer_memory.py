"""Settings that save memory: optimizer states in 8 bit or in host memory, and a 4-bit base of adapters."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from outrider.config import validate
from outrider.engines.local.attention import Segment, TreePlan
from outrider.errors import ConfigError, ModelError
from outrider.training.adapters import merge_adapters
from outrider.training.checkpoint import load_checkpoint, save_checkpoint
from outrider.training.learner import Learner
from outrider.training.policy import Policy, Scorer
from outrider.training.resume import frozen_weights
from outrider.training.settings import LoraSettings, OptimizerSettings, RunSettings
from tests.tiny import tiny_model

STATES = ["float32", "8bit", "cpu"]
DTYPES = [torch.bfloat16, torch.float32]
IDS = torch.arange(3, 27) * 7 % 60 + 3


def make_policy(
    states: str = "float32",
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    lora: LoraSettings | None = None,
) -> Policy:
    # bitsandbytes leaves moments of fewer than 4096 values in float32.
    model = tiny_model(dtype=dtype, seed=seed, num_layers=1, hidden_size=64)
    return Policy(model, OptimizerSettings(learning_rate=3e-3, states=states), lora=lora)  # type: ignore[arg-type]


def compute_logits(scorer: Scorer) -> torch.Tensor:
    plan = TreePlan(segments=(Segment(length=len(IDS)),))
    return scorer.language_model.logits(IDS, torch.arange(len(IDS)), plan).float()


def compute_gradients(policy: Policy) -> float:
    loss = torch.nn.functional.cross_entropy(compute_logits(policy)[:-1], IDS[1:])
    loss.backward()
    return loss.item()


def train(policy: Policy, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        losses.append(compute_gradients(policy))
        policy.step()
    return losses


def is_same(policy: Policy, other: Policy) -> bool:
    return all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in ((policy.masters, other.masters), (policy.working, other.working))
        for name in mine
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_on_the_host_change_no_bit(dtype: torch.dtype) -> None:
    policies = [make_policy(states, dtype=dtype) for states in ("float32", "cpu")]
    losses = [train(policy, 3) for policy in policies]
    assert losses[0] == losses[1] and is_same(*policies)
    offloaded = policies[1]
    assert all(
        offloaded.masters[name].data_ptr() != parameter.data_ptr()
        for name, parameter in offloaded.working.items()
    )


def test_gradients_and_first_step_with_8_bit_states_are_those_of_float32() -> None:
    exact, eight = make_policy(), make_policy("8bit")
    for policy in (exact, eight):
        compute_gradients(policy)
        compute_gradients(policy)  # a second micro-batch
    gradients = [{name: p.grad for name, p in policy.masters.items()} for policy in (exact, eight)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.0, atol=0.0)
    exact.step()
    eight.step()
    # The moments are quantized after the first step, so only its rounding differs.
    torch.testing.assert_close(eight.masters, exact.masters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("states", STATES)
def test_a_resumed_policy_trains_to_the_same_bits(states: str, tmp_path: Path) -> None:
    whole, resumed = make_policy(states), make_policy(states, seed=1)
    train(whole, 2)
    save_checkpoint(tmp_path / "step-000002", whole, {"step": 2})
    load_checkpoint(tmp_path / "step-000002", resumed)
    assert train(whole, 2) == train(resumed, 2)
    assert is_same(whole, resumed)


def test_8_bit_states_learn_like_float32() -> None:
    exact, eight = make_policy(), make_policy("8bit")
    first, *_, last = train(exact, 30)
    assert train(eight, 30)[-1] == pytest.approx(last, abs=0.05 * (first - last))
    assert last < 0.5 * first
    moments = [
        value.nbytes
        for state in eight.optimizer.state.values()
        for key, value in state.items()
        if key.startswith(("state", "absmax"))
    ]
    sizes = [master.numel() for master in eight.masters.values()]
    small = sum(size for size in sizes if size < 4096)
    assert sum(moments) == pytest.approx(8 * small + (2 + 8 / 256) * (sum(sizes) - small), rel=0.001)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"optimizer": {"states": "8bit"}}, "optimizer.states = 8bit"),
        ({"optimizer": {"states": "cpu"}}, "optimizer.states = cpu"),
        ({"model": {"lora": {"base": "4bit"}}}, r"model\.lora\.base = 4bit"),
    ],
)
def test_trainer_ranks_refuse_settings_of_one_process(change: dict[str, object], name: str) -> None:
    recipe = {"environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, **change}
    validate(RunSettings, recipe)
    with pytest.raises(ConfigError, match=f"{name} needs the trainer in the process"):
        validate(RunSettings, {**recipe, "cluster": {"num_trainers": 2}})


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"pip install 'outrider\[bitsandbytes\]'"):
        make_policy("8bit")
    with pytest.raises(ModelError, match=r"model\.lora\.base = 4bit needs an extra"):
        make_policy(lora=LoraSettings(rank=2, base="4bit"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_on_a_4_bit_base_train_like_those_on_its_rounded_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    packed = make_policy(dtype=dtype, lora=LoraSettings(rank=2, base="4bit"))
    # The adapters add nothing yet, so the merged weights are those of the base.
    base = tiny_model(dtype=dtype, num_layers=1, hidden_size=64)
    original = {name: p.detach().clone() for name, p in base.model.named_parameters()}
    rounded = merge_adapters(packed.model)
    base.model.load_state_dict(rounded, strict=False)
    plain = Policy(base, packed.settings, lora=LoraSettings(rank=2))
    projection = "model.layers.0.mlp.down_proj.weight"
    assert rounded[projection].dtype is dtype
    assert 0.02 < (rounded[projection] - original[projection]).norm() / original[projection].norm() < 0.2
    weight = packed.model.get_parameter(projection.replace(".weight", ".base_layer.weight"))
    scales = weight.quant_state.absmax
    assert (weight.nbytes + scales.nbytes) / rounded[projection].numel() == 0.5 + 1 / 64
    bound = 0.02 if dtype is torch.bfloat16 else 1e-4
    assert train(packed, 3) == pytest.approx(train(plain, 3), rel=bound)
    for policy in (packed, plain):
        compute_gradients(policy)
    for name, master in packed.masters.items():
        gradient, expected = master.grad, plain.masters[name].grad
        assert gradient is not None and expected is not None
        assert (gradient - expected).norm() <= 5 * bound * expected.norm()
    with torch.no_grad():
        assert torch.equal(compute_logits(packed.frozen_copy()), compute_logits(packed))
    parts = SimpleNamespace(language_model=packed.language_model, trained_parameters=set(packed.masters))
    learner = cast(Learner, parts)
    before = frozen_weights(learner)
    weight.quant_state.state2.absmax.mul_(1.01)
    assert frozen_weights(learner) != before  # of other scales
    weight.quant_state.state2.absmax.div_(1.01)
    packed.export(tmp_path)  # compares the logits of the merged model
