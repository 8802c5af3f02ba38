"""Every family of docs/models.md that runs packed, in ranks: its weights are read from its own folder, also
where transformers holds several of the files' tensors in one, and a mixture of experts trains as in one
process.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from docsite.models import ARCHITECTURES, Architecture, load
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.distributed import fsdp as sharding
from outrider.distributed.learner import RankGroup
from outrider.distributed.processes import Cluster
from outrider.distributed.weights import Source, engine_weights
from outrider.engines.base import LocalSettings, VllmSettings
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.training.adapters import plain_names
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, distance, near_the_truth, rank_group, run
from tests.distributed.test_rank_updates import objective_of
from tests.tiny import CHARACTERS

PACKED = [one for one in ARCHITECTURES if one.forward == "auto" and one.is_known]
FEW = ("qwen3_moe", "glm4_moe", "gemma3_text")  # the others are slow
CHOSEN = [
    one if one.model_type in FEW else pytest.param(one, marks=pytest.mark.slow, id=one.title)
    for one in PACKED
]
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe")


def architecture(model_type: str, **more: Any) -> Architecture:
    known = next(one for one in ARCHITECTURES if one.model_type == model_type)
    return Architecture(
        title=known.title, model_type=model_type, without=known.without, settings={**known.settings, **more}
    )


def saved(one: Architecture, folder: Path) -> Path:
    """A folder whose buffers (the biases of some routers) are not what a new model has."""
    one.save(folder)
    weights, dice = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.randn(weight.shape, generator=dice)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("one", CHOSEN, ids=lambda one: one.title)
def test_all_weights_are_read_as_transformers_reads_them(one: Architecture, tmp_path: Path) -> None:
    folder = saved(one, tmp_path / "model")
    found = load(one, folder)
    if isinstance(found, ModelError) or found.unpacked is not None:
        pytest.skip("it does not run packed")
    sharding.require_shardable(str(folder))
    empty = sharding.empty_model(str(folder)).model
    for module, fresh in sharding._fresh_buffers(empty):
        for name, buffer in fresh.items():
            module._buffers[name] = buffer
    wanted_buffers = dict(found.model.named_buffers())
    assert all(
        one.float().equal(wanted_buffers[name].float())
        for name, one in empty.named_buffers()
        if not name.endswith("e_score_correction_bias")
    )
    tensors = {name: torch.full(one.shape, torch.nan) for name, one in plain_names(empty).items()}
    sharding.fill(folder, tensors)
    wanted = plain_names(found.model)
    assert tensors.keys() == wanted.keys()
    assert all(tensors[name].equal(one.float()) for name, one in wanted.items())


@pytest.mark.parametrize("one", CHOSEN, ids=lambda one: one.title)
@pytest.mark.parametrize("targets", [None, ("all-linear",)])
def test_vllm_gets_the_names_and_shapes_of_the_folder(
    one: Architecture, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    folder = saved(one, tmp_path / "model")
    found = load(one, folder)
    if isinstance(found, ModelError):
        pytest.skip("it is refused")
    lora = None if targets is None else LoraSettings(rank=2, target_modules=targets)
    policy = Policy(found, OptimizerSettings(), lora=lora)
    learner = cast(Any, SimpleNamespace(language_model=found, trained_parameters=frozenset(policy.masters)))
    with safe_open(folder / "model.safetensors", "pt") as file:
        wanted = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sent = engine_weights(learner, VllmSettings())
    assert sent.keys() == wanted.keys()
    # adapters begin as nothing, so the weights are the folder's
    assert all(sent[name].equal(weight) for name, weight in wanted.items())
    source = Source(found.model, torch.bfloat16)
    described = [(each.name, each.shape) for each in source.metadata()]
    came = [(name, tuple(tensor.shape)) for name, tensor in source]
    assert described == came and {name for name, _ in came[:-1]} == wanted.keys()
    assert source.num_bytes == 2 * sum(weight.numel() for weight in wanted.values())
    own = engine_weights(learner, LocalSettings())
    assert own.keys() == policy.masters.keys()


def each_expert(module: str, gate: str, *projections: str) -> set[str]:
    experts = {f"{module}.experts.{number}.{name}.weight" for number in range(4) for name in projections}
    return {f"{module}.{gate}.weight"} | experts


MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
PUBLISHED = {
    "qwen2_moe": each_expert("mlp", "gate", *MLP),
    "qwen3_moe": each_expert("mlp", "gate", *MLP),
    "qwen3_next": each_expert("mlp", "gate", *MLP),
    "mixtral": each_expert("block_sparse_moe", "gate", "w1", "w2", "w3"),
    "glm4_moe": each_expert("mlp", "gate", *MLP) | {"mlp.gate.e_score_correction_bias"},
    "deepseek_v3": each_expert("mlp", "gate", *MLP) | {"mlp.gate.e_score_correction_bias"},
    "lfm2_moe": each_expert("feed_forward", "gate", "w1", "w2", "w3") | {"feed_forward.expert_bias"},
    "gpt_oss": {"mlp.router.weight", "mlp.router.bias", *(f"mlp.experts.{name}" for name in FUSED)},
}
"""Names of experts and routers in the last layer of published checkpoints, which vLLM's loaders expect."""


@pytest.mark.parametrize("one", PACKED, ids=lambda one: one.title)
def test_the_names_of_all_weights_are_those_of_published_checkpoints(one: Architecture) -> None:
    """Without weights: what is sent to vLLM has these names, and reading them back fills every weight."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(one.config())
    *sent, _ = [each.name for each in Source(model, torch.bfloat16).metadata()]
    assert len(sent) == len({*sent})
    assert all(f"model.layers.1.{name}" in sent for name in PUBLISHED.get(one.model_type, ()))
    names = {name for name, _ in sharding.names_of_keys(model, sent).values()}
    assert names == plain_names(model).keys()


def test_a_weight_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    folder = saved(architecture("qwen3_moe"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tensors = plain_names(sharding.empty_model(str(folder)).model)
    given = {name: torch.empty(one.shape) for name, one in tensors.items()}
    with pytest.raises(ModelError, match=r"model\.norm\.weight|gate_up_proj"):
        sharding.fill(folder, given)


def test_a_model_that_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    layers = Architecture(
        title="GPT-2", model_type="gpt2",
        settings={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                 "num_key_value_heads", "head_dim", "intermediate_size"),
    )  # fmt: skip
    layers.save(tmp_path / "gpt2")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel names its layers otherwise: set cluster"):
        sharding.require_shardable(str(tmp_path / "gpt2"))
    folder = saved(architecture("qwen3"), tmp_path / "bin")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors"):
        sharding.require_shardable(str(folder))


def test_an_adapter_that_separates_tied_weights_is_refused_for_remote_engines(tmp_path: Path) -> None:
    one = architecture("llama", tie_word_embeddings=True)
    found = load(one, saved(one, tmp_path / "model"))
    assert not isinstance(found, OutriderError)
    policy = Policy(found, OptimizerSettings(), lora=LoraSettings(target_modules=("lm_head",)))
    learner = cast(Any, SimpleNamespace(language_model=found, trained_parameters=frozenset(policy.masters)))
    with pytest.raises(ConfigError, match=r"one tied weight"):
        engine_weights(learner, VllmSettings())
    with pytest.raises(ConfigError, match=r"one tied weight"):
        Source(found.model, torch.bfloat16)
    assert engine_weights(learner, LocalSettings()).keys() == policy.masters.keys()


PARTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"lora": LoraSettings(rank=2, target_modules=("all-linear",))},
}


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_moe", "adapters"),
        pytest.param(("glm4_moe", "all weights"), marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", "all weights"), marks=pytest.mark.slow),
        pytest.param(("glm4_moe", "adapters"), marks=pytest.mark.slow),
    ],
)
def ranks(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Any], RankGroup]]:
    kind, part = request.param
    one = architecture(kind, vocab_size=3 + len(CHARACTERS), max_position_embeddings=512)
    folder = saved(one, tmp_path_factory.mktemp("experts") / "model")
    made = rank_group(cluster, folder, 2, **PARTS[part])
    yield folder, PARTS[part], made
    made.close()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_update_of_experts_is_that_of_one_process(
    ranks: tuple[Path, dict[str, Any], RankGroup],
) -> None:
    folder, part, made = ranks
    policy, reference = alone(folder, **part)
    begun: dict[str, Tensor] = made.call("state")[0]
    assert begun.keys() == policy.masters.keys()
    assert all(begun[name].equal(one) for name, one in policy.masters.items())
    objective = objective_of("grpo").model_copy(update={"kl_weight": 0.5})
    traces = near_the_truth(policy, groups(5, longest=20))
    wanted = run(policy, reference, traces, objective, SETTINGS)
    assert wanted.norms[0] > 0
    found = made.call("found", traces, objective, SETTINGS)[0]
    assert distance(found.weights, wanted.weights) < 1e-5
    assert distance(found.gradients, wanted.gradients) < 1e-4
