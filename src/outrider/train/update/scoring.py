"""Backbone and vocabulary projection in one forward: what shards weights gathers the root's only there.

Shape letters: N packed tokens, U scored tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engines.local.attention import Plan, TreePlan
from outrider.engines.local.unpacked import Unpacked, compute_hidden, compute_logits, split_into_sequences
from outrider.train.update.chunked_logprobs import score_logits, score_tokens


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
