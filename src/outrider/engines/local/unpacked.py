"""The unpacked path: transformers' own forward pass, one sequence at a time, without padding.

For architectures that cannot run packed rows (state beside attention, sinks, capped logits) and for contexts
beyond a sliding window. Attention is transformers' eager one, which every architecture defines in full.

Shape letters: N tokens of a sequence, K positions whose output is needed, V vocabulary, E hidden size.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from outrider.engines.local.attention import TreePlan
from outrider.errors import ModelError

_LOG = logging.getLogger(__name__)

EAGER = "eager"
CacheUse = Literal["extended", "stepped", "none"]
_NUM_TOKENS = 12  # of the test sequence
# Allowed difference, as a share of the effect of the context on the logits: a larger one means that a state
# or a mask is lost, a smaller one is rounding.
_ROUNDING = {torch.bfloat16: 0.1, torch.float32: 0.001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """Properties of a model on this path, found by :func:`examine` when it is loaded.

    ``why`` is the reason why it is not packed. ``turns`` are the lengths, ascending, beyond which longrope
    uses other factors for all positions. ``cache``: transformers' cache gives the same numbers for any number
    of new tokens (``extended``), only for one at a time (``stepped``), or never (``none``: every token is
    computed from the first one). ``has_plain_head``: logits are the vocabulary projection of the last hidden
    states and nothing else.
    """

    why: str
    turns: tuple[int, ...] = ()
    cache: CacheUse = "extended"
    has_plain_head: bool = True

    def rotation_index(self, length: int) -> int:
        """Number the rotations: lengths with the same number have the same one."""
        return bisect_left(self.turns, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence to compute: the packed positions of its tokens, and the indices in it (K) whose outputs
    predict the scored tokens with the numbers ``scored``.
    """

    tokens: tuple[int, ...]
    indices: tuple[int, ...]
    scored: tuple[int, ...]


def compute_logits(model: PreTrainedModel, ids_N: Tensor, positions_K: Tensor) -> Tensor:
    """Return the logits [K, V], including anything that follows the vocabulary projection."""
    run: Any = model
    logits: Tensor = run(
        input_ids=ids_N[None], position_ids=_positions(ids_N), use_cache=False, logits_to_keep=positions_K
    ).logits
    return logits[0]


def compute_hidden(model: PreTrainedModel, ids_N: Tensor, positions_K: Tensor) -> Tensor:
    """Return the last hidden states [K, E]."""
    backbone: Any = model.base_model
    states: Tensor = backbone(
        input_ids=ids_N[None], position_ids=_positions(ids_N), use_cache=False
    ).last_hidden_state
    return states[0, positions_K]


def _positions(ids_N: Tensor) -> Tensor:
    return torch.arange(len(ids_N), device=ids_N.device)[None]


def split_into_sequences(plan: TreePlan, predictors: Sequence[int], unpacked: Unpacked) -> Iterator[Pass]:
    """Split a packed row into sequences that score every token once; ``predictors`` are packed positions.

    A shared token is scored in the first sequence that contains it; its context is the same in all of them. A
    sequence ends at its last predictor. With longrope it is computed once for each rotation, because a token
    is predicted with the rotation of the length at which it was sampled.
    """
    waiting: dict[int, list[int]] = {}
    for number, position in enumerate(predictors):
        waiting.setdefault(position, []).append(number)
    for path in segment_paths(plan):
        own = [(index, waiting.pop(token)) for index, token in enumerate(path) if token in waiting]
        for _, group in groupby(own, key=lambda pair: unpacked.rotation_index(pair[0] + 1)):
            pairs = [(index, number) for index, numbers in group for number in numbers]
            indices, scored = zip(*pairs, strict=True)
            yield Pass(tokens=tuple(path[: indices[-1] + 1]), indices=indices, scored=scored)


def segment_paths(plan: TreePlan) -> list[list[int]]:
    """Return the packed positions of every sequence of a row: each leaf segment with its ancestors."""
    ends = list(accumulate(segment.length for segment in plan.segments))
    inner = {index for segment in plan.segments for index in segment.ancestors}
    return [
        [
            position
            for index in (*segment.ancestors, number)
            for position in range(ends[index] - plan.segments[index].length, ends[index])
        ]
        for number, segment in enumerate(plan.segments)
        if number not in inner
    ]


def longrope_lengths(config: PreTrainedConfig) -> list[int]:
    """Return the lengths, ascending, beyond which a longrope configuration uses its other factors."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # some configurations have one per kind of layer
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = {
        kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"
    }
    return sorted(int(length) for length in lengths if length)


@torch.no_grad()
def examine(model: PreTrainedModel, *, why: str, turns: tuple[int, ...] = ()) -> Unpacked:
    """Find the properties of a model with a dozen tokens.

    Raises ModelError (without the model's name) if it does not run or does not predict a token from the
    tokens before it alone.
    """
    num = min((_NUM_TOKENS, *turns))
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
    # the modules of an architecture may raise anything
    except Exception as error:
        reason = " ".join((str(error).strip() or type(error).__name__).split())[:200]
        raise ModelError(f"transformers' forward pass fails: {reason}") from error
    context = whole[half:] - alone
    if picked.shape[0] != 2 or not _same(picked, whole[[1, -2]], context):
        raise ModelError("its forward pass does not give the logits of chosen positions")
    if not _same(begun, whole[:half], context):
        raise ModelError("what follows a token changes its prediction: it is no left-to-right model")
    head = model.get_output_embeddings()
    has_plain_head = False
    if model.base_model is not model and isinstance(head, nn.Module):
        difference = head(compute_hidden(model, ids, every)) - whole
        has_plain_head = bool(difference.float().norm() <= 1e-5 * context.float().norm())
    return Unpacked(
        why=why,
        turns=turns,
        cache=_cache_use(model, ids, whole, context),
        has_plain_head=has_plain_head,
    )


def _cache_use(model: PreTrainedModel, ids: Tensor, whole: Tensor, context: Tensor) -> CacheUse:
    half = len(ids) // 2
    new = len(ids) - half
    # the first part, then at least one decoding step
    tries: dict[CacheUse, list[int]] = {"extended": [half, new - 1, 1], "stepped": [half, *[1] * new]}
    for use, lengths in tries.items():
        try:
            cache, parts, start = DynamicCache(config=model.config), [], 0
            for part in ids.split(lengths):
                parts.append(cached_logits(model, part, start, cache, num_logits=len(part)))
                start += len(part)
            logits = torch.cat(parts)
        except Exception as error:  # the architecture has its own cache, or none
            _LOG.info("keys and values cannot be %s: %s: %s", use, type(error).__name__, error)
            continue
        if logits.shape == whole.shape and _same(logits, whole, context):
            return use
    return "none"


def cached_logits(
    model: PreTrainedModel, ids_N: Tensor, start: int, cache: DynamicCache, *, num_logits: int = 1
) -> Tensor:
    """Extend a cache of ``start`` tokens by N; return the logits [K, V] of the last ``num_logits``."""
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


def _same(ours: Tensor, theirs: Tensor, context: Tensor) -> bool:
    return bool((ours - theirs).float().norm() <= _ROUNDING[ours.dtype] * context.float().norm())
