"""Which rank computes which rollouts: whole groups by cost, the longest first to the lightest rank.

A group's cost is ``6 P U + 12 L d C`` floating-point operations: P parameters, U its unique tokens, L layers
of attention width d, C the sum of the tokens that each of them attends to. All ranks compute the same
placement.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.logging import disable_progress_bar

from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.model import LanguageModel, longest_context
from outrider.errors import ModelError
from outrider.training.adapters import choose_trained, layer_prefix, plain_names
from outrider.training.logprobs import Scoring
from outrider.training.packing import PackedBatch, RolloutPath
from outrider.training.policy import (
    SHARDS,
    Policy,
    Ranks,
    Scorer,
    TokenScores,
    require_shapes,
    sum_of_squares,
    tensor_folder,
)
from outrider.training.settings import LoraSettings, OptimizerSettings

_TOLERANCE: Final = 1.10  # heaviest rank over the mean
_MAX_CUTS: Final = 64

Cost = Callable[[Sequence[RolloutPath]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that decide what a token costs."""

    num_parameters: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Any, *, num_parameters: int) -> "Shape":
        """From a model's configuration."""
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            attention_width=head * text.num_attention_heads,
        )

    def cost(self, paths: Sequence[RolloutPath]) -> float:
        """Of rollouts that share their beginnings; a beginning that they share counts once."""
        num_tokens = sum_of_contexts = 0
        seen: set[tuple[int, ...]] = set()
        for path in paths:
            prefix: tuple[int, ...] = ()
            position = 0
            for node in path.nodes:
                if node.restarts:
                    prefix, position = (), 0
                size = len(node.token_ids)
                prefix = (hash((prefix, node.token_ids)),)
                if prefix not in seen:
                    seen.add(prefix)
                    num_tokens += size
                    sum_of_contexts += size * position + size * (size + 1) // 2
                position += size
        return 6.0 * self.num_parameters * num_tokens + (
            12.0 * self.num_layers * self.attention_width * sum_of_contexts
        )


def assign_to_ranks(paths: Sequence[RolloutPath], *, num_ranks: int, cost: Cost) -> list[list[RolloutPath]]:
    """The rollouts of every rank, in the order of ``paths``: each is in exactly one list.

    Groups stay whole, because a beginning is computed once; where the heaviest rank is more than 10 % above
    the mean, its largest group is cut between rollouts, as long as that makes it lighter.
    """
    groups: dict[int, list[RolloutPath]] = {}
    for path in paths:
        groups.setdefault(path.group, []).append(path)
    placed = _lightest(list(groups.values()), num_ranks, cost)
    for _ in range(_MAX_CUTS):
        loads = [sum(cost(unit) for unit in units) for units in placed]
        heaviest = max(range(num_ranks), key=lambda rank: loads[rank])
        if loads[heaviest] <= _TOLERANCE * sum(loads) / num_ranks:
            break
        largest = max(placed[heaviest], key=cost)
        if len(largest) == 1:
            break
        every = [unit for units in placed for unit in units if unit is not largest]
        middle = len(largest) // 2
        cut = _lightest([*every, largest[:middle], largest[middle:]], num_ranks, cost)
        if max(sum(cost(unit) for unit in units) for units in cut) >= loads[heaviest]:
            break
        placed = cut
    order = {id(path): number for number, path in enumerate(paths)}
    return [
        sorted((path for unit in units for path in unit), key=lambda path: order[id(path)])
        for units in placed
    ]


def _lightest(
    units: Sequence[list[RolloutPath]], num_ranks: int, cost: Cost
) -> list[list[list[RolloutPath]]]:
    """Longest first to the rank with the least; ties go to the lower number."""
    placed: list[list[list[RolloutPath]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    costs = [cost(unit) for unit in units]
    for number in sorted(range(len(units)), key=lambda number: (-costs[number], number)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        placed[rank].append(units[number])
        loads[rank] += costs[number]
    return placed


# The ranks of a run over gloo and NCCL: what all of them know, and who computes what.


ValueT = TypeVar("ValueT")


class GlooRanks:
    """This process among ``size`` of them. A collective that takes longer than the group's limit raises."""

    def __init__(self, shape: Shape) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._shape = shape

    def gather(self, value: ValueT) -> list[ValueT]:
        values: list[ValueT | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        return assign_to_ranks(paths, num_ranks=self.size, cost=self._shape.cost)[self.rank]


def open_store(host: str, *, size: int, timeout_s: float) -> TCPStore:
    """Where ranks meet, on a free port; kept by rank 0 as long as the others need it."""
    return TCPStore(
        host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(host: str, port: int, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
    """Meet the other ranks: over gloo, and over NCCL for what is on a GPU, of which Ray shows each rank its
    own. Raises what torch raises when they do not come in time.
    """
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


# A model in shards by FSDP2, filled from a folder of safetensors without a full copy on any rank.


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
    """:func:`outrider.training.adapters.choose_trained` of a model without memory; the adapters by name,
    in float32, drawn as one process draws them. No weight of the model has to be there for that: the place
    of each is taken by one number.
    """
    parameters = [
        (module, name, parameter) for module in model.modules() for name, parameter in _parameters(module)
    ]  # a tied one is in several modules
    if lora is not None:
        placeholders = {
            id(parameter): torch.zeros((), dtype=precision).expand(parameter.shape)
            for _, _, parameter in parameters
        }
        shared = {key: nn.Parameter(parameter) for key, parameter in placeholders.items()}
        for module, name, parameter in parameters:
            setattr(module, name, shared[id(parameter)])
    choose_trained(model, lora=lora, trained_layers=trained_layers, seed=seed)
    if lora is None:
        return {}
    for module, name, parameter in parameters:
        setattr(module, name, parameter.requires_grad_(False))
    own = {id(parameter) for _, _, parameter in parameters}
    adapters: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in _parameters(module):
            if id(parameter) not in own:
                adapters[f"{path}.{name}"] = parameter.detach().float()
                setattr(
                    module,
                    name,
                    nn.Parameter(torch.empty_like(parameter, dtype=torch.float32, device="meta")),
                )
    return adapters


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


@torch.no_grad()
def begin(model: nn.Module, folder: Path, adapters: Mapping[str, Tensor]) -> None:
    """The weights of a folder, and fresh adapters beside them."""
    fill(folder, plain_names(model))
    parameters = dict(model.named_parameters())
    for name, adapter in adapters.items():
        target = parameters[name]
        _copy(adapter, target)  # everybody drew the same: each takes its part


def _copy(whole: Tensor, target: Tensor) -> None:
    """A tensor that every rank has as a whole, into its part of one in shards."""
    own = whole.to(target.device)
    if isinstance(target, DTensor):
        own = distribute_tensor(own, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(own)


def require_shardable(folder: str) -> None:
    """Raises ModelError, before any process is started, for a model of which no rank could hold a part."""
    instead = "set cluster.num_trainers = 1"
    if not any(Path(folder).glob("*.safetensors")):
        raise ModelError(
            f"{folder} has no safetensors, which trainer ranks read: save it as such, or {instead}"
        )
    model = empty_model(folder).model
    if not hasattr(model.base_model, "layers"):
        raise ModelError(
            f"cluster.num_trainers: {type(model).__name__} names its layers otherwise: {instead}"
        )
    _fresh_buffers(model)


def _fresh_buffers(model: PreTrainedModel) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """The modules that have buffers, with what these are in a new model. Raises ModelError where that cannot
    be found out.
    """
    config = model.config.get_text_config()
    module_buffers = []
    for name, module in model.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        try:
            fresh = dict(type(module)(config=config).named_buffers(recurse=False))
        except TypeError as error:  # it is made of other things than the configuration
            fresh = _initialised(model, module)
            if not all(bool(buffer.isfinite().all()) for buffer in fresh.values()):
                raise ModelError(
                    f"cluster.num_trainers: the buffers of {name} cannot be made anew: "
                    "set cluster.num_trainers = 1"
                ) from error
        module_buffers.append((module, fresh))
    return module_buffers


@torch.no_grad()
def _initialised(model: PreTrainedModel, module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers as its architecture initialises them, NaN where it does not."""
    shell = copy.copy(module)
    weights = {name: nn.Parameter(torch.empty(0)) for name in module._parameters}
    for weight in weights.values():
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it alone
    shell._parameters = cast(Any, weights)
    shell._buffers = {
        name: torch.full(buffer.shape, torch.nan) for name, buffer in module.named_buffers(recurse=False)
    }
    with contextlib.suppress(Exception):  # an architecture's own code, which may want its weights
        model._init_weights(shell)
    return {name: cast(Tensor, buffer) for name, buffer in shell._buffers.items()}


def allocate(root: nn.Module, model: PreTrainedModel, *, device: str = "cpu") -> None:
    """Memory for this rank's shards, and the buffers made anew; those that a checkpoint has are read with the
    weights.
    """
    root.to_empty(device=device)
    for module, fresh in _fresh_buffers(model):
        for key, value in fresh.items():
            module._buffers[key] = value.to(device)


def fill(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Read every tensor's own part from the safetensors of a folder, by its name behind ``prefix``. In the
    folder of a model, what transformers holds in other tensors than the files do (the experts of a layer in
    one) is read as a whole, a layer at a time. Raises ModelError where one is not there.
    """
    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    keys, converted = {key.removeprefix(prefix): key for key in known if key.startswith(prefix)}, set[str]()
    if (folder / "config.json").is_file():
        converted, keys = _converted(folder, keys, tensors)
    if missing := [name for name in tensors if name not in keys and name not in converted]:
        raise ModelError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more of the model's weights")
    state: dict[str, Any] = {
        keys[name]: tensor.detach() for name, tensor in tensors.items() if name not in converted
    }
    state_dict_loader.load(state, storage_reader=reader)


@torch.no_grad()
def _converted(
    folder: Path, keys: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[set[str], dict[str, str]]:
    """Read what transformers converts; the names of that, and for all other weights the keys of the files."""
    disable_progress_bar()
    model = empty_model(str(folder)).model
    mapping: list[Any] = list(get_model_conversion_mapping(model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, file_keys = model.state_dict(), dict[str, str]()
    layers: dict[str, list[str]] = {}  # files' keys by the layer that they are converted for
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is None:
            file_keys[name] = key
        else:
            layers.setdefault(layer_prefix(name), []).append(key)
    pending = {name for name in tensors if name not in file_keys}
    done = set[str]()
    with ExitStack() as opened:
        slices = _slices(folder, opened)
        for layer, names in layers.items():
            if not (targets := {name for name in pending if layer_prefix(name) == layer}):
                continue
            read = {name: slices[name] for name in names}
            anew: list[Any] = list(get_model_conversion_mapping(model))  # the last ones hold what they read
            config = LoadStateDictConfig(weight_mapping=anew, dtype=torch.float32)
            convert_and_load_state_dict_in_model(model, read, config)
            for name in targets:
                whole = model.get_parameter_or_buffer(name)
                if whole.device.type != "meta":
                    _copy(whole, tensors[name])
                    done.add(name)
            cast(nn.Module, model).to("meta")  # only one layer is in memory
    return done, file_keys


def _slices(folder: Path, opened: ExitStack) -> dict[str, Any]:
    """Every weight of the files by its key, none of them read yet."""
    slices: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = opened.enter_context(safe_open(path, "pt"))
        slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return slices


# A policy whose weights, moments and gradients are in shards; the update sees it as any other.


class ShardedScorer(Scorer):
    """A model in shards that scores tokens, together with all other ranks."""

    def __init__(
        self, language_model: LanguageModel, scoring: nn.Module, ranks: Ranks, *, uses_flex: bool = False
    ) -> None:
        super().__init__(language_model, ranks=ranks, uses_flex=uses_flex)
        self.scoring = scoring

    def score(self, batch: PackedBatch) -> TokenScores:
        scores = super().score(batch)
        reshard(self.scoring)
        return scores

    def dummy_forward(self) -> Tensor:
        loss = super().dummy_forward()
        reshard(self.scoring)
        return loss


def reshard(scoring: Any) -> None:
    """Free the root's gathered weights after a pass without a backward one, which would do it: the next step
    would leave them behind.
    """
    if not torch.is_grad_enabled():
        scoring.reshard()


class ShardedPolicy(ShardedScorer, Policy):
    """Masters are this rank's shards in float32."""

    def __init__(
        self,
        language_model: LanguageModel,
        scoring: nn.Module,
        settings: OptimizerSettings,
        *,
        ranks: Ranks,
        uses_flex: bool = False,
    ) -> None:
        Scorer.__init__(self, language_model, ranks=ranks, uses_flex=uses_flex)
        self.scoring = scoring
        self.settings = settings
        self.working = {}  # the working copy is made as it is gathered
        self.masters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        self.num_steps = 0
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        own = sum_of_squares(local(gradient) for gradient in gradients)
        return math.sqrt(math.fsum(self.ranks.gather(own)))

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.scoring.reshard()  # type: ignore[operator]  # a step that is skipped had no backward pass

    def save(self, folder: Path) -> None:
        """Every rank its shards, as safetensors: no pickle."""
        (folder / SHARDS).mkdir(exist_ok=True)
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state.get(master, {}).items():
                state[f"{key}/{name}"] = value
        writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        state_dict_saver.save(state, storage_writer=writer)

    @torch.no_grad()
    def load(self, folder: Path, *, num_steps: int) -> None:
        """What any number of ranks or one process saved. Raises CheckpointError for another model's."""
        source = tensor_folder(folder)
        known = HuggingFaceStorageReader(str(source)).read_metadata().state_dict_metadata
        sizes = {name: tuple(entry.size) for name, entry in known.items()}  # type: ignore[union-attr]
        shapes = {name: tuple(entry.shape) for name, entry in self.masters.items()}
        saved_shapes = {name: size for name, size in sizes.items() if "/" not in name and name in shapes}
        require_shapes(folder, shapes, saved_shapes)
        fill(source, self.masters)
        self.optimizer.state.clear()
        if any(name.startswith("exp_avg/") for name in known):
            moments: dict[str, Tensor] = {}
            for name, master in self.masters.items():
                state = {
                    "step": torch.tensor(0.0, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
                self.optimizer.state[master] = state
                moments |= {f"{key}/{name}": value for key, value in state.items()}
            fill(source, moments)
        self.num_steps = num_steps
        self.scoring.reshard()  # type: ignore[operator]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor in shards; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
