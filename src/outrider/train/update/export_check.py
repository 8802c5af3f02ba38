"""Whether the folder that was exported computes what the policy computes."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engines.local.attention import Segment, TreePlan
from outrider.engines.local.model import LanguageModel, read_weights
from outrider.engines.local.unpacked import EAGER, compute_logits
from outrider.errors import ModelError

_NUM_TOKENS: Final = 12
_STARTS: Final = (1, 101, 1009)  # first ids of the sequences that are tried
_LIMITS: Final = {torch.bfloat16: 0.2, torch.float32: 0.001}
"""Share of what a context changes in the logits. Merged weights are rounded once more than adapters beside
them, and attention is computed by another implementation.
"""


@torch.no_grad()
def require_same_logits(language_model: LanguageModel, folder: Path) -> None:
    """Load the folder as everybody does, and compare. Raises ModelError where a weight is missing or has
    another name or shape, or where the logits of all of a few sequences differ by more than rounding. One
    that agrees is enough: in another one a router may choose another expert because of rounding.
    """
    model = language_model.model
    loaded, _ = read_weights(str(folder), "as exported", dtype=model.dtype, attention=EAGER)
    loaded.eval()
    differences = []
    for start in _STARTS:
        ids, half = _ids(language_model, start), _NUM_TOKENS // 2
        ours, theirs = _logits(language_model, ids), _theirs(loaded, ids)
        # what the first half changes in the predictions of the second
        context = (theirs[half:] - _theirs(loaded, ids[half:])).norm()
        difference = (ours - theirs).norm()
        if bool(difference <= _LIMITS.get(model.dtype, 0.2) * context):
            return
        differences.append(float((ours - theirs).abs().max()))
    raise ModelError(
        "the exported model does not compute what the policy computes: the logits of a few tokens differ by "
        f"up to {min(differences):.3g}; nothing was written. Please report this with the model's "
        "architecture and model.lora"
    )


def _ids(language_model: LanguageModel, start: int) -> Tensor:
    size = int(language_model.model.config.get_text_config().vocab_size)
    return torch.arange(start, start + _NUM_TOKENS) % size


def _logits(language_model: LanguageModel, ids_N: Tensor) -> Tensor:
    """[N, V], as the policy is computed in training."""
    device = language_model.device
    every = torch.arange(len(ids_N), device=device)
    if language_model.unpacked is not None:
        return compute_logits(language_model.model, ids_N.to(device), every).float().cpu()
    plan = TreePlan(segments=(Segment(length=len(ids_N)),))
    options: dict[str, Any] = {"position_ids": every[None], "use_cache": False, "plan": plan}
    run: Any = language_model.model
    logits: Tensor = run(input_ids=ids_N[None].to(device), **options).logits
    return logits[0].float().cpu()


def _theirs(model: PreTrainedModel, ids_N: Tensor) -> Tensor:
    return compute_logits(model, ids_N, torch.arange(len(ids_N))).float()
