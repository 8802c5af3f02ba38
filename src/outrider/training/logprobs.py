"""Backbone and vocabulary projection in one forward: what shards weights gathers the root's only there.

Shape letters: N packed tokens, U scored tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from outrider.engines.local.attention import Plan, TreePlan
from outrider.engines.local.unpacked import Unpacked, compute_hidden, compute_logits, split_into_sequences

# Log-probs of given tokens and entropies from hidden states, in blocks: no tensor of all logits in memory.
#
# In float32 or better the probabilities of the first block are kept: the backward pass writes the gradient of
# the logits into their memory, which it would need anyway. Those of other blocks are computed again. Blocks
# are large because the product packs all of the vocabulary's weights at every call; what follows goes a few
# rows at a time, which stay in the processor's cache.
# Shape letters: T scored tokens, B tokens of a block, C tokens of a chunk, E hidden size, V vocabulary.


_BLOCK = 512  # rows of one product: 100 MB of float32 logits at 49,152 entries
_CHUNK = 128  # rows of the general way, and on a GPU
_CPU_CHUNK = 16  # 3 MB of float32 logits: they stay in the last-level cache between the steps of a softmax


def score_tokens(hidden_TE: Tensor, targets_T: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets_T`` (with gradient) and entropies in nats over the whole vocabulary
    (without).
    """
    # Exactly this class: a subclass may compute something else than its weight says.
    if type(head) is nn.Linear:
        result: tuple[Tensor, Tensor] = _ScoreTokens.apply(  # type: ignore[no-untyped-call]
            hidden_TE, targets_T, head.weight, head.bias, torch.is_grad_enabled()
        )
        return result
    pieces = [
        # a head with an adapter or a cap of its own
        checkpoint(_scores, hidden_CE, targets_C, head, use_reentrant=False)
        for hidden_CE, targets_C in zip(hidden_TE.split(_CHUNK), targets_T.split(_CHUNK), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropies for _, entropies in pieces])


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _scores(hidden_CE: Tensor, targets_C: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    return score_logits(head(hidden_CE), targets_C)


def score_logits(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """The same of logits that are there: log-probs with gradient, entropies without."""
    logprobs_CV = torch.log_softmax(_exact(logits_CV), dim=-1)
    with torch.no_grad():
        entropies_C = _entropies(logprobs_CV.exp(), logprobs_CV)
    return _chosen(logprobs_CV, targets_C), entropies_C


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
    ) -> tuple[Tensor, Tensor]:
        # bfloat16 logits have no room for probabilities: they would be rounded before the backward pass.
        saves_block = is_trained and _exact(hidden_TE[:0]).dtype == hidden_TE.dtype
        saved_BV: Tensor | None = None
        size, pieces = _chunk(hidden_TE), []
        for hidden_BE, targets_B in zip(hidden_TE.split(_BLOCK), targets_T.split(_BLOCK), strict=True):
            logits_BV = linear(hidden_BE, weight_VE, bias_V)
            for logits_CV, targets_C in zip(logits_BV.split(size), targets_B.split(size), strict=True):
                logprobs_CV = torch.log_softmax(_exact(logits_CV), dim=-1)
                # The logits are spent once their log-probs are there.
                probs_CV = torch.exp(logprobs_CV, out=logits_CV) if saves_block else logprobs_CV.exp()
                pieces.append((_chosen(logprobs_CV, targets_C), _entropies(probs_CV, logprobs_CV)))
            if saves_block:
                saved_BV, saves_block = logits_BV, False
        ctx.save_for_backward(hidden_TE, targets_T, weight_VE, bias_V, saved_BV)
        logprobs_T, entropies_T = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.mark_non_differentiable(entropies_T)
        return logprobs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """d logits = (onehot - softmax) * d logprob; the weight's gradient is summed in float32 over the
        blocks.
        """
        hidden_TE, targets_T, weight_VE, bias_V, saved_BV = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_TE) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, len(targets_T), _BLOCK):
            block = slice(start, start + _BLOCK)
            is_known = saved_BV is not None and start == 0
            memory_BV = saved_BV if is_known else _logits(hidden_TE[block], weight_VE, bias_V, saved_BV)
            grad_logits = _grad_logits(memory_BV, targets_T[block], grad_T[block], is_known)
            if grad_hidden is not None:
                grad_hidden[block] = grad_logits @ weight_VE
            if ctx.needs_input_grad[2]:
                part = grad_logits.t() @ hidden_TE[block]
                grad_weight = part if grad_weight is None else grad_weight.to(_exact(part).dtype).add_(part)
            if bias_V is not None and ctx.needs_input_grad[3]:
                total = _exact(grad_logits).sum(dim=0)
                grad_bias = total if grad_bias is None else grad_bias + total
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VE.dtype)
        grad_bias = None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, None, grad_weight, grad_bias, None


def _logits(hidden_BE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, memory_BV: Tensor | None) -> Tensor:
    """In the memory of an earlier block where there is one."""
    if memory_BV is None:
        return linear(hidden_BE, weight_VE, bias_V)
    logits_BV = torch.mm(hidden_BE, weight_VE.t(), out=memory_BV[: len(hidden_BE)])
    return logits_BV if bias_V is None else logits_BV.add_(bias_V)


def _grad_logits(memory_BV: Tensor, targets_B: Tensor, grad_B: Tensor, is_known: bool) -> Tensor:
    """In the place of the probabilities where they are known, else of the logits."""
    size = _chunk(memory_BV)
    chunks = (tensor.split(size) for tensor in (memory_BV, targets_B, grad_B))
    for memory_CV, targets_C, grad_C in zip(*chunks, strict=True):
        probs_CV = memory_CV if is_known else torch.softmax(_exact(memory_CV), dim=-1)
        scale_C = grad_C.to(probs_CV.dtype)
        probs_CV.mul_(-scale_C[:, None])
        # By index and not by a one-hot matrix, which would be as large as the logits.
        probs_CV[torch.arange(len(probs_CV), device=probs_CV.device), targets_C] += scale_C
        if not is_known:
            memory_CV.copy_(probs_CV)
    return memory_BV


class Scoring(nn.Module):
    """Log-probs and entropies of chosen tokens of one packed row; logits exist for a block of them at a
    time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids_N: Tensor, positions_N: Tensor, plan: Plan, predictors_U: Tensor, targets_U: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[U] log-probs of ``targets_U`` (with gradient) and [U] entropies in nats (without).
        ``predictors_U`` index the packed position whose output predicts each token.
        """
        backbone: Any = self.model.base_model
        states = backbone(
            input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, plan=plan
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return score_tokens(states[0, predictors_U], targets_U, head)


class UnpackedScoring(nn.Module):
    """The same numbers for a model of the unpacked path: every sequence of the row runs alone, and a shared
    token is scored in one of them, so that the gradients of its rollouts add up as they do in a packed row.
    """

    def __init__(self, model: PreTrainedModel, unpacked: Unpacked) -> None:
        super().__init__()
        self.model = model
        self.unpacked = unpacked

    def forward(
        self, ids_N: Tensor, positions_N: Tensor, plan: TreePlan, predictors_U: Tensor, targets_U: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Scoring`. ``positions_N`` are those of the sequences, which begin at 0."""
        order: list[int] = []
        outputs: list[Tensor] = []
        read = compute_hidden if self.unpacked.has_plain_head else compute_logits
        for sequence in split_into_sequences(plan, predictors_U.tolist(), self.unpacked):
            positions_K = torch.tensor(sequence.indices, device=ids_N.device)
            outputs.append(read(self.model, ids_N[list(sequence.tokens)], positions_K))
            order += sequence.scored
        targets = targets_U[order]
        if self.unpacked.has_plain_head:
            head = self.model.get_output_embeddings()
            assert isinstance(head, nn.Module)
            logprobs, entropies = score_tokens(torch.cat(outputs), targets, head)
        else:
            scores = [
                score_logits(logits, own)
                for logits, own in zip(
                    outputs, targets.split([len(sequence) for sequence in outputs]), strict=True
                )
            ]
            logprobs, entropies = (torch.cat(parts) for parts in zip(*scores, strict=True))
        back = torch.tensor(order, device=ids_N.device).argsort()
        return logprobs[back], entropies[back]
