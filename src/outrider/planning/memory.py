"""Bytes that training and generation hold, from a model's shape. The formulas, with their papers.

- **states** (ZeRO-3, arXiv 1910.02054): 16 bytes per parameter in mixed precision with Adam, over N ranks;
- **activations** (Korthikanti et al., arXiv 2205.05198): a checkpointed layer keeps its input, one layer at a
  time is computed again;
- **keys and values** (PagedAttention, arXiv 2309.06180): two vectors of K D numbers per layer and token.

Shape letters are those of :class:`outrider.planning.shape.ModelShape`; T is a micro-batch's tokens, b the
bytes of a number of the working precision (bfloat16 2, float32 4), N the trainer ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.errors import ConfigError
from outrider.planning.shape import ModelShape

MARGIN: Final = 1.1  # allocator's gaps, and buffers that no formula has
CONTEXT_BYTES: Final = 2_000_000_000  # CUDA's context, kernels and NCCL's buffers, per GPU
PROCESS_BYTES: Final = 500_000_000  # on a CPU: interpreter and libraries of one process
SLEEPING_BYTES: Final = 2_000_000_000  # what an engine that sleeps leaves on its GPU
HEAD_ROWS, HEAD_CHUNK = 512, 128  # outrider.train.update.chunked_logprobs

MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes per parameter: float32, two moments of Adam, float32
VALUE_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of the settings decides the memory of a trainer rank."""

    ranks: int = 1
    max_tokens: int
    precision: str = "bfloat16"
    checkpointed: bool = False
    has_reference: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    trained_layers: int | None = None

    @property
    def value_bytes(self) -> int:
        """b."""
        return VALUE_BYTES[self.precision]

    @property
    def trains_all(self) -> bool:
        """Whether every weight of the model has a gradient."""
        return self.lora_rank is None and self.trained_layers is None

    def trained_parameters(self, shape: ModelShape) -> int:
        """Parameters with a gradient: all of the model, the adapters, or the last layers and the last norm.

        Raises ConfigError for adapters of a matrix that plan does not know, or more layers than there are.
        """
        if self.lora_rank is not None:
            return shape.adapter_parameters(self.lora_rank, self.lora_targets)
        if self.trained_layers is not None:
            if self.trained_layers > shape.num_layers:
                raise ConfigError(
                    f"model.trained_layers = {self.trained_layers}, but {shape.name} has "
                    f"{shape.num_layers} layers"
                )
            return self.trained_layers * shape.layer_parameters + shape.width
        return shape.num_parameters

    def layers_with_gradients(self, shape: ModelShape) -> int:
        """Layers whose activations the backward pass reads: with ``trained_layers`` only those."""
        return shape.num_layers if self.trained_layers is None else self.trained_layers


def rank_bytes(shape: ModelShape, training: Training) -> dict[str, float]:
    """What one trainer rank holds at its peak, in bytes by what it is for; the sum is its peak before
    :data:`MARGIN`.
    """
    share, b = shape.num_parameters / training.ranks, training.value_bytes
    trained = training.trained_parameters(shape) / training.ranks
    # adapters are parameters beside those of the model
    frozen = share if training.lora_rank is not None else share - trained
    alone = training.ranks == 1
    head_gradient = head_gradient_bytes(shape, b) if alone and training.trains_all else 0.0
    return {
        # one process has frozen weights in the working precision, ranks in float32 shards
        "frozen weights": (b if alone else MASTER) * frozen,
        "masters": MASTER * trained,
        "moments": MOMENTS * trained,
        "gradients": GRADIENT * trained,
        # in float32 masters and working copy are one memory
        "working copy": b * trained if alone and b < MASTER else 0.0,
        # one process copies its working copy; ranks hold theirs in float32 shards (outrider.scale.rank)
        "reference": (b if alone else MASTER) * share if training.has_reference else 0.0,
        "gathered layers": 0.0 if alone else gathered_bytes(shape, training),
        "activations kept": activation_bytes(shape, training),
        # the head's backward pass is over when that of the last layer begins
        "pass in work": max(
            layer_bytes(shape, training),
            head_bytes(shape, b) + head_gradient,
        ),
    }


def gathered_bytes(shape: ModelShape, training: Training) -> float:
    """FSDP2's gathers: the root's weights, two layers (one computed, one on its way), and the gradient of
    the larger of them in float32 before ranks sum it: ``b P_root + 2 b P_layer + 4 max(P_root, P_layer)``.
    A frozen root or layer has no gradient.
    """
    root, layer = shape.root_parameters, shape.layer_parameters
    if training.lora_rank is not None:
        gradient = training.trained_parameters(shape) // shape.num_layers
    else:
        gradient = max(root, layer) if training.trains_all else layer
    return training.value_bytes * (root + 2 * layer) + GRADIENT * gradient


def head_gradient_bytes(shape: ModelShape, value_bytes: int) -> float:
    """In one process: the gradient of the vocabulary projection in float32 and the part of one block, before
    both are added to what earlier micro-batches left: ``(4 + b) V d``.
    """
    return (GRADIENT + value_bytes) * shape.embedding_parameters


def activation_bytes(shape: ModelShape, training: Training) -> float:
    """Between forward and backward pass: checkpointed the inputs of all layers, ``b L d T``, else what their
    backward passes read. Layers below the first trained one keep nothing.
    """
    per_token = shape.width if training.checkpointed else activations_per_token(shape)
    return training.value_bytes * training.layers_with_gradients(shape) * per_token * training.max_tokens


def layer_bytes(shape: ModelShape, training: Training) -> float:
    """The layer at work, with its gradients: ``b (9 d + 4 f) T``."""
    return training.value_bytes * (9 * shape.width + 4 * shape.mlp_width) * training.max_tokens


def activations_per_token(shape: ModelShape) -> int:
    """Numbers that a layer keeps for its backward pass per token: inputs and outputs of its two norms (4 d),
    queries and what attention gives (2 H D), keys and values (2 K D), gate, up and their product (3 f).
    """
    return 4 * shape.width + 2 * shape.attention_width + 2 * shape.kv_width + 3 * shape.mlp_width


def head_bytes(shape: ModelShape, value_bytes: int) -> float:
    """Logits of a block of tokens in the working precision, and log-probs and probabilities of a chunk of
    it in float32: ``(512 b + 128 * 8) V`` (:mod:`outrider.train.update.chunked_logprobs`).
    """
    return (HEAD_ROWS * value_bytes + 2 * 4 * HEAD_CHUNK) * shape.vocabulary


def weight_bytes(shape: ModelShape, *, tensor_parallel: int, value_bytes: int = 2) -> float:
    """Weights on one GPU of an engine: ``b P / tp``."""
    return value_bytes * shape.num_parameters / tensor_parallel


def token_bytes(shape: ModelShape, *, tensor_parallel: int, value_bytes: int = 2) -> float:
    """Keys and values of one token on one GPU of an engine: ``2 b L K D / tp``; with more GPUs than
    key-value heads each GPU still has one head.
    """
    heads = max(1.0, shape.num_kv_heads / tensor_parallel)
    return 2 * value_bytes * shape.num_layers * heads * shape.head_size


def with_margin(num_bytes: float) -> float:
    """What a GPU needs for ``num_bytes`` of tensors."""
    return MARGIN * num_bytes + CONTEXT_BYTES
