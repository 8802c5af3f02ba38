"""Trainer ranks with FSDP2: assignment of rollouts, process groups, sharded models and policies."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from outrider.distributed.processes import PROGRESS
from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.model import LanguageModel, longest_context
from outrider.errors import ModelError
from outrider.training.adapters import choose_trained, layer_prefix, plain_names
from outrider.training.packing import PackedBatch, RolloutPath
from outrider.training.policy import (
    SHARDS,
    TEACHER,
    Policy,
    Ranks,
    Scorer,
    Scoring,
    Support,
    TokenScores,
    make_optimizer,
    require_shapes,
    sum_of_squares,
    tensor_folder,
)
from outrider.training.settings import LoraSettings, OptimizerSettings

_TOLERANCE: Final = 1.10  # load of the heaviest rank over the mean
_MAX_CUTS: Final = 64

ValueT = TypeVar("ValueT")

Cost = Callable[[Sequence[RolloutPath]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that determine the cost of a token."""

    num_parameters: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Any, *, num_parameters: int) -> "Shape":
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            attention_width=head * text.num_attention_heads,
        )

    def cost(self, paths: Sequence[RolloutPath]) -> float:
        """Estimate the floating-point operations of rollouts; shared prefixes count once.

        ``6 P U + 12 L d C``: P parameters, U unique tokens, L layers of attention width d, C the sum over
        tokens of the number of tokens that each attends to.
        """
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
    """Assign each rollout to one rank; the order of ``paths`` is preserved. All ranks compute the same
    result.

    Groups stay whole, because shared prefixes are computed once. If the heaviest rank is more than 10 % above
    the mean, its largest group is split between rollouts, as long as that reduces its load.
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
    """Assign units by decreasing cost to the rank with the lowest load; ties go to the lower number."""
    placed: list[list[list[RolloutPath]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    costs = [cost(unit) for unit in units]
    for number in sorted(range(len(units)), key=lambda number: (-costs[number], number)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        placed[rank].append(units[number])
        loads[rank] += costs[number]
    return placed


class GlooRanks:
    """This process among ``size`` ranks. A collective raises after the time limit of the group."""

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
    """Open the store at which ranks meet, on a free port; rank 0 keeps it open."""
    return TCPStore(
        host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(host: str, port: int, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
    """Join the process group: gloo, and NCCL for tensors on a GPU (each rank sees only its own).

    Raises an exception of torch if not all ranks join in time.
    """
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


# --- Sharded models, filled from a folder of safetensors without a full copy on any rank ---


def shard(model: PreTrainedModel, *, size: int, precision: torch.dtype, device: str = "cpu") -> nn.Module:
    """Shard a model over all ranks and return the module whose forward scores tokens.

    Each layer is a group; embedding, vocabulary projection and last norm belong to the root, because torch
    does not accept a tied weight in two groups. Gradients are *summed* over ranks, because token weights
    refer to the whole mini-batch; the settings are not inherited by submodules, so each module gets its own.
    """
    mesh = init_device_mesh(device, (size,))
    root = Scoring(model)
    options: dict[str, Any] = {"mesh": mesh}
    if precision != torch.float32:  # master weights in float32, a working copy in the precision of the model
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for layer in cast(Any, model.base_model).layers:
        fully_shard(layer, **options)
    fully_shard(root, **options)
    # sum over ranks: FSDP2 would average, and a factor without the forced sum fails on gloo
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root


def empty_model(folder: str, *, device: str = "cpu") -> LanguageModel:
    """Build the model of a folder in float32 without memory for its weights, and without tokenizer."""
    register()
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        )
    model.eval()  # like a loaded model, without dropout
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
    """Run :func:`outrider.training.adapters.choose_trained` for a model without memory; returns new adapters
    by name in float32, initialized like those of a single process.

    Each weight of the model is replaced by an expanded scalar meanwhile.
    """
    parameters = [
        (module, name, parameter) for module in model.modules() for name, parameter in _parameters(module)
    ]  # tied parameters occur several times
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
    """Load the weights of a folder, and add new adapters."""
    fill(folder, plain_names(model))
    parameters = dict(model.named_parameters())
    for name, adapter in adapters.items():
        target = parameters[name]
        _copy(adapter, target)  # all ranks initialized the same adapter


def _copy(whole: Tensor, target: Tensor) -> None:
    """Copy a tensor that every rank has into its shard of ``target``."""
    own = whole.to(target.device)
    if isinstance(target, DTensor):
        own = distribute_tensor(own, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(own)


def require_shardable(folder: str) -> None:
    """Raise ModelError, before any process is started, for a model that cannot be sharded."""
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
    """Return the modules with buffers and the initial values of these. Raises ModelError if these are
    unknown.
    """
    config = model.config.get_text_config()
    module_buffers = []
    for name, module in model.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        try:
            fresh = dict(type(module)(config=config).named_buffers(recurse=False))
        except TypeError as error:  # its constructor has other arguments
            fresh = _initialised(model, module)
            if not all(bool(buffer.isfinite().all()) for buffer in fresh.values()):
                raise ModelError(
                    f"cluster.num_trainers: the buffers of {name} cannot be initialized: "
                    "set cluster.num_trainers = 1"
                ) from error
        module_buffers.append((module, fresh))
    return module_buffers


@torch.no_grad()
def _initialised(model: PreTrainedModel, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers as its architecture initializes them; NaN if it does not."""
    shell = copy.copy(module)
    weights = {name: nn.Parameter(torch.empty(0)) for name in module._parameters}
    for weight in weights.values():
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # skipped by transformers
    shell._parameters = cast(Any, weights)
    shell._buffers = {
        name: torch.full(buffer.shape, torch.nan) for name, buffer in module.named_buffers(recurse=False)
    }
    with contextlib.suppress(Exception):  # an architecture's own code, which may need its weights
        model._init_weights(shell)
    return {name: cast(Tensor, buffer) for name, buffer in shell._buffers.items()}


def allocate(root: nn.Module, model: PreTrainedModel, *, device: str = "cpu") -> None:
    """Allocate memory for this rank's shards and initialize buffers; a checkpoint's buffers are read with the
    weights.
    """
    root.to_empty(device=device)
    for module, fresh in _fresh_buffers(model):
        for key, value in fresh.items():
            module._buffers[key] = value.to(device)


def weights_reader(folder: Path, *, file: str | None = None) -> HuggingFaceStorageReader:
    """Return a reader of one file of a folder, or of all safetensors but those of an averaged teacher, whose
    tensors have the names of the policy's.
    """
    files = [folder / file] if file else sorted(set(folder.glob("*.safetensors")) - {folder / TEACHER})
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs.ls = lambda path: [str(each) for each in files]  # type: ignore[method-assign]
    return reader


def fill(folder: Path, tensors: Mapping[str, Tensor], *, file: str | None = None) -> None:
    """Read every tensor's shard by its name from one ``file`` or the weights of a folder.

    In a model's folder, weights that transformers stores differently from the files (for example the experts
    of a layer as one tensor) are read as a whole, layer by layer. Raises ModelError if one is missing.
    """
    reader = weights_reader(folder, file=file)
    known = reader.read_metadata().state_dict_metadata
    keys, converted = {key: key for key in known}, set[str]()
    if (folder / "config.json").is_file():
        converted, keys = _converted(folder, keys, tensors)
    if missing := [name for name in tensors if name not in keys and name not in converted]:
        raise ModelError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more of the model's weights")
    state: dict[str, Any] = {
        keys[name]: tensor.detach() for name, tensor in tensors.items() if name not in converted
    }
    state_dict_loader.load(state, storage_reader=reader)


def names_of_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Map the keys of a model's files to the names of its weights, and to whether transformers converts
    them, for example the experts of a layer to one tensor.
    """
    mapping: list[Any] = list(get_model_conversion_mapping(model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, names = model.state_dict(), dict[str, tuple[str, bool]]()
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        names[key] = (name, pattern is not None)
    return names


@torch.no_grad()
def _converted(
    folder: Path, keys: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> tuple[set[str], dict[str, str]]:
    """Read weights that transformers converts; returns their names, and the file keys of all other
    weights.
    """
    disable_progress_bar()
    model = empty_model(str(folder)).model
    file_keys = dict[str, str]()
    layers: dict[str, list[str]] = {}  # keys of the files by layer
    for key, (name, is_converted) in names_of_keys(model, keys).items():
        if is_converted:
            layers.setdefault(layer_prefix(name), []).append(key)
        else:
            file_keys[name] = key
    pending = {name for name in tensors if name not in file_keys}
    done = set[str]()
    with ExitStack() as opened:
        slices: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, "pt"))
            slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        for layer, names in layers.items():
            if not (targets := {name for name in pending if layer_prefix(name) == layer}):
                continue
            read = {name: slices[name] for name in names}
            anew: list[Any] = list(get_model_conversion_mapping(model))  # a mapping stores what it has read
            config = LoadStateDictConfig(weight_mapping=anew, dtype=torch.float32)
            convert_and_load_state_dict_in_model(model, read, config)
            for name in targets:
                whole = model.get_parameter_or_buffer(name)
                if whole.device.type != "meta":
                    _copy(whole, tensors[name])
                    done.add(name)
            cast(nn.Module, model).to("meta")  # only one layer is in memory
    return done, file_keys


# --- Policies whose weights, moments and gradients are sharded ---


class ShardedScorer(Scorer):
    """A sharded model that scores tokens together with all other ranks."""

    def __init__(
        self, language_model: LanguageModel, scoring: nn.Module, ranks: Ranks, *, uses_flex: bool = False
    ) -> None:
        super().__init__(language_model, ranks=ranks, uses_flex=uses_flex)
        self.scoring = scoring

    def score(
        self, batch: PackedBatch, *, trains_entropy: bool = False, support: Support | None = None
    ) -> TokenScores:
        scores = super().score(batch, trains_entropy=trains_entropy, support=support)
        PROGRESS.advance()
        reshard(self.scoring)
        return scores

    def dummy_forward(self) -> Tensor:
        loss = super().dummy_forward()
        reshard(self.scoring)
        return loss

    def frozen_head(self) -> nn.Module:
        self.scoring.unshard()  # type: ignore[operator]  # whole, and in the precision of a forward pass
        head = super().frozen_head()
        self.scoring.reshard()  # type: ignore[operator]
        return head


def reshard(scoring: Any) -> None:
    """Free the root's gathered weights after a forward pass without a backward pass, which would
    free them.
    """
    if not torch.is_grad_enabled():
        scoring.reshard()


class ShardedPolicy(ShardedScorer, Policy):
    """Policy whose master weights are this rank's shards in float32."""

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
        self.working = {}  # gathering makes the working copy
        self.masters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        self.num_steps = 0
        self.optimizer = make_optimizer(self.masters.values(), settings)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        own = sum_of_squares(local(gradient) for gradient in gradients)
        return math.sqrt(math.fsum(self.ranks.gather(own)))

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.scoring.reshard()  # type: ignore[operator]  # a skipped step had no backward pass
        free_cached_memory(self.language_model.device)

    def save(self, folder: Path) -> None:
        """Save this rank's shards as safetensors."""
        (folder / SHARDS).mkdir(exist_ok=True)
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state.get(master, {}).items():
                state[f"{key}/{name}"] = value
        writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        state_dict_saver.save(state, storage_writer=writer)

    @torch.no_grad()
    def load(self, folder: Path, *, num_steps: int) -> None:
        """Load a checkpoint of any number of ranks. Raises CheckpointError for one of another model."""
        source = tensor_folder(folder)
        known = weights_reader(source).read_metadata().state_dict_metadata
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


def free_cached_memory(device: torch.device) -> None:
    """Return unused memory to the GPU: torch would keep the peak of an update reserved while an engine on the
    same GPU wakes up.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; a tensor that is not sharded is unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return the position of this rank's first row in a tensor that FSDP2 has split by rows; 0 if it is not
    sharded.
    """
    if not isinstance(tensor, DTensor):
        return 0
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]
    return min(mesh.get_local_rank() * -(-num_rows // mesh.size()), num_rows)
