"""Backbone and vocabulary projection in one forward: what shards weights gathers the root's only there.

Shape letters: N packed tokens, U scored tokens.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engines.local.attention import Plan
from outrider.train.update.chunked_logprobs import score_tokens


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
