"""Whether the unpacked path gives a model's own numbers, tried with a dozen tokens when it is loaded."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from outrider.engines.local.unpacked import CacheUse, Unpacked, compute_hidden, compute_logits
from outrider.errors import ModelError

_LOG = logging.getLogger(__name__)
_NUM = 12
_ROUNDING = {torch.bfloat16: 0.1, torch.float32: 0.001}
"""Share of what a context changes in the logits: above it a state or a mask is lost, below it is rounding."""


@torch.no_grad()
def examine(model: PreTrainedModel, *, why: str, turns: tuple[int, ...] = ()) -> Unpacked:
    """What :class:`Unpacked` says of this model. Raises ModelError, one line without the model's name, where
    it does not predict a token from the ones before it alone, or does not run.
    """
    num = min((_NUM, *turns))
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = (torch.arange(1, num + 1) % vocabulary).to(model.device)
    every = torch.arange(num, device=model.device)
    half = num // 2
    try:
        whole = compute_logits(model, ids, every)
        begun, alone = (
            compute_logits(model, ids[:half], every[:half]),
            compute_logits(model, ids[half:], every[:-half]),
        )
        picked = compute_logits(model, ids, every[[1, -2]])
    # the modules of an architecture raise anything
    except Exception as error:
        raise ModelError(f"transformers' forward pass fails: {_line(error)}") from error
    context = whole[half:] - alone
    if picked.shape[0] != 2 or not _same(picked, whole[[1, -2]], context):
        raise ModelError("its forward pass does not give the logits of chosen positions")
    if not _same(begun, whole[:half], context):
        raise ModelError("what follows a token changes its prediction: it is no left-to-right model")
    return Unpacked(
        why=why,
        turns=turns,
        cache=_cache_use(model, ids, whole, context),
        has_plain_head=_has_plain_head(model, ids, whole, context),
    )


def _cache_use(model: PreTrainedModel, ids: Tensor, whole: Tensor, context: Tensor) -> CacheUse:
    half = len(ids) // 2
    new = len(ids) - half
    # a decoding step after each
    tries: dict[CacheUse, list[int]] = {"extended": [half, new - 1, 1], "stepped": [half, *[1] * new]}
    for use, lengths in tries.items():
        try:
            logits = _with_cache(model, ids.split(lengths))
        except Exception as error:  # caches of an architecture's own, or none: it is computed whole then
            _LOG.info("keys and values cannot be %s: %s: %s", use, type(error).__name__, error)
            continue
        if logits.shape == whole.shape and _same(logits, whole, context):
            return use
    return "none"


def _with_cache(model: PreTrainedModel, parts: tuple[Tensor, ...]) -> Tensor:
    cache, logits, start = DynamicCache(config=model.config), [], 0
    for part in parts:
        logits.append(cached_logits(model, part, start, cache, num_logits=len(part)))
        start += len(part)
    return torch.cat(logits)


def cached_logits(
    model: PreTrainedModel, ids_N: Tensor, start: int, cache: DynamicCache, *, num_logits: int = 1
) -> Tensor:
    """[K, V] of the last ``num_logits`` of N tokens behind the ``start`` that the cache holds; it holds these too
    then.
    """
    run: Any = model
    positions = torch.arange(start, start + len(ids_N), device=ids_N.device)[None]
    logits: Tensor = run(
        input_ids=ids_N[None],
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=num_logits,
    ).logits
    return logits[0]


def _has_plain_head(model: PreTrainedModel, ids: Tensor, whole: Tensor, context: Tensor) -> bool:
    head = model.get_output_embeddings()
    if model.base_model is model or not isinstance(head, nn.Module):
        return False
    states = compute_hidden(model, ids, torch.arange(len(ids), device=ids.device))
    return bool((head(states) - whole).float().norm() <= 1e-5 * context.float().norm())


def _same(ours: Tensor, theirs: Tensor, context: Tensor) -> bool:
    return bool((ours - theirs).float().norm() <= _ROUNDING[ours.dtype] * context.float().norm())


def _line(error: Exception) -> str:
    return " ".join((str(error).strip() or type(error).__name__).split())[:200]
