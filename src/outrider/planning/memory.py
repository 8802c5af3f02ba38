"""Memory of training and generation in bytes, computed from a model's shape, with the sources of formulas.

- **states** (ZeRO-3, arXiv 1910.02054): 16 bytes per parameter in mixed precision with Adam, over N ranks;
- **activations** (Korthikanti et al., arXiv 2205.05198): a checkpointed layer stores its input, and one layer
  at a time is recomputed;
- **keys and values** (PagedAttention, arXiv 2309.06180): two vectors of K D numbers per layer and token.

Shape letters are those of :class:`outrider.planning.shape.ModelShape`; T is the number of tokens of a
micro-batch, b the bytes per number in the working precision (bfloat16 2, float32 4), N the number of trainer
ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from outrider.algorithms.base import Algorithm, is_plugin_loss
from outrider.engines.base import VllmSettings
from outrider.engines.local.processor import read_processor
from outrider.errors import ConfigError
from outrider.planning.shape import ModelShape
from outrider.plugins.registry import resolve
from outrider.training.settings import ClusterSettings, RunSettings

MARGIN: Final = 1.1  # fragmentation of the allocator, and buffers that no formula includes
CONTEXT_BYTES: Final = 2_000_000_000  # CUDA's context, kernels and NCCL's buffers, per GPU
PROCESS_BYTES: Final = 500_000_000  # on a CPU: interpreter and libraries of one process
SLEEPING_BYTES: Final = 2_000_000_000  # memory that a sleeping engine still uses on its GPU
HEAD_ROWS, HEAD_CHUNK = 512, 128  # outrider.training.policy
LEAST_ROWS: Final = 8  # outrider.engines.local.decode_graphs
FUSED: Final = ("llama", "qwen2", "qwen3")  # outrider.engines.local.cpu_kernels

MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes per parameter: float32, two moments of Adam, float32
MOMENTS_8BIT: Final = 2 + 2 * 4 / 256  # two moments of a byte, with a float32 scale per block of 256 values
# NF4: half a byte per weight, a scale of a byte per 64 weights, and a float32 scale per 256 of these
NF4_BYTES: Final = 1 / 2 + 1 / 64 + 4 / (64 * 256)
VALUE_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings that determine the memory of a trainer rank. ``on_cpu``: norms, MLPs and rotations are fused
    where the model's family allows it. ``is_averaged``: the reference is a moving average of the weights.
    """

    on_cpu: bool = False
    ranks: int = 1
    max_tokens: int
    precision: str = "bfloat16"
    checkpointed: bool = False
    has_reference: bool = False
    is_averaged: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    is_4bit: bool = False
    trained_layers: int | None = None
    optimizer_states: str = "float32"

    @property
    def optimizer_bytes(self) -> tuple[float, float, float]:
        """Bytes per trained parameter of masters, moments and gradients. bitsandbytes keeps tensors of fewer
        than 4,096 numbers, such as norms, in float32; they are counted as if it did not.
        """
        return MASTER, MOMENTS_8BIT if self.optimizer_states == "8bit" else MOMENTS, GRADIENT

    @property
    def is_offloaded(self) -> bool:
        """Whether masters, moments and gradients are in host memory."""
        return self.optimizer_states == "cpu"

    @property
    def value_bytes(self) -> int:
        """b, bytes per number in the working precision."""
        return VALUE_BYTES[self.precision]

    @property
    def trains_all(self) -> bool:
        """Whether every weight of the model has a gradient."""
        return self.lora_rank is None and self.trained_layers is None

    def trained_parameters(self, shape: ModelShape) -> int:
        """Return the number of parameters with a gradient: the whole model, the adapters, or the last layers
        and the last norm.

        Raises ConfigError for adapters of an unknown matrix, or more layers than the model has.
        """
        if self.lora_rank is not None:
            return shape.adapter_parameters(self.lora_rank, self.lora_targets)
        if self.trained_layers is not None:
            if self.trained_layers > shape.num_layers:
                raise ConfigError(
                    f"model.trained_layers = {self.trained_layers}, but {shape.name} has "
                    f"{shape.num_layers} layers"
                )
            return shape.last_layers_parameters(self.trained_layers) + shape.width
        return shape.num_parameters

    def layers_with_gradients(self, shape: ModelShape) -> int:
        """Return how many layers need activations for the backward pass (``trained_layers``, or all)."""
        return shape.num_layers if self.trained_layers is None else self.trained_layers


def rank_bytes(shape: ModelShape, training: Training) -> dict[str, float]:
    """Return the peak memory of one trainer rank in bytes, by purpose; the sum is the peak before
    :data:`MARGIN`.
    """
    share, b = shape.num_parameters / training.ranks, training.value_bytes
    trained = training.trained_parameters(shape) / training.ranks
    # adapters are parameters in addition to those of the model
    frozen = share if training.lora_rank is not None else share - trained
    alone = training.ranks == 1
    packed, largest = shape.adapted_weights(training.lora_targets) if training.is_4bit and alone else (0, 0)
    head_gradient = head_gradient_bytes(shape, b) if alone and training.trains_all else 0.0
    on_device = not training.is_offloaded
    masters, moments, gradients = training.optimizer_bytes
    # in the working precision or in 4 bit in one process, in float32 shards on ranks
    frozen_bytes = (b if alone else MASTER) * (frozen - packed) + NF4_BYTES * packed
    reference = frozen_bytes + (b if alone else MASTER) * trained
    averages = MASTER * trained if training.is_averaged and on_device else 0.0
    rank = {
        "frozen weights": frozen_bytes,
        "masters": masters * trained * on_device,
        "moments": moments * trained * on_device,
        "gradients": gradients * trained * on_device,
        # in float32, the master weights are also the working copy, unless they are in host memory
        "working copy": b * trained if alone and (b < MASTER or not on_device) else 0.0,
        # one process has a copy in the working precision; ranks have float32 shards
        # (outrider.distributed.learner)
        "reference": reference + averages if training.has_reference else 0.0,
        "gathered layers": 0.0 if alone else gathered_bytes(shape, training),
        "activations kept": activation_bytes(shape, training),
        # The backward pass of the head has finished before that of the last layer begins. A layer computes
        # with a copy of each 4-bit matrix.
        "pass in work": max(
            layer_bytes(shape, training) + b * largest, head_bytes(shape, training) + head_gradient
        ),
    }
    # the model is loaded in the working precision, and its layers are then packed one by one
    loading = b * shape.num_parameters if packed else 0.0
    return {**rank, "weights before 4 bit": max(0.0, loading - sum(rank.values()))}


def host_bytes(shape: ModelShape, training: Training) -> float:
    """Host memory of ``optimizer.states = "cpu"``: master weights, moments and gradients, ``16 P``, and the
    float32 average of a moving teacher.
    """
    if not training.is_offloaded:
        return 0.0
    per_parameter = sum(training.optimizer_bytes) + MASTER * training.is_averaged
    return per_parameter * training.trained_parameters(shape)


def gathered_bytes(shape: ModelShape, training: Training) -> float:
    """FSDP2's gathers, the larger of two peaks. The backward pass has the root's weights, two layers (one
    computed, one on its way), and the gradient of the larger of them in float32 before ranks sum it: ``b
    P_root + 2 b P_layer + 4 max(P_root, P_layer)``. A frozen root or layer has no gradient. When the first
    layer is gathered, the buffers from which the root's and its weights are copied still exist: ``2 b (P_root
    + P_layer)``.
    """
    root, layer, b = shape.root_parameters, shape.layer_parameters, training.value_bytes
    if training.lora_rank is not None:
        gradient = training.trained_parameters(shape) // shape.num_layers
    else:
        gradient = max(root, layer) if training.trains_all else layer
    return max(b * (root + 2 * layer) + GRADIENT * gradient, 2 * b * (root + layer))


def head_gradient_bytes(shape: ModelShape, value_bytes: int) -> float:
    """In one process: the gradient of the vocabulary projection in float32 and the contribution of one block,
    before both are added to the gradients of earlier micro-batches: ``(4 + b) V d``.
    """
    return (GRADIENT + value_bytes) * shape.embedding_parameters


def activation_bytes(shape: ModelShape, training: Training) -> float:
    """Activations between forward and backward pass: with checkpointing the inputs of all layers, ``b L d
    T``, otherwise all tensors that backward needs. Layers below the first trained one store nothing.
    """
    per_token = shape.width if training.checkpointed else activations_per_token(shape, training)
    return training.value_bytes * training.layers_with_gradients(shape) * per_token * training.max_tokens


def layer_bytes(shape: ModelShape, training: Training) -> float:
    """Activations and gradients of the layer being computed: ``b (9 d + 4 f) T`` if it is fused, otherwise
    what it stores and the gradients of two tensors of the MLP.
    """
    per_token = 9 * shape.width + 4 * shape.active_mlp_width
    if not is_fused(shape, training):
        per_token = activations_per_token(shape, training) + 2 * shape.active_mlp_width
    return training.value_bytes * per_token * training.max_tokens


def is_fused(shape: ModelShape, training: Training) -> bool:
    """Whether :func:`outrider.engines.local.cpu_kernels.fuse` replaces the layers' modules."""
    return training.on_cpu and shape.family in FUSED


def activations_per_token(shape: ModelShape, training: Training) -> int:
    """Numbers in the working precision that a layer stores for its backward pass per token.

    Fused: inputs and outputs of its two norms (4 d), queries and attention outputs (2 H D), keys and values
    (2 K D), with norms over heads their inputs (H D + K D), gate, up and their product (3 f). The modules of
    transformers also store silu(gate) (f), and each norm a float32 copy of its input (2 d) and, if its weight
    trains, the normalised input (d; in Gemma 2 d, in float32) in place of the input itself.
    """
    attention = shape.query_width + shape.attention_width + 2 * shape.kv_width
    head_norms = (shape.attention_width + shape.kv_width) * shape.has_head_norms
    if is_fused(shape, training):
        return 4 * shape.width + attention + head_norms + 3 * shape.active_mlp_width
    float32 = VALUE_BYTES["float32"] // training.value_bytes
    per_norm = float32
    if training.lora_rank is None:
        per_norm += float32 if shape.family.startswith("gemma") else 1
    normalised = shape.num_norms * shape.width + head_norms
    return per_norm * normalised + 2 * shape.width + attention + 4 * shape.active_mlp_width


def head_bytes(shape: ModelShape, training: Training) -> float:
    """Logits of a block of tokens in the working precision, and log-probs and probabilities of a chunk of
    it in float32: ``(512 b + 128 * 8) V`` (:mod:`outrider.training.policy`). In float32 the first block is
    stored for the backward pass, so a second one may exist beside it.
    """
    b = training.value_bytes
    num_rows = min(training.max_tokens, 2 * HEAD_ROWS) if b == VALUE_BYTES["float32"] else HEAD_ROWS
    return (max(num_rows, HEAD_ROWS) * b + 2 * 4 * HEAD_CHUNK) * shape.vocabulary


def weight_bytes(shape: ModelShape, *, tensor_parallel: int, value_bytes: int = 2) -> float:
    """Weights on one GPU of an engine: ``b P / tp``."""
    return value_bytes * shape.num_parameters / tensor_parallel


def token_bytes(shape: ModelShape, *, tensor_parallel: int, value_bytes: int = 2) -> float:
    """Keys and values of one token on one GPU of an engine: ``2 b L K D / tp``; with more GPUs than
    key-value heads each GPU still has one head.
    """
    heads = max(1.0, shape.num_kv_heads / tensor_parallel)
    return 2 * value_bytes * shape.num_attention_layers * heads * shape.head_size


def state_bytes(shape: ModelShape) -> float:
    """Recurrent states of one sequence, in float32; 0 for models with attention in all layers."""
    linear = shape.linear_attention
    return 4.0 * len(linear.layers) * linear.state_size if linear else 0.0


def with_margin(num_bytes: float) -> float:
    """Memory of a GPU for ``num_bytes`` of tensors, with margin and context."""
    return MARGIN * num_bytes + CONTEXT_BYTES


# Settings of a run that determine its memory and its work.


USED_SHARE: Final = 0.35  # of a device's peak rate, an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``context``: tokens of the longest episode, prompt and response. ``shares_weights``: the engine is the
    model that trains. ``extra_forwards``: passes without a gradient over the tokens of an update.
    ``contexts``: samples that an episode may become at most; with ``whole_rollouts`` they are one micro-batch
    together.
    ``engine_memory``: ``engine.memory`` of the vLLM engine; ``has_vllm``: whether there is one.
    ``concurrent``: episodes that play at a time; only vLLM lets them wait for memory.
    """

    training: Training
    context: int
    episodes: int
    shares_weights: bool
    extra_forwards: int
    contexts: int = 1
    whole_rollouts: bool = False
    has_vllm: bool = False
    engine_memory: float | None = None
    concurrent: int = 1

    @property
    def episode_tokens(self) -> int:
        """Maximum number of tokens that an update computes per episode."""
        return self.context * self.contexts

    @property
    def unit_tokens(self) -> int:
        """Maximum number of tokens that no ``update.max_tokens`` splits between micro-batches."""
        return self.episode_tokens if self.whole_rollouts else self.context

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of a step: every episode has the maximum length, and shares no prefix."""
        return self.episodes * self.episode_tokens

    def update_seconds(self, shape: ModelShape, *, ranks: int, peak: float) -> float:
        """Estimate ``(6 + 2 c + 2 m) P U / (0.35 N peak)``: forward and backward pass are 6 operations per
        parameter and token, a pass computed again (c) and each of m extra forwards 2. Attention's products
        are not counted. With adapters the backward pass has 2 of its 4 operations, because frozen weights
        have no gradient; with ``trained_layers`` it runs through these layers only.
        """
        training = self.training
        backward = 4.0 if training.lora_rank is None else 2.0
        if training.trained_layers is not None:
            backward *= training.trained_parameters(shape) / shape.num_parameters
        per_parameter = 2 + backward + 2 * training.checkpointed + 2 * self.extra_forwards
        operations = per_parameter * shape.active_parameters * self.step_tokens
        return operations / (USED_SHARE * ranks * peak)


def make_workload(settings: RunSettings, *, prompt_tokens: int, longest: int | None = None) -> Workload:
    """Create the workload of a recipe. ``prompt_tokens`` is an argument because recipes do not contain it;
    ``longest`` is the number of positions of the model.

    ``precision = "auto"`` counts as bfloat16 on a GPU, and as on this machine on a CPU.
    """
    device, update, algorithm = settings.model.device, settings.update, settings.algorithm
    states = settings.optimizer.states
    engine, lora = settings.engine, settings.model.lora
    precision = settings.model.precision
    if precision == "auto":
        precision = "float32" if device == "cpu" and not read_processor().multiplies_bfloat16 else "bfloat16"
    limits = [limit for limit in (settings.model.context_length, longest) if limit]
    rebuilt = settings.environment.rebuilt_prompt_tokens
    longest_context = prompt_tokens + settings.rollout.max_response_tokens
    if rebuilt is not None:
        longest_context = rebuilt + settings.rollout.max_turn_tokens
    context = min([longest_context, *limits])
    # every episode has a context, and rendering a conversation again before a turn may start one
    contexts = getattr(algorithm, "num_episodes", 1)
    if settings.model.history_thinking == "strip" or rebuilt is not None:
        contexts = settings.rollout.max_turns
    has_several_updates = (
        update.num_mini_batches * update.num_epochs > 1 or update.mini_batch_samples is not None
    )
    distill = algorithm.distill
    is_averaged = distill is not None and distill.teacher == "ema"
    token_loss = getattr(resolve("algorithms", algorithm.type), "token_loss", Algorithm.token_loss)
    work = Workload(
        training=Training(
            on_cpu=device == "cpu",
            max_tokens=update.max_tokens,
            precision=precision,
            checkpointed=update.checkpoint_activations,
            has_reference=algorithm.needs_reference or is_averaged,
            is_averaged=is_averaged,
            lora_rank=None if lora is None else lora.rank,
            lora_targets=() if lora is None else tuple(lora.target_modules),
            is_4bit=lora is not None and lora.base == "4bit",
            trained_layers=settings.model.trained_layers,
            # on a CPU, host memory is the only one
            optimizer_states="float32" if (device, states) == ("cpu", "cpu") else states,
        ),
        context=context,
        episodes=settings.train.tasks_per_step * algorithm.group_size,
        shares_weights=settings.engine.is_exact,
        extra_forwards=has_several_updates + algorithm.needs_reference + (distill is not None),
        contexts=contexts,
        whole_rollouts=algorithm.needs_whole_rollouts or is_plugin_loss(token_loss),
        has_vllm=isinstance(engine, VllmSettings),
        engine_memory=engine.memory if isinstance(engine, VllmSettings) else None,
        concurrent=min(settings.num_concurrent, getattr(engine, "max_rows", settings.num_concurrent)),
    )
    # a longer context is a separate micro-batch
    max_tokens = max(update.max_tokens, work.unit_tokens)
    return replace(work, training=replace(work.training, max_tokens=max_tokens))


# Whether the processes of a layout fit on their GPUs.


GIB: Final = 2**30
# engine.memory where a recipe does not set it: beside a trainer, on a GPU of its own, GiB on a CPU
# (outrider.engines.vllm.engine.options, outrider.distributed.engines)
_SHARE_COLOCATED, _SHARE_ALONE, _CPU_GIB = 0.3, 0.9, 2.0
Placement = Literal["process", "colocate", "disaggregate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``process``: trainer and engine are one process on one GPU. ``colocate``: engines on the trainers'
    GPUs, asleep while these work. ``disaggregate``: GPUs of their own.
    """

    placement: Placement = "process"
    trainers: int = 1
    engines: int = 1
    tensor_parallel: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of all processes."""
        own = self.engines * self.tensor_parallel if self.placement == "disaggregate" else 0
        return self.trainers + own

    @property
    def overrides(self) -> list[str]:
        """Settings that select this layout."""
        return [f"cluster.{name}={value}" for name, value in self.settings.items()]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of ``[cluster]`` that select this layout."""
        if self.placement == "process":
            return {}
        settings: dict[str, Any] = {
            "num_trainers": self.trainers,
            "num_engines": self.engines,
            "tensor_parallel": self.tensor_parallel,
            "placement": self.placement,
        }
        if self.placement == "disaggregate":
            settings["weights"] = "nccl"  # selects a process of its own even for a single engine
        return settings

    def is_supported(self, shape: ModelShape) -> bool:
        """Whether any recipe can use this layout for this model."""
        if shape.is_unpacked and self.trainers > 1:
            return False
        try:
            ClusterSettings.model_validate(self.settings)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes of a layout.

    Attributes:
        rank: bytes of one trainer rank by purpose.
        host: bytes of ``optimizer.states = "cpu"`` in host memory.
        trainer_gpu: bytes of a trainer's GPU without keys and values (on a CPU, the sum of all processes).
        engine_gpu: the same of an engine's GPU; equal if both are one GPU.
        episodes: number of concurrent episodes of the maximum length per engine.
        engine_share: the share of a GPU that vLLM uses (``engine.memory``), None for an engine that uses the
            memory that the trainer leaves.
    """

    layout: Layout
    rank: Mapping[str, float]
    host: float
    weights: float
    trainer_gpu: float
    engine_gpu: float
    token: float
    episodes: int
    gpu_memory: float
    engine_share: float | None = None

    @property
    def fits(self) -> bool:
        """Whether both kinds of GPU have enough memory, with room for at least one episode."""
        return max(self.trainer_gpu, self.engine_gpu) <= self.gpu_memory and self.episodes >= 1


def fit(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> Fit:
    """Compute the memory of a layout. A GPU needs 1.1 times the bytes of its processes and 2 GB
    (:func:`outrider.planning.memory.with_margin`); what is left is for keys and values.

    A colocated GPU counts the trainer's peak, the engine's weights and what a sleeping engine leaves: both at
    once, an upper bound. vLLM uses at most its share ``engine.memory`` of a GPU: 1.1 times its weights, and
    keys and values in the rest. Raises ConfigError if ``engine.memory`` is no share.
    """
    rank = rank_bytes(shape, replace(work.training, ranks=layout.trainers))
    trainer, tp = sum(rank.values()), layout.tensor_parallel
    shares_gpu = layout.placement != "disaggregate"
    shared = layout.placement == "process" and work.shares_weights
    # an engine in another process has weights in bfloat16
    value_bytes = work.training.value_bytes if shared else 2
    weights = 0.0 if shared else weight_bytes(shape, tensor_parallel=tp)
    asleep = SLEEPING_BYTES if layout.placement == "colocate" else 0
    shared_gpu_bytes = with_margin(trainer + weights + asleep)
    engine = shared_gpu_bytes if shares_gpu else with_margin(weights)
    token = token_bytes(shape, tensor_parallel=tp, value_bytes=value_bytes)
    room = max(0.0, gpu_memory - engine) / MARGIN
    share = None
    if work.has_vllm:
        default = _SHARE_ALONE if layout.placement == "disaggregate" else _SHARE_COLOCATED
        share = default if work.engine_memory is None else work.engine_memory
        if share > 1:
            raise ConfigError(f"engine.memory = {share:g}: on a GPU it is a share between 0 and 1")
        room = min(room, max(0.0, share * gpu_memory - MARGIN * weights))
    episodes = int(room // (token * work.context + state_bytes(shape)))
    return Fit(
        layout=layout,
        rank=rank,
        host=host_bytes(shape, work.training),
        weights=weights,
        trainer_gpu=shared_gpu_bytes if shares_gpu else with_margin(trainer),
        engine_gpu=engine,
        token=token,
        episodes=episodes if work.has_vllm or shape.is_unpacked else _rows_of_slots(episodes),
        gpu_memory=gpu_memory,
        engine_share=share,
    )


def reserved_slots(num_rows: int) -> int:
    """Return for how many episodes the local engine on a GPU reserves memory: a decoding graph has a power of
    two of rows, and the padding writes into one more slot.
    """
    return (1 << (max(num_rows, LEAST_ROWS) - 1).bit_length()) + 1


def _rows_of_slots(num_slots: int) -> int:
    """Return the largest number of rows with at most ``num_slots`` reserved slots."""
    return next((num for num in range(num_slots, 0, -1) if reserved_slots(num) <= num_slots), 0)


def fit_cpu(shape: ModelShape, work: Workload, layout: Layout, *, memory: float) -> Fit:
    """Count the processes of a run on a CPU, which share ``memory`` bytes: 1.1 times their tensors and 0.5 GB
    each; keys and values get the rest, or ``engine.memory`` GiB of vLLM.
    """
    rank = rank_bytes(shape, replace(work.training, ranks=layout.trainers))
    shared = layout.placement == "process" and work.shares_weights
    value_bytes = work.training.value_bytes
    weights = 0.0 if shared else weight_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)
    engines = layout.engines if weights else 0
    num_processes = layout.trainers + (engines if layout.placement != "process" else 0)
    total = (
        MARGIN * (layout.trainers * sum(rank.values()) + engines * weights) + num_processes * PROCESS_BYTES
    )
    token = token_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)
    room = max(0.0, memory - total) / MARGIN / layout.engines
    if work.has_vllm:
        room = min(room, GIB * (work.engine_memory or _CPU_GIB))
    return Fit(
        layout=layout, rank=rank, host=0.0, weights=weights, trainer_gpu=total, engine_gpu=total, token=token,
        episodes=int(room // (token * work.context + state_bytes(shape))), gpu_memory=memory,
    )  # fmt: skip


# Suggestions if a run does not fit: fewer tokens per pass, or more GPUs.


_MAX_NODES: Final = 64
_MIN_TOKENS: Final = 256


def smallest_fit(
    shape: ModelShape, work: Workload, placement: Placement, *, gpu_memory: float, gpus_per_node: int
) -> Fit | None:
    """Return the layout with the fewest GPUs, and then the fewest per engine, that fits; None if none does.

    The number of trainers is a power of two within a node, or else whole nodes; an engine is within a node.
    One process uses one GPU. Layouts that this version does not support are skipped. Processes of trainers
    have float32 states and no weights in 4 bit, whatever the recipe sets.
    """
    if placement == "process":
        candidate = fit(shape, work, Layout(), gpu_memory=gpu_memory)
        return candidate if candidate.fits else None
    work = replace(work, training=replace(work.training, optimizer_states="float32", is_4bit=False))
    powers = [2**power for power in range(gpus_per_node.bit_length())]
    # vLLM requires that heads divide evenly.
    sizes = [tp for tp in powers if tp <= gpus_per_node and shape.num_heads % tp == 0]
    whole_nodes = [gpus_per_node * nodes for nodes in range(1, _MAX_NODES + 1)]
    for trainers in [*(power for power in powers if power < gpus_per_node), *whole_nodes]:
        for tp in sizes:
            if placement == "colocate" and trainers % tp:
                continue
            engines = trainers // tp if placement == "colocate" else 1
            layout = Layout(placement=placement, trainers=trainers, engines=engines, tensor_parallel=tp)
            candidate = fit(shape, work, layout, gpu_memory=gpu_memory)
            if candidate.fits and layout.is_supported(shape):
                return candidate
    return None


def suggested_overrides(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> list[str]:
    """Return settings, each of which alone is sufficient to fit.

    These are activation checkpoints; the largest ``update.max_tokens``, halving the recipe's value, but at
    least the longest context, or episode, that is always in one micro-batch; in one process, moments in 8
    bit, all optimizer states in host memory, and 4-bit weights below adapters; and the smallest
    ``engine.memory`` in steps of 0.05 with room for an episode.
    """
    training, overrides = work.training, []

    def fits(engine_memory: float | None = work.engine_memory, **changes: Any) -> bool:
        candidate = replace(work, engine_memory=engine_memory, training=replace(training, **changes))
        return fit(shape, candidate, layout, gpu_memory=gpu_memory).fits

    if not training.checkpointed and fits(checkpointed=True):
        overrides.append("update.checkpoint_activations=true")
    tokens = training.max_tokens // 2
    while tokens >= max(work.unit_tokens, _MIN_TOKENS):
        if fits(max_tokens=tokens):
            overrides.append(f"update.max_tokens={tokens}")
            break
        tokens //= 2
    if layout.placement == "process":
        if training.optimizer_states == "float32":
            states = [states for states in ("8bit", "cpu") if fits(optimizer_states=states)]
            overrides += [f"optimizer.states={name}" for name in states]
        if training.lora_rank is not None and not training.is_4bit and fits(is_4bit=True):
            overrides.append("model.lora.base=4bit")
    for share in (twentieths / 20 for twentieths in range(1, 20) if work.has_vllm):
        if fits(engine_memory=share):
            overrides.append(f"engine.memory={share:g}")
            break
    return overrides
