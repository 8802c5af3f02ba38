"""The policy in training: master weights, optimizer step, scoring of packed tokens, files and export.

Small RL updates vanish in bfloat16, so gradients are accumulated and applied in float32; the working copy
(which the local engine shares) is rounded from the masters after every step. The masters of a bfloat16 model
start at random places of their rounding intervals (:func:`outrider.training.rounding.dither`), because the
working copy would not follow them for many steps otherwise.

Shape letters: N packed tokens, U scored tokens, T entries of :class:`~outrider.training.packing.PackedBatch`,
V vocabulary.
"""

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Final, Literal, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from outrider.algorithms.distill_losses import divergence_per_token
from outrider.engines.local.attention import (
    LEAST_HEAD_SIZE,
    FlexPlan,
    Plan,
    Segment,
    TreePlan,
    hidden_states,
)
from outrider.engines.local.cpu_kernels import (
    gradient_of_rows,
    gradient_of_weight,
    linear,
    linear_into,
)
from outrider.engines.local.model import LanguageModel, read_weights
from outrider.engines.local.unpacked import (
    EAGER,
    Unpacked,
    batch_sequences,
    compute_batch,
    compute_hidden,
    compute_logits,
    sequence_logits,
    split_into_sequences,
)
from outrider.errors import CheckpointError, ModelError
from outrider.files import follow_umask
from outrider.training.adapters import broken_ties, choose_trained, merge_adapters, require_bitsandbytes
from outrider.training.packing import PackedBatch, RolloutPath, pack
from outrider.training.rounding import dither
from outrider.training.settings import LoraSettings, OptimizerSettings

# Log-probs of given tokens and entropies from hidden states, in blocks: no tensor of all logits in memory.
#
# In float32 or better the probabilities of the first block are saved: the backward pass writes the gradient
# of the logits into their memory, which it would need anyway. Those of other blocks are computed again.
# Blocks are large because the product packs all of the vocabulary's weights at every call; the softmax runs
# on a few rows at a time, which stay in the processor's cache. Shape letters: T scored tokens, B tokens of a
# block, C tokens of a chunk, E hidden size, V vocabulary.


_BLOCK = 512  # rows of one product: 100 MB of float32 logits at 49,152 entries
_CHUNK = 128  # rows of a softmax on a GPU, and of heads that are no plain linear layer
_CPU_CHUNK = 16  # 3 MB of float32 logits: they stay in the last-level cache between the steps of a softmax


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullTeacher:
    """Whole next-token distributions of a teacher, as its hidden states and its vocabulary projection, from
    which they are computed a chunk at a time; ``alpha`` is that of the divergence.
    """

    hidden_TE: Tensor
    head: nn.Module
    alpha: float


Support = int | Tensor | FullTeacher | Literal["all"]
"""Tokens besides the sampled ones that a pass scores, for self-distillation.

A number K: the K most likely tokens of each place, without gradient; a result has their log-probs and ids
[T, K]. Ids [T, K]: their log-probs [T, K] with gradient. A teacher's distributions: the divergences [T] from
them, with gradient. ``all``: the hidden states, of which a :class:`FullTeacher` is made.
"""


def score_tokens(
    hidden_TE: Tensor,
    targets_T: Tensor,
    head: nn.Module,
    *,
    trains_entropy: bool = False,
    support: Support | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs of ``targets_T`` with gradient, and entropies in nats over the whole vocabulary, which have
    one only if ``trains_entropy``; then the results for ``support``, if any.
    """
    if support == "all":
        return *score_tokens(hidden_TE, targets_T, head, trains_entropy=trains_entropy), hidden_TE
    if isinstance(support, FullTeacher):
        pieces = [
            checkpoint(_divergences, *parts, head, support, use_reentrant=False)
            for parts in zip(hidden_TE.split(_CHUNK), support.hidden_TE.split(_CHUNK), strict=True)
        ]
        own = score_tokens(hidden_TE, targets_T, head, trains_entropy=trains_entropy)
        return *own, torch.cat(pieces)
    # Not isinstance: a subclass may compute more than the product with its weight.
    if type(head) is nn.Linear:
        result: tuple[Tensor, ...] = _ScoreTokens.apply(  # type: ignore[no-untyped-call]
            hidden_TE, targets_T, head.weight, head.bias, torch.is_grad_enabled(), support
        )
        return result if trains_entropy else (result[0], result[1].detach(), *result[2:])
    scores = [
        # a head with an adapter or a cap of its own
        checkpoint(_scores, hidden_CE, targets_C, head, trains_entropy, support_C, use_reentrant=False)
        for hidden_CE, targets_C, support_C in zip(
            hidden_TE.split(_CHUNK),
            targets_T.split(_CHUNK),
            _split_support(support, _CHUNK, len(targets_T)),
            strict=True,
        )
    ]
    return tuple(torch.cat(parts) for parts in zip(*scores, strict=True))


def _split_support(support: int | Tensor | None, size: int, num: int) -> Sequence[int | Tensor | None]:
    return list(support.split(size)) if isinstance(support, Tensor) else [support] * -(-num // size)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _scores(
    hidden_CE: Tensor,
    targets_C: Tensor,
    head: nn.Module,
    trains_entropy: bool,
    support: int | Tensor | None,
) -> tuple[Tensor, ...]:
    return score_logits(head(hidden_CE), targets_C, trains_entropy=trains_entropy, support=support)


def _divergences(hidden_CE: Tensor, teacher_CE: Tensor, head: nn.Module, teacher: FullTeacher) -> Tensor:
    with torch.no_grad():
        teacher_CV = torch.log_softmax(_exact(teacher.head(teacher_CE)), dim=-1)
    own_CV = torch.log_softmax(_exact(head(hidden_CE)), dim=-1)
    return divergence_per_token(own_CV, teacher_CV, alpha=teacher.alpha, tail=False)


def score_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    *,
    trains_entropy: bool = False,
    support: int | Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Like :func:`score_tokens` for given logits."""
    logprobs_CV = torch.log_softmax(_exact(logits_CV), dim=-1)
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropies_C = _entropies(logprobs_CV.exp(), logprobs_CV)
    return _chosen(logprobs_CV, targets_C), entropies_C, *_of_support(logprobs_CV, support)


def _of_support(logprobs_CV: Tensor, support: int | Tensor | None) -> tuple[Tensor, ...]:
    if support is None:
        return ()
    if isinstance(support, int):
        return tuple(logprobs_CV.detach().topk(min(support, logprobs_CV.shape[1])))
    return (logprobs_CV.gather(1, support),)


def _chosen(logprobs_CV: Tensor, targets_C: Tensor) -> Tensor:
    return logprobs_CV.gather(1, targets_C[:, None])[:, 0]


def _entropies(probs_CV: Tensor, logprobs_CV: Tensor) -> Tensor:
    return -(probs_CV * logprobs_CV).sum(dim=-1)


def _chunk(tensor: Tensor) -> int:
    return _CPU_CHUNK if tensor.device.type == "cpu" else _CHUNK


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        targets_T: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        is_trained: bool,
        support: int | Tensor | None,
    ) -> tuple[Tensor, ...]:
        # bfloat16 logits have no room for probabilities: they would be rounded before the backward pass.
        saves_block = is_trained and _exact(hidden_TE[:0]).dtype == hidden_TE.dtype
        saved_BV: Tensor | None = None
        size, pieces = _chunk(hidden_TE), []
        chunks = iter(zip(targets_T.split(size), _split_support(support, size, len(targets_T)), strict=True))
        for hidden_BE in hidden_TE.split(_BLOCK):
            logits_BV = linear(hidden_BE, weight_VE, bias_V)
            for logits_CV in logits_BV.split(size):
                targets_C, support_C = next(chunks)  # blocks are whole numbers of chunks
                logprobs_CV = torch.log_softmax(_exact(logits_CV), dim=-1)
                # The logits are not needed after their log-probs.
                probs_CV = torch.exp(logprobs_CV, out=logits_CV) if saves_block else logprobs_CV.exp()
                own = _chosen(logprobs_CV, targets_C), _entropies(probs_CV, logprobs_CV)
                pieces.append((*own, *_of_support(logprobs_CV, support_C)))
            if saves_block:
                saved_BV, saves_block = logits_BV, False
        logprobs_T, entropies_T, *supported = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ids_TK = support if isinstance(support, Tensor) else None
        ctx.save_for_backward(hidden_TE, targets_T, weight_VE, bias_V, saved_BV, entropies_T, ids_TK)
        ctx.set_materialize_grads(False)  # None if a loss has no entropy in it
        if ids_TK is None:
            ctx.mark_non_differentiable(*supported)
        return logprobs_T, entropies_T, *supported

    @staticmethod
    def backward(
        ctx: Any, grad_T: Tensor | None, grad_entropies_T: Tensor | None, *grad_supported: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """d logits = (onehot - p) * d logprob - p (log p + entropy) * d entropy, and for a support scatter(d)
        - p sum(d), in the memory of the probabilities; the weight's gradient is summed in float32 over the
        blocks.
        """
        hidden_TE, targets_T, weight_VE, bias_V, saved_BV, entropies_T, ids_TK = ctx.saved_tensors
        grad_TK = grad_supported[0] if ids_TK is not None else None
        if grad_T is None:
            grad_T = torch.zeros_like(entropies_T)
        grad_hidden = torch.empty_like(hidden_TE) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, len(targets_T), _BLOCK):
            block = slice(start, start + _BLOCK)
            is_known = saved_BV is not None and start == 0
            memory_BV = (
                saved_BV
                if is_known
                else _project_to_vocabulary(hidden_TE[block], weight_VE, bias_V, saved_BV)
            )
            grad_logits = _grad_logits(
                memory_BV,
                targets_T[block],
                grad_T[block],
                is_known,
                None if grad_entropies_T is None else (entropies_T[block], grad_entropies_T[block]),
                None if grad_TK is None else (ids_TK[block], grad_TK[block]),
            )
            if grad_hidden is not None:
                grad_hidden[block] = gradient_of_rows(grad_logits, weight_VE)
            if ctx.needs_input_grad[2]:
                part = gradient_of_weight(grad_logits, hidden_TE[block], weight_VE)
                grad_weight = part if grad_weight is None else grad_weight.to(_exact(part).dtype).add_(part)
            if bias_V is not None and ctx.needs_input_grad[3]:
                total = _exact(grad_logits).sum(dim=0)
                grad_bias = total if grad_bias is None else grad_bias + total
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VE.dtype)
        grad_bias = None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, None, grad_weight, grad_bias, None, None


def _project_to_vocabulary(
    hidden_BE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, memory_BV: Tensor | None
) -> Tensor:
    """Compute logits, in the memory of an earlier block if there is one."""
    if memory_BV is None:
        return linear(hidden_BE, weight_VE, bias_V)
    return linear_into(memory_BV[: len(hidden_BE)], hidden_BE, weight_VE, bias_V)


def _grad_logits(
    memory_BV: Tensor,
    targets_B: Tensor,
    grad_B: Tensor,
    is_known: bool,
    entropy: tuple[Tensor, Tensor] | None,
    support: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Replace the probabilities, or if they are not known the logits, by the gradient of the logits.
    ``entropy`` and ``support``: the entropies, and the ids [B, K], with their gradients, if the loss depends
    on them.
    """
    size = _chunk(memory_BV)
    chunks = (tensor.split(size) for tensor in (memory_BV, targets_B, grad_B))
    for start, (memory_CV, targets_C, grad_C) in zip(
        range(0, len(memory_BV), size), zip(*chunks, strict=True), strict=True
    ):
        probs_CV = memory_CV if is_known else torch.softmax(_exact(memory_CV), dim=-1)
        scale_C = grad_C.to(probs_CV.dtype)
        slope_CV: Tensor | None = None
        if entropy is not None:
            entropies_C, grad_entropies_C = (part[start : start + size].to(probs_CV) for part in entropy)
            slope_CV = torch.xlogy(probs_CV, probs_CV).addcmul_(probs_CV, entropies_C[:, None])
            slope_CV.mul_(grad_entropies_C[:, None])
        total_C = scale_C
        if support is not None:
            ids_CK, grad_CK = (part[start : start + size] for part in support)
            grad_CK = grad_CK.to(probs_CV.dtype)
            total_C = scale_C + grad_CK.sum(dim=-1)
        probs_CV.mul_(-total_C[:, None])
        if slope_CV is not None:
            probs_CV.sub_(slope_CV)
        if support is not None:
            probs_CV.scatter_add_(1, ids_CK, grad_CK)
        # By index and not by a one-hot matrix, which would be as large as the logits.
        probs_CV[torch.arange(len(probs_CV), device=probs_CV.device), targets_C] += scale_C
        if not is_known:
            memory_CV.copy_(probs_CV)
    return memory_BV


# Backbone and vocabulary projection are one forward pass, because FSDP gathers the root's weights only there.


class Scoring(nn.Module):
    """Log-probs and entropies of chosen tokens of one packed row; logits exist for a block of them at a
    time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        plan: Plan,
        predictors_U: Tensor,
        targets_U: Tensor,
        trains_entropy: bool = False,
        support: Support | None = None,
    ) -> tuple[Tensor, ...]:
        """[U] log-probs of ``targets_U`` with gradient and [U] entropies in nats, which have one only if
        ``trains_entropy``, and the results for ``support``. ``predictors_U`` index the packed position whose
        output predicts each token.
        """
        states = hidden_states(self.model, ids_N[None], positions_N[None], plan)
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        hidden_UE = states[0, predictors_U]
        return score_tokens(hidden_UE, targets_U, head, trains_entropy=trains_entropy, support=support)


class UnpackedScoring(nn.Module):
    """Like :class:`Scoring` for a model of the unpacked path: the sequences of the row run in batches of
    similar lengths. A shared token is scored in one of them, so that the gradients of its rollouts add up as
    in a packed row.
    """

    def __init__(self, model: PreTrainedModel, unpacked: Unpacked) -> None:
        super().__init__()
        self.model = model
        self.unpacked = unpacked

    def forward(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        plan: TreePlan,
        predictors_U: Tensor,
        targets_U: Tensor,
        trains_entropy: bool = False,
        support: Support | None = None,
    ) -> tuple[Tensor, ...]:
        """Score tokens as :class:`Scoring` does; ``positions_N`` start at 0 in every sequence."""
        order: list[int] = []
        outputs: list[Tensor] = []
        compute = compute_hidden if self.unpacked.has_plain_head else compute_logits
        sequences = split_into_sequences(plan, predictors_U.tolist(), self.unpacked)
        for batch in batch_sequences(sequences, self.unpacked):
            ids = [ids_N[list(sequence.tokens)] for sequence in batch]
            indices = [sequence.indices for sequence in batch]
            outputs.append(compute_batch(compute, self.model, ids, indices))
            order += [number for sequence in batch for number in sequence.scored]
        targets = targets_U[order]
        if isinstance(support, Tensor):
            support = support[order]
        elif isinstance(support, FullTeacher):
            support = replace(support, hidden_TE=support.hidden_TE[order])
        back = torch.tensor(order, device=ids_N.device).argsort()
        if self.unpacked.has_plain_head:
            head = self.model.get_output_embeddings()
            assert isinstance(head, nn.Module)
            scores = score_tokens(
                torch.cat(outputs), targets, head, trains_entropy=trains_entropy, support=support
            )
            return tuple(values[back] for values in scores)
        if support == "all" or isinstance(support, FullTeacher):
            raise ModelError(
                "this model changes its logits after the vocabulary projection: set distill.support to a "
                "number of tokens, for example 100"
            )
        sizes = [len(sequence) for sequence in outputs]
        supports = support.split(sizes) if isinstance(support, Tensor) else [support] * len(sizes)
        pieces = [
            score_logits(logits, own, trains_entropy=trains_entropy, support=part)
            for logits, own, part in zip(outputs, targets.split(sizes), supports, strict=True)
        ]
        return tuple(torch.cat(parts)[back] for parts in zip(*pieces, strict=True))


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """Sum of squares of all entries in float64, which ranks can add; NaN if an entry is not finite.

    In float32 the norm of an embedding is off by 1e-5, and by another amount if the gradient is sharded;
    clipping would carry that into the weights.
    """
    norms = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]
    return math.fsum(norm * norm for norm in norms) if all(map(math.isfinite, norms)) else math.nan


@torch.no_grad()
def clip(gradients: Iterable[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm, ``norm``, becomes at most ``max_norm``."""
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0:  # false for a norm of NaN, whose step is skipped
        for gradient in gradients:
            gradient.mul_(scale)


# The processes (ranks) that compute one update together; here there is one.
#
# Every rank has all rollouts of a step and computes some of them. All ranks must make the same decisions,
# because a rank that continues alone waits for the others forever. Decisions therefore use the values of
# :meth:`Ranks.gather`.


ValueT = TypeVar("ValueT")


class Ranks(Protocol):
    """``rank`` of ``size``; rank 0 counts the values that all ranks know."""

    rank: int
    size: int

    def gather(self, value: ValueT) -> list[ValueT]:
        """The value of every rank, in the order of the ranks: the same list on all of them."""

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        """The part of ``paths`` that this rank computes; ``paths`` are the same on all ranks, and each is
        computed once.
        """


class SingleRank:
    """One process, which computes everything."""

    rank = 0
    size = 1

    def gather(self, value: ValueT) -> list[ValueT]:
        return [value]

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        return list(paths)


def pack_for_rank(
    paths: Sequence[RolloutPath], ranks: Ranks, *, max_tokens: int, whole_rollouts: bool = False
) -> list[PackedBatch]:
    """Return the micro-batches of this rank's rollouts. With several ranks the largest come first, so
    that ranks compute batches of similar size at the same time.
    """
    batches = list(pack(paths, max_tokens=max_tokens, whole_rollouts=whole_rollouts))
    return batches if ranks.size == 1 else sorted(batches, key=lambda batch: -batch.num_tokens)


def padded_micro_batches(batches: Sequence[PackedBatch], ranks: Ranks) -> Iterator[PackedBatch | None]:
    """Yield the micro-batches, and None as often as another rank has more, because a forward pass needs every
    rank.

    For None a rank calls :meth:`outrider.training.policy.Scorer.dummy_forward`.
    """
    max_batches = max(ranks.gather(len(batches)))  # before the first batch, while the ranks are in step
    yield from batches
    yield from [None] * (max_batches - len(batches))


# Weights and optimizer state on disk, as safetensors whose tensor names do not depend on the number of ranks.
#
# One process writes ``masters.safetensors`` and ``optimizer.safetensors``; several write shards into
# ``weights/``. Master weights have the parameters' names, moments ``exp_avg/NAME`` and so on. Any number of
# processes can read both forms.


SHARDS: Final = "weights"
MASTERS: Final = "masters.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
TEACHER: Final = "teacher.safetensors"  # of self-distillation, if it is a moving average


def tensor_files(folder: Path) -> list[str]:
    """Files of weights that a checkpoint has to have, relative to it."""
    if (folder / SHARDS).is_dir():
        return sorted(f"{SHARDS}/{path.name}" for path in (folder / SHARDS).glob("*.safetensors"))
    return [MASTERS, OPTIMIZER]


def tensor_folder(folder: Path) -> Path:
    """Return the folder with the weight files of a checkpoint, sharded or not."""
    return folder / SHARDS if (folder / SHARDS).is_dir() else folder


def read_tensors(folder: Path, *, with_optimizer: bool) -> dict[str, Tensor]:
    """All of them in memory, by name. Raises OSError, SafetensorError and ValueError for what is damaged."""
    if not (folder / SHARDS).is_dir():
        names = (MASTERS, OPTIMIZER) if with_optimizer else (MASTERS,)
        return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    return _read_shards(folder / SHARDS, with_optimizer=with_optimizer)


def _read_shards(folder: Path, *, with_optimizer: bool) -> dict[str, Tensor]:
    """The whole tensors from the shards of all ranks."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in known.items()
        if isinstance(metadata, TensorStorageMetadata) and (with_optimizer or "/" not in name)
    }
    with warnings.catch_warnings():  # torch warns of no_dist itself
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def require_shapes(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError where the masters on disk (``stored``) are not those of the model."""
    if dict(stored) != dict(shapes):
        raise CheckpointError(
            f"checkpoint {folder} belongs to another model or adapter: set model.name, model.lora and "
            "model.trained_layers as they were"
        )


# Whether the folder that was exported computes what the policy computes.


_NUM_TOKENS: Final = 12
_STARTS: Final = (1, 101, 1009)  # first ids of the sequences that are tried
_LIMITS: Final = {torch.bfloat16: 0.2, torch.float32: 0.001}
"""Limit relative to the effect of a context on the logits. Merged weights are rounded once more than separate
adapters, and attention is computed by another implementation.
"""


@torch.no_grad()
def require_same_logits(language_model: LanguageModel, folder: Path) -> None:
    """Load the folder with transformers and compare. Raises ModelError if a weight is missing or has
    another name or shape, or if the logits of a few sequences all differ by more than rounding. One equal
    sequence is enough: in another one a router may choose another expert because of rounding.
    """
    model = language_model.model
    loaded, _ = read_weights(str(folder), "as exported", dtype=model.dtype, attention=EAGER)
    loaded.eval()
    differences = []
    vocabulary_size, half = int(model.config.get_text_config().vocab_size), _NUM_TOKENS // 2
    for start in _STARTS:
        ids = torch.arange(start, start + _NUM_TOKENS) % vocabulary_size
        ours, theirs = _logits(language_model, ids), sequence_logits(loaded, ids).float()
        # the effect of the first half on the predictions of the second
        context = (theirs[half:] - sequence_logits(loaded, ids[half:]).float()).norm()
        difference = (ours - theirs).norm()
        if bool(difference <= _LIMITS.get(model.dtype, 0.2) * context):
            return
        differences.append(float((ours - theirs).abs().max()))
    raise ModelError(
        "the exported model does not compute what the policy computes: the logits of a few tokens differ by "
        f"up to {min(differences):.3g}; nothing was written. Please report this with the model's "
        "architecture and model.lora"
    )


def _logits(language_model: LanguageModel, ids_N: Tensor) -> Tensor:
    """Logits [N, V] of the policy as computed in training."""
    device = language_model.device
    if language_model.unpacked is not None:
        return sequence_logits(language_model.model, ids_N.to(device)).float().cpu()
    every = torch.arange(len(ids_N), device=device)
    plan = TreePlan(segments=(Segment(length=len(ids_N)),))
    options: dict[str, Any] = {"position_ids": every[None], "use_cache": False, "plan": plan}
    run: Any = language_model.model
    logits: Tensor = run(input_ids=ids_N[None].to(device), **options).logits
    return logits[0].float().cpu()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """``logprobs_T`` carry gradient; ``entropies_T`` (nats, whole vocabulary) only if the loss has an entropy
    bonus. ``observed_M`` are the log-probs of the batch's observation tokens, if it has any. The others are
    results of a :data:`Support`: log-probs and ids of its tokens, divergences, and hidden states.
    """

    logprobs_T: Tensor
    entropies_T: Tensor
    observed_M: Tensor | None = None
    support_TK: Tensor | None = None
    support_ids_TK: Tensor | None = None
    divergence_T: Tensor | None = None
    hidden_TE: Tensor | None = None

    def select(self, index: Tensor) -> "TokenScores":
        """Return the scores of the tokens ``index``, without those of observations."""
        columns: dict[str, Any] = {}
        for each in fields(self):
            values = getattr(self, each.name)
            columns[each.name] = None if values is None or each.name == "observed_M" else values[index]
        return TokenScores(**columns)


def _result_names(support: Support | None) -> tuple[str, ...]:
    if support is None:
        return ()
    if isinstance(support, int):
        return "support_TK", "support_ids_TK"
    if isinstance(support, Tensor):
        return ("support_TK",)
    return ("divergence_T",) if isinstance(support, FullTeacher) else ("hidden_TE",)


class Scorer:
    """A language model that scores packed tokens, for example the frozen reference of the KL term.
    ``uses_flex``: a micro-batch is one call of flex attention (:mod:`outrider.engines.local.attention`).
    """

    def __init__(
        self, language_model: LanguageModel, *, ranks: Ranks | None = None, uses_flex: bool = False
    ) -> None:
        self.language_model = language_model
        self.uses_flex = uses_flex and language_model.unpacked is None and _has_flex_kernel(language_model)
        self.model = language_model.model
        self.ranks: Ranks = ranks or SingleRank()
        unpacked, model = language_model.unpacked, language_model.model
        self.scoring: nn.Module = Scoring(model) if unpacked is None else UnpackedScoring(model, unpacked)

    def score(
        self, batch: PackedBatch, *, trains_entropy: bool = False, support: Support | None = None
    ) -> TokenScores:
        """Log-probs and entropies of the scored tokens, and the results for ``support``, whose rows are those
        of the entries; logits exist only for those tokens, a chunk at a time.
        """
        device = self.language_model.device
        ids_N, positions_N = batch.ids_N.to(device), batch.positions_N.to(device)
        predictors_U, targets_U = batch.predictors_U.to(device), batch.targets_U.to(device)
        plan = FlexPlan.from_plan(batch.plan, device=device) if self.uses_flex else batch.plan
        options = () if support is None else (support,)
        entries = batch.token_T.to(device)
        if isinstance(support, (Tensor, FullTeacher)):
            # Rollouts that share a token may have different teachers, so each scores it for itself.
            predictors_U, targets_U = predictors_U[entries], targets_U[entries]
        logprobs_U, entropies_U, *others = self.scoring(
            ids_N, positions_N, plan, predictors_U, targets_U, trains_entropy, *options
        )
        results = dict(zip(_result_names(support), others, strict=True))
        scores = TokenScores(logprobs_T=logprobs_U, entropies_T=entropies_U, **results)
        observed = batch.observed_M.to(device)
        if len(entries) == len(logprobs_U) and not len(observed):  # nothing is shared
            return scores
        # Gathered after scoring: a shared token is computed once, and the gradients of its rollouts add up.
        scores = scores.select(entries)
        return replace(scores, observed_M=logprobs_U[observed]) if len(observed) else scores

    def num_computed_tokens(self, batch: PackedBatch) -> int:
        """Tokens that :meth:`score` computes; on the unpacked path a shared token counts once per
        sequence.
        """
        unpacked = self.language_model.unpacked
        if unpacked is None:
            return batch.num_tokens
        return sum(
            len(sequence.tokens)
            for sequence in split_into_sequences(batch.plan, batch.predictors_U.tolist(), unpacked)
        )

    def frozen_head(self) -> nn.Module:
        """Return a copy of the vocabulary projection that never trains."""
        head = copy.deepcopy(self.model.get_output_embeddings())
        assert isinstance(head, nn.Module)
        return head.requires_grad_(False)

    def dummy_forward(self) -> Tensor:
        """A pass over two tokens for the sake of other ranks; its loss of 0 has a gradient of zeros."""
        device = self.language_model.device
        ids_N, index_U = torch.zeros(2, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long)
        plan = TreePlan(segments=(Segment(length=2),))
        positions_N = torch.arange(2, device=device)
        logprobs_U, _ = self.scoring(ids_N, positions_N, plan, index_U.to(device), index_U.to(device))
        loss: Tensor = 0.0 * logprobs_U.sum()
        return loss


def make_optimizer(masters: Iterable[Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return AdamW over the master weights, with moments as in ``settings.states``. Raises ModelError if
    bitsandbytes is not installed.
    """
    betas = settings.beta1, settings.beta2
    options: dict[str, Any] = {"betas": betas, "weight_decay": settings.weight_decay}
    if settings.states != "8bit":
        return torch.optim.AdamW(list(masters), lr=settings.learning_rate, fused=True, **options)
    optimizer: torch.optim.Optimizer = require_bitsandbytes("optimizer.states = 8bit").optim.AdamW8bit(
        list(masters), lr=settings.learning_rate, **options
    )
    return optimizer


def _has_flex_kernel(language_model: LanguageModel) -> bool:
    config = language_model.model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return bool(size >= LEAST_HEAD_SIZE)


class Policy(Scorer):
    """A language model with its optimizer. ``checkpoint_activations``: layers are computed again in the
    backward pass.

    ``trained_layers``: only this number of last layers and the norm after them train; the backward pass ends
    there. Raises ModelError if the model has fewer layers.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        settings: OptimizerSettings,
        *,
        lora: LoraSettings | None = None,
        trained_layers: int | None = None,
        seed: int = 0,
        checkpoint_activations: bool = False,
        uses_flex: bool = False,
    ) -> None:
        super().__init__(language_model, uses_flex=uses_flex)
        self.settings = settings
        if lora is not None or trained_layers is not None:
            choose_trained(self.model, lora=lora, trained_layers=trained_layers, seed=seed)
        if checkpoint_activations:
            checkpoint_layers(self.model)
        # Tied embeddings have one name here, hence one master and one optimizer state.
        self.working: dict[str, nn.Parameter] = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        # In float32 or better: the parameter's own memory if it is that precise, else a copy.
        is_offloaded = settings.states == "cpu"
        self.masters: dict[str, Tensor] = {
            name: p.detach().to(
                device="cpu" if is_offloaded else p.device,
                dtype=torch.promote_types(p.dtype, torch.float32),
                copy=is_offloaded,
            )
            for name, p in self.working.items()
        }
        self._hooks = []
        for name, parameter in self.working.items():
            if parameter.dtype == torch.bfloat16:
                dither(self.masters[name], name, seed=seed)
            # In the backward pass: micro-batches add up in float32, one working gradient alive at a time.
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._collect(name)))
        self.num_steps = 0
        self.optimizer = make_optimizer(self.masters.values(), settings)

    def _collect(self, name: str) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            master, gradient = self.masters[name], parameter.grad
            assert gradient is not None
            gradient = gradient.to(master.device)  # before the cast, which would double what is transferred
            master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

        return move

    def freeze(self) -> LanguageModel:
        """Return the model, which does not train any more and does not keep the memory of this object."""
        for hook in self._hooks:
            hook.remove()
        self.model.requires_grad_(False)
        return self.language_model

    @property
    def learning_rate(self) -> float:
        """The settings' rate at step ``num_steps``; 0 before the first step of a warm-up."""
        warm = min(1.0, self.num_steps / self.settings.warmup_steps) if self.settings.warmup_steps else 1.0
        return self.settings.learning_rate * warm

    def step(self, *, learning_rate: float | None = None) -> float:
        """Clip, apply, round into the working copy; return the gradient norm before clipping.

        A gradient of zero makes no step, because the moments alone would move the weights. A norm that is not
        finite skips the step (the caller counts it), because one bad batch must not destroy the weights. A
        skipped step does not advance the warm-up.
        """
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = self._norm(gradients)
        clip(gradients, norm=norm, max_norm=self.settings.max_grad_norm)
        is_applied = math.isfinite(norm) and norm != 0.0
        if is_applied:
            self.num_steps += 1
        # Every time, because the rate of a warm-up depends on num_steps.
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate if learning_rate is None else learning_rate
        if is_applied:
            self.optimizer.step()
            self.round_masters()
        self.drop_gradients()
        return norm

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        return math.sqrt(sum_of_squares(gradients))

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copy the master weights into the working copy."""
        for name, parameter in self.working.items():
            if parameter.data_ptr() != self.masters[name].data_ptr():  # else they are one memory
                parameter.copy_(self.masters[name])

    def export(self, folder: Path) -> None:
        """Write the model, its tokenizer and its configuration into ``folder``."""
        export(self.language_model, folder)

    def save(self, folder: Path) -> None:
        """Write masters and moments into an existing folder. Raises OSError and SafetensorError."""
        # safetensors takes no views with strides.
        save_file({name: tensor.contiguous() for name, tensor in self.masters.items()}, folder / MASTERS)
        moments = {
            # bitsandbytes shares its code books between weights, and safetensors stores no shared memory.
            f"{key}/{name}": value.clone() if key.startswith("qmap") else torch.as_tensor(value).contiguous()
            for name, master in self.masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
        }
        save_file(moments, folder / OPTIMIZER)

    @torch.no_grad()
    def load(self, folder: Path, *, num_steps: int) -> None:
        """Load masters, working copy and moments of a checkpoint. Raises CheckpointError for one of
        another model, and OSError, ValueError or SafetensorError for a damaged one.
        """
        tensors = read_tensors(folder, with_optimizer=True)
        masters = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        require_shapes(folder, _shapes(self.masters), _shapes(masters))
        self.optimizer.state.clear()
        for name, master in self.masters.items():
            # In place, because the optimizer refers to these tensors.
            master.copy_(masters[name])
            moments = {
                # bitsandbytes counts steps in a plain int
                key.split("/", 1)[0]: int(value) if value.dtype == torch.int64 else value.to(master.device)
                for key, value in tensors.items()
                if "/" in key and key.split("/", 1)[1] == name
            }
            if moments:
                self.optimizer.state[master] = moments
        self.num_steps = num_steps
        # Checkpoints do not contain the working copy, which follows from the masters.
        self.round_masters()

    def fresh_optimizer(self) -> None:
        """Reset the moments: those of the cold start do not belong to reinforcement learning."""
        self.optimizer.state.clear()
        self.num_steps = 0

    def frozen_copy(self) -> Scorer:
        """Return a copy of the current policy that never trains."""
        model = copy.deepcopy(self.model).requires_grad_(False)
        return Scorer(replace(self.language_model, model=model), uses_flex=self.uses_flex)


class AveragedTeacher(Scorer):
    """A moving average of the policy's weights, a teacher of self-distillation. Like the policy's masters,
    ``averages`` are float32 or better, because small changes vanish in bfloat16.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.frozen_copy().language_model, uses_flex=policy.uses_flex)
        self.averages = {name: master.detach().clone() for name, master in policy.masters.items()}

    @torch.no_grad()
    def follow(self, policy: Policy, *, rate: float) -> None:
        """Move every average towards the policy: ``average += rate (policy - average)``."""
        for name, average in self.averages.items():
            average.lerp_(policy.masters[name], rate)
        self._round()

    def save(self, folder: Path) -> None:
        """Write the averages into an existing folder. Raises OSError and SafetensorError."""
        save_teacher(self.averages, folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load what :meth:`save` wrote. Raises CheckpointError for another model, and OSError or
        SafetensorError.
        """
        tensors = load_file(folder / TEACHER)
        require_shapes(folder, _shapes(self.averages), _shapes(tensors))
        for name, average in self.averages.items():
            average.copy_(tensors[name])
        self._round()

    def _round(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, average in self.averages.items():
            parameters[name].copy_(average)


def save_teacher(averages: Mapping[str, Tensor], folder: Path) -> None:
    """Write the averaged weights of a teacher, which any number of processes can read."""
    save_file({name: tensor.contiguous() for name, tensor in averages.items()}, folder / TEACHER)


def checkpoint_layers(model: nn.Module) -> None:
    """Make the layers save only their inputs and compute again in the backward pass."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = MethodType(_checkpointed, module)


def _checkpointed(self: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Forward of a checkpointed layer. transformers' own switch needs training mode, which would turn on
    dropout.
    """
    # The class's method: the instance's own `forward` is this function.
    forward = partial(type(self).forward, self)
    return (
        # Reentrant checkpointing has no gradient if only weights inside, and not the inputs, require one.
        checkpoint(forward, *arguments, use_reentrant=False, **options)
        if torch.is_grad_enabled()
        else forward(*arguments, **options)
    )


def export(language_model: LanguageModel, folder: Path, *, check: bool = True) -> None:
    """Write model and tokenizer as a Hugging Face folder, adapters merged; the model itself does not change.

    If ``check``, load the folder again and compare its logits with the policy's. If an adapter separates the
    vocabulary projection from a tied embedding, the folder contains both. Raises ModelError if an adapter was
    not merged, or if the folder's logits differ from the policy's.
    """
    model = language_model.model
    model.save_pretrained(folder, state_dict=merge_adapters(model))
    if broken_ties(model):
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        config.save_pretrained(folder)
    language_model.tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        follow_umask(file)
    if check:
        require_same_logits(language_model, folder)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def set_threads(num_threads: int, *, device: str = "cpu") -> None:
    """Set torch's thread count and its deterministic mode.

    The same bits are promised on CPU only; on a GPU an operation without a deterministic form warns. Call
    this before the first product on a GPU: cuBLAS then reads how much memory its products may use, and a
    fixed amount fixes their order of sums.
    """
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # cuDNN prepares a program for every pair of lengths, and rollouts have new ones at every turn
        torch.backends.cuda.enable_cudnn_sdp(False)
        index = torch.device(device).index
        if device.startswith("cuda") and index is not None and torch.cuda.is_available():
            # streams and graphs are made on the current device, whatever device the weights are on
            torch.cuda.set_device(index)
    # oneDNN and torch each keep 1,024 programs of 0.3 MB, one per product and number of rows; few numbers of
    # rows are used twice in training
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "128")
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    # a debugging aid that writes every new tensor twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
