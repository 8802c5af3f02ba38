"""The part of the weights that trains: adapters beside linear layers (LoRA, by peft), or the last layers."""

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
    layers = model.base_model.layers
    if trained_layers > len(layers):
        raise ModelError(f"model.trained_layers = {trained_layers}, but the model has {len(layers)} layers")
    model.requires_grad_(False)
    for trained in (*layers[len(layers) - trained_layers :], model.base_model.norm):
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


@torch.no_grad()
def merged(model: nn.Module) -> dict[str, Tensor]:
    """All weights under the names that they have without adapters, ``W + alpha / r B A`` (2106.09685) where
    there is one: added up in float32 and rounded once. Tensors without an adapter are the model's own.
    """
    whole: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        path, _, kind = name.rpartition(".")
        if ".lora_" in name:
            continue
        layer_path = path.removesuffix(".base_layer")
        plain = f"{layer_path}.{kind}"
        whole[plain] = tensor.detach()
        if layer_path != path and kind == "weight":
            layer: Any = modules[layer_path]
            up, down = layer.lora_B[_ADAPTER].weight, layer.lora_A[_ADAPTER].weight
            change = layer.scaling[_ADAPTER] * (up.float() @ down.float())
            whole[plain] = (tensor.float() + change).to(tensor.dtype)
    return whole
