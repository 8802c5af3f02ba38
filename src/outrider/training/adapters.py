"""Select the weights that train: adapters on the model's layers (LoRA, by peft), or the last layers. Merge
adapters into the weights, so that they can be loaded without peft.
"""

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from outrider.errors import ModelError
from outrider.suggestions import did_you_mean
from outrider.training.rounding import dither
from outrider.training.settings import ALL_LINEAR, LoraSettings

_SETTING: Final = "model.lora.target_modules"
_MAX_NAMES: Final = 8  # that a message lists
_FUSED_MAMBA: Final = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
# It warns of an optional kernel at import, and peft imports it whenever it is installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
_LAYER: Final = re.compile(r".*?\.\d+\.")  # the first number of a name is that of its layer


def choose_trained(
    model: Any, *, lora: LoraSettings | None, trained_layers: int | None, seed: int = 0
) -> None:
    """Freeze all other weights. ``trained_layers``: number of last layers that train, with the norm after
    them. Raises ModelError if the model has fewer layers, or none of the layers that ``lora`` names.
    """
    if trained_layers is not None:
        _freeze_below(model, trained_layers)
    if lora is not None:
        _inject(model, lora, seed)


def _freeze_below(model: Any, trained_layers: int) -> None:
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
    """Add adapters in place; only they train. The seed is for peft, which draws from the global generator.

    Raises ModelError if peft is not installed, or cannot adapt the layers.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ModelError("model.lora needs an extra: pip install 'outrider[lora]'") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    unfit = _unfit(model)
    targets = {
        name
        for name, _ in _linear_layers(model)
        if settings.is_all_linear or any(_matches(name, target) for target in settings.target_modules)
    }
    if settings.is_all_linear:
        targets -= unfit
    elif refused := sorted(targets & unfit):
        raise ModelError(
            f"{_SETTING}: {_join_names(_short_names(refused))} cannot have adapters, because the model "
            "does more with "
            "its weights than one product: leave it out"
        )
    try:
        config = _config(model, settings)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft warns of tied weights, which `broken_ties` reports, and of what it changes itself
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
            # For a mixture of experts, peft takes "gate_proj" for a name of the experts only, and leaves out
            # dense layers and shared experts that have this name too.
            if left := sorted(targets & {name for name, _ in _linear_layers(model)}):
                holder = nn.ModuleDict({"model": model})  # without a configuration that peft would follow
                config = _lora_config(settings, [f"model.{name}" for name in left])
                inject_adapter_in_model(config, holder)
    except ModelError:
        raise
    except Exception as error:  # peft raises many types, for layers and shapes that it cannot adapt
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        raise ModelError(f"{_SETTING}: {reason}"[:500]) from error
    if settings.base == "4bit":
        _quantize(model)


def require_bitsandbytes(setting: str) -> Any:
    """Import bitsandbytes. Raises ModelError, which names the ``setting``, if it is not installed."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ModelError(f"{setting} needs an extra: pip install 'outrider[bitsandbytes]'") from error
    return bitsandbytes


def _quantize(model: nn.Module) -> None:
    """Replace the frozen weights of the layers with adapters by 4-bit ones (NF4). A base that is the
    vocabulary projection stays, because the embedding may share its weight.
    """
    bitsandbytes = require_bitsandbytes("model.lora.base = 4bit")
    head = getattr(model.get_output_embeddings(), "base_layer", None)  # type: ignore[operator]
    for path, layer in _adapted_layers(model).items():
        if layer.base_layer is head:
            continue
        if type(base := layer.base_layer) is not nn.Linear:
            raise ModelError(f"model.lora.base = 4bit: {path} is no plain linear layer; leave it out")
        with torch.device("meta"):
            packed = bitsandbytes.nn.Linear4bit(
                base.in_features,
                base.out_features,
                bias=base.bias is not None,
                compute_dtype=base.weight.dtype,
                quant_type="nf4",
            )
        # Another layout on processors with AVX-512 for bfloat16, which has no backward pass.
        packed.support_avx512bf16_for_cpu = False
        weight = bitsandbytes.nn.Params4bit(base.weight.detach(), requires_grad=False, quant_type="nf4")
        packed.weight, packed.bias = weight.to(base.weight.device), base.bias
        layer.base_layer = packed.train(base.training)


def _is_packed(weight: Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def plain_weight(weight: Any) -> Tensor:
    """The values of a weight in the model's precision, also of a 4-bit one."""
    if not _is_packed(weight):
        return cast(Tensor, weight.detach())
    values = require_bitsandbytes("model.lora.base = 4bit").functional.dequantize_4bit(
        weight.data, weight.quant_state
    )
    return cast(Tensor, values)


def _lora_config(settings: LoraSettings, targets: Sequence[str] | str, **options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        **options,
    )


def _config(model: nn.Module, settings: LoraSettings) -> Any:
    """Return peft's configuration: names of layers, and names of parameters outside of linear layers, such as
    those of fused experts. Raises ModelError for names that match nothing; only some of the default names
    have to match (:func:`coverage` reports the others).
    """
    if settings.is_all_linear:
        unfit = sorted(_unfit(model))
        return _lora_config(settings, ALL_LINEAR, **({"exclude_modules": unfit} if unfit else {}))
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    targets = settings.target_modules
    layer_targets = [target for target in targets if any(_matches(name, target) for name in modules)]
    parameter_targets = [
        target
        for target in targets
        if target not in layer_targets and any(_matches(name, target) for name in parameters)
    ]
    rest = [target for target in targets if target not in (*layer_targets, *parameter_targets)]
    options = {"target_parameters": parameter_targets} if parameter_targets else {}
    config = _lora_config(settings, [*layer_targets, *rest], **options)
    old = _fused_names(config, model, parameters)
    unknown = [target for target in rest if target not in old]
    if unknown and (not settings.has_default_targets or len(unknown) == len(targets)):
        layers = _short_names(name for name, _ in chain(_linear_layers(model), _fused_parameters(model)))
        suggestion = did_you_mean(unknown[0], {name.rpartition(".")[2] for name in layers})
        raise ModelError(
            f"{_SETTING}: the model has no {_join_names(unknown)}{suggestion}; "
            f'it has {_join_names(layers)}: name some of these, or set it to "{ALL_LINEAR}"'
        )
    return config


def _fused_names(config: Any, model: nn.Module, parameters: Sequence[str]) -> set[str]:
    """Names that peft maps to a part of a fused parameter, because experts were separate layers once."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version of peft without it
        return set()
    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model=model, conversions=None)
    parameter_targets = getattr(converted, "target_parameters", None) or ()
    if not any(_matches(name, target) for target in parameter_targets for name in parameters):
        return set()
    return set(config.target_modules) - set(converted.target_modules)


def _matches(name: str, target: str) -> bool:
    """peft's rule: the whole name, or its last parts."""
    return name == target or name.endswith(f".{target}")


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Projections without an adapter, by name; not the one onto the vocabulary."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    inside = tuple(f"{path}." for path in _adapted_layers(model))
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside)
    ]


def _unfit(model: nn.Module) -> set[str]:
    """Linear layers that do more than one product: routers, and layers whose weights a fused kernel of the
    Mamba families reads (peft's list).
    """
    has_kernels = getattr(getattr(model, "config", None), "model_type", None) in _FUSED_MAMBA
    return {
        name
        for name, module in _linear_layers(model)
        if (
            type(module).forward not in (nn.Linear.forward, Conv1D.forward)
            and type(module).__name__ != "FalconLinear"  # a product in two roundings
        )
        or (has_kernels and _matches(name, "out_proj"))
    }


def _fused_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Projections of several experts in one parameter, without an adapter, by name."""
    wrapped = {
        f"{path}.{inner.parameter_name}"
        for path, layer in _adapted_layers(model).items()
        for inner in layer.modules()
        if hasattr(inner, "parameter_name")
    }
    projections = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Embedding)):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            plain = _plain_name(f"{path}.{name}")
            if parameter.dim() == 3 and ".lora_" not in plain and plain not in wrapped:
                projections.append((plain, parameter))
    return projections


def coverage(model: nn.Module, settings: LoraSettings) -> str:
    """Describe in one line which projections have adapters and which have none; empty if all have one, or if
    the settings name the layers.
    """
    if not (settings.has_default_targets or settings.is_all_linear):
        return ""
    left = _short_names(name for name, _ in chain(_linear_layers(model), _fused_parameters(model)))
    if not left:
        return ""
    reached = _short_names(
        f"{path}.{layer.parameter_name}" if hasattr(layer, "parameter_name") else path
        for path, outer in _adapted_layers(model).items()
        for layer in outer.modules()
        if _is_adapter(layer)
    )
    advice = "" if settings.is_all_linear else f'; name them in {_SETTING}, or set it to "{ALL_LINEAR}"'
    return f"model.lora: adapters on {_join_names(reached)}; none on {_join_names(left)}{advice}"


def _short_names(names: Iterable[str]) -> list[str]:
    """Names without the prefix up to the layer's number, without duplicates."""
    return list(dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in names))


def _join_names(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def merge_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by the names that they have without adapters. A tensor without an adapter is the
    model's own.
    """
    return {name: tensor.detach() for name, tensor in iter_merged(model, whole=lambda tensor: tensor)}


def plain_names(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers without the adapters, by the names that they have in a
    model without adapters. Tied weights occur once.
    """
    return {_plain_name(name): tensor for name, tensor in _weights(model) if ".lora_" not in name}


def _plain_name(name: str) -> str:
    """A name without peft's wrappers, which can be nested."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def _weights(model: nn.Module, *, keep_ties: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; ``keep_ties``: a shared one by each of its names."""
    yield from model.named_parameters(remove_duplicate=not keep_ties)
    for path, module in model.named_modules(remove_duplicate=not keep_ties):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


@torch.no_grad()
def iter_merged(
    model: nn.Module, *, whole: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with adapters merged by peft, added in float32 and rounded once, to ``dtype`` or to
    the type of the weight.

    ``whole`` returns the full tensor of a sharded one. Tied weights occur once, or under each of their names
    if an adapter changes one of them (:func:`broken_ties`). Raises ModelError for an adapter that is not
    merged.
    """
    layers = _adapted_layers(model)
    pending, seen = dict(layers), set[int]()
    for name, tensor in _weights(model, keep_ties=True):
        if (path := _owner(name, layers)) is not None:
            if (layer := pending.pop(path, None)) is not None:
                yield from _merged_layer(path, layer, whole, dtype)
        elif ".lora_" in name:
            raise ModelError(f"the adapter {name} is in no layer of peft, so it cannot be merged")
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, whole(tensor)


def merged_names(model: nn.Module) -> dict[str, Tensor]:
    """Return the names of :func:`iter_merged` in its order, each with a tensor of the same shape and type;
    nothing is computed.
    """
    layers = _adapted_layers(model)
    pending, seen = dict(layers), set[int]()
    tensors: dict[str, Tensor] = {}
    for name, tensor in _weights(model, keep_ties=True):
        if (path := _owner(name, layers)) is not None:
            if (layer := pending.pop(path, None)) is not None:
                tensors |= {f"{path}.{inner}": inner_tensor for inner, inner_tensor in _weights(_base(layer))}
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def broken_ties(model: nn.Module) -> list[str]:
    """Names of tied weights that an adapter separates: the vocabulary projection differs from the embedding
    if one of them has an adapter.
    """
    layers = _adapted_layers(model)
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return [
        _plain_name(name)
        for shared in names.values()
        if len(shared) > 1 and any(_owner(name, layers) is not None for name in shared)
        for name in shared
    ]


def to_folder_format(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with the names and shapes of the files in a model's folder, which vLLM reads too.

    transformers stores some weights in one tensor that are several in the files, such as a layer's experts.
    The conversion is done layer by layer, because no such tensor spans layers.
    """
    for _, group in groupby(weights, key=lambda pair: layer_prefix(pair[0])):
        yield from revert_weight_conversion(cast(PreTrainedModel, model), dict(group)).items()


def layer_prefix(name: str) -> str:
    """The prefix of a weight's name up to the number of its layer; empty outside of the layers."""
    match = _LAYER.match(name)
    return match.group() if match else ""


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that peft put in the place of the model's, by their names; the outermost of several."""
    layers: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "base_layer", None), nn.Module) and _owner(path, layers) is None:
            layers[path] = module
    return layers


def _owner(name: str, layers: Mapping[str, Any]) -> str | None:
    """The path of the layer that a module, a parameter or a buffer is in."""
    ends = (match.start() for match in re.finditer(r"\.|$", name))
    return next((name[:end] for end in ends if name[:end] in layers), None)


def _base(layer: Any) -> nn.Module:
    base: nn.Module = layer.get_base_layer()
    return base


def _merged_layer(
    path: str, layer: Any, whole: Callable[[Tensor], Tensor], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """peft's own merge, whatever the kind of the layer, of a copy: the layer itself does not change.

    Weights that will be bfloat16 are dithered first, because rounding would drop small changes by the
    adapter; without a change, they are those of the model.
    """
    memo: dict[int, Any] = {}
    names, types = dict[int, str](), dict[str, torch.dtype]()
    for name, tensor in cast(Iterator[tuple[str, Any]], _weights(_base(layer))):
        own = tensor.quant_state.dtype if _is_packed(tensor) else tensor.dtype
        names[id(tensor)], types[name] = name, (dtype or own) if own.is_floating_point else own
    for tensor in chain(layer.parameters(), layer.buffers()):
        exact = whole(plain_weight(tensor))
        if exact.is_floating_point():
            exact = exact.to(torch.promote_types(exact.dtype, torch.float32), copy=True)
            name = names.get(id(tensor), "")
            if types.get(name) == torch.bfloat16:
                dither(exact, f"{path}.{name}", seed=0)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(exact, requires_grad=False) if is_parameter else exact
    copied = copy.deepcopy(layer, memo)
    tuners = [(name, module) for name, module in copied.named_modules() if _is_adapter(module)]
    if hasattr(copied, "unload_and_optionally_merge_module"):
        plain = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge()
        plain = copied.get_base_layer()
    for name, tuner in tuners:
        if left := _adapter_names(tuner) - set(tuner.merged_adapters):
            layer_path = f"{path}.{name}" if name else path
            raise ModelError(f"the adapter {sorted(left)[0]!r} of {_plain_name(layer_path)} was not merged")
    for name, tensor in _weights(plain):
        yield f"{path}.{name}", tensor.detach().to(types[name])


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "merged_adapters") and hasattr(module, "adapter_layer_names")


def _adapter_names(tuner: Any) -> set[str]:
    containers = (getattr(tuner, name, None) for name in tuner.adapter_layer_names)
    return {
        name
        for container in containers
        if isinstance(container, (nn.ModuleDict, nn.ParameterDict))
        for name in container
    }
