"""A policy whose weights, moments and gradients are in shards; the update sees it as any other."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from outrider.engines.local.model import LanguageModel
from outrider.scale.sharding import fill
from outrider.train.learning_settings import OptimizerSettings
from outrider.train.update.gradient_norm import sum_of_squares
from outrider.train.update.pack import PackedBatch
from outrider.train.update.policy import Policy, Scorer, TokenScores
from outrider.train.update.ranks import Ranks
from outrider.train.update.weight_files import SHARDS, require_shapes, tensor_folder


class ShardedScorer(Scorer):
    """A model in shards that scores tokens, together with all other ranks."""

    def __init__(
        self, language_model: LanguageModel, scoring: nn.Module, ranks: Ranks, *, uses_flex: bool = False
    ) -> None:
        super().__init__(language_model, ranks=ranks, uses_flex=uses_flex)
        self.scoring = scoring

    def score(self, batch: PackedBatch) -> TokenScores:
        """See :class:`outrider.train.update.policy.Scorer`."""
        scores = super().score(batch)
        reshard(self.scoring)
        return scores

    def dummy_forward(self) -> Tensor:
        """See :class:`outrider.train.update.policy.Scorer`."""
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
        """See :class:`outrider.train.update.policy.Policy`."""
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
