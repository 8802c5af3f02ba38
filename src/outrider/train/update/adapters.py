"""The part of the weights that trains: adapters beside linear layers (LoRA, by peft), or the last layers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.train.learning_settings import LoraSettings

_ADAPTER = "default"  # the name that peft gives the only one


def choose_trained(
    model: Any, *, lora: LoraSettings | None, trained_layers: int | None, seed: int = 0
) -> None:
    """Whatever is not chosen has no gradient. ``trained_layers``: the last so many layers and the norm behind
    them. Raises ModelError where the model has fewer layers.
    """
    if trained_layers is not None:
        _freeze_below(model, trained_layers)
    if lora is not None:
        _inject(model, lora, seed)


def _freeze_below(model: Any, trained_layers: int) -> None:
    """Embeddings, vocabulary projection and all layers but the last ``trained_layers`` keep their weights."""
    try:
        layers, norm = model.base_model.layers, model.base_model.norm
    except AttributeError as error:
        raise ModelError(
            f"model.trained_layers: {type(model).__name__} names its layers otherwise ({error}); train "
            "all of them, or set model.lora"
        ) from error
    if trained_layers > len(layers):
        raise ModelError(f"model.trained_layers = {trained_layers}, but the model has {len(layers)} layers")
    model.requires_grad_(False)
    for trained in (*layers[len(layers) - trained_layers :], norm):
        trained.requires_grad_(True)


def _inject(model: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Add adapters in place; only they train. Seeded, because peft draws A from the global generator."""
    from peft import LoraConfig, inject_adapter_in_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.target_modules),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)


def merged(model: nn.Module) -> dict[str, Tensor]:
    """All weights under the names that they have without adapters. Tensors without an adapter are the model's
    own.
    """
    return {name: tensor.detach() for name, tensor in merged_one_by_one(model, whole=lambda tensor: tensor)}


def plain_names(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that a model without adapters has, by the names that they have there."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.named_parameters()
        if ".lora_" not in name
    }


@torch.no_grad()
def merged_one_by_one(model: nn.Module, *, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """``W + alpha / r B A`` (2106.09685) where there is an adapter, added up in float32 and rounded once.
    ``whole`` puts a tensor in shards together.
    """
    modules = dict(model.named_modules())
    for name, tensor in plain_names(model).items():
        path, _, kind = name.rpartition(".")
        layer: Any = modules[path]
        found = whole(tensor)
        if kind == "weight" and f"{path}.lora_A" in modules:
            up, down = whole(layer.lora_B[_ADAPTER].weight), whole(layer.lora_A[_ADAPTER].weight)
            change = layer.scaling[_ADAPTER] * (up.float() @ down.float())
            found = (found.float() + change).to(tensor.dtype)
        yield name, found
