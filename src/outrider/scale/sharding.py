"""A model in shards by FSDP2, filled from a folder of safetensors without a full copy on any rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.fused import fuse
from outrider.engines.local.model import LanguageModel, longest_context
from outrider.errors import ModelError
from outrider.train.learning_settings import LoraSettings
from outrider.train.update.adapters import choose_trained, plain_names
from outrider.train.update.scoring import Scoring


def shard(model: PreTrainedModel, *, size: int, precision: torch.dtype, device: str = "cpu") -> nn.Module:
    """The module whose forward scores tokens, its weights in shards over all ranks.

    One group a layer; embedding, vocabulary projection and last norm are the root's, because torch refuses a
    tied weight in two groups. Gradients are *summed* over ranks, since token weights are those of the whole
    mini-batch; neither setting reaches the modules below, so each gets its own.
    """
    mesh = init_device_mesh(device, (size,))
    root = Scoring(model)
    options: dict[str, Any] = {"mesh": mesh}
    if precision != torch.float32:  # masters in float32, a working copy in the precision of the model
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in cast(Any, model.base_model).layers:
        fully_shard(layer, **options)
    fully_shard(root, **options)
    sum_gradients(root)
    return root


def sum_gradients(root: nn.Module) -> None:
    """Ranks sum: FSDP2 would average, and a factor without the forced sum fails on gloo."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def empty_model(folder: str, *, device: str = "cpu") -> LanguageModel:
    """The model of a folder without any memory for its weights, in float32; no tokenizer."""
    register()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        )
    model.eval()  # as a model that is loaded: without dropout
    if device == "cpu":
        fuse(model)
    return LanguageModel(
        model=model,
        tokenizer=cast(Any, None),
        context_length=longest_context(config, folder),
        eos_token_ids=frozenset(),
    )


def choose_empty(
    model: nn.Module,
    *,
    lora: LoraSettings | None,
    trained_layers: int | None,
    seed: int,
    precision: torch.dtype,
) -> dict[str, Tensor]:
    """:func:`outrider.train.update.adapters.choose_trained` of a model without memory; the adapters by name,
    in float32, drawn as one process draws them. No weight of the model has to be there for that: its place
    is taken by one number.
    """
    whole = {module: module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    if lora is not None:
        for module, weight in whole.items():
            module.weight = nn.Parameter(torch.zeros((), dtype=precision).expand(weight.shape))
    choose_trained(model, lora=lora, trained_layers=trained_layers, seed=seed)
    if lora is None:
        return {}
    for module, weight in whole.items():
        module.weight = weight.requires_grad_(False)
    adapters: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if ".lora_" in path and isinstance(module, nn.Linear):
            adapters[f"{path}.weight"] = module.weight.detach().float()
            module.weight = nn.Parameter(torch.empty_like(adapters[f"{path}.weight"], device="meta"))
    return adapters


@torch.no_grad()
def begin(model: nn.Module, folder: Path, adapters: Mapping[str, Tensor]) -> None:
    """The weights of a folder, and fresh adapters beside them."""
    fill(folder, plain_names(model))
    parameters = dict(model.named_parameters())
    for name, adapter in adapters.items():
        target = cast(DTensor, parameters[name])
        # everybody drew the same: each takes its part
        own = adapter.to(target.device)
        target.copy_(distribute_tensor(own, target.device_mesh, target.placements, src_data_rank=None))


def allocate(root: nn.Module, model: PreTrainedModel, *, device: str = "cpu") -> None:
    """Memory for this rank's shards, and the buffers, which no file has, made anew."""
    root.to_empty(device=device)
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        try:
            fresh = type(module)(config=config)
        except TypeError as error:
            raise ModelError(
                f"{name} has buffers that cannot be made anew: no cluster.num_trainers"
            ) from error
        for key, value in fresh.named_buffers(recurse=False):
            module._buffers[key] = value.to(device)


def fill(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Read every tensor's own part from the safetensors of a folder, by its name behind ``prefix``. Raises
    ModelError where one is not there.
    """
    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    if missing := [name for name in tensors if prefix + name not in known]:
        raise ModelError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more of the model's weights")
    wanted: dict[str, Any] = {prefix + name: one.detach() for name, one in tensors.items()}
    state_dict_loader.load(wanted, storage_reader=reader)
