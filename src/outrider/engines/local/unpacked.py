"""The unpacked path: transformers' own forward pass, one sequence at a time, without padding.

For architectures that packed rows cannot hold (state beside attention, sinks, capped logits) and for contexts
behind a sliding window. Attention is transformers' eager one, which every architecture defines in full.

Shape letters: N tokens of a sequence, K positions whose output is wanted, V vocabulary, E hidden size.
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

EAGER = "eager"
CacheUse = Literal["extended", "stepped", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """How a model is computed on this path, as it was found when it was loaded.

    ``why`` it is not packed. ``turns``: lengths behind which a sequence turns all of its positions by other
    factors (longrope), ascending. ``cache``: transformers' cache gives the same numbers for any number of new
    tokens (``extended``), for one at a time (``stepped``), or not at all (``none``: every token is computed
    from the first). ``has_plain_head``: logits are the vocabulary projection of the last hidden states, and
    nothing besides.
    """

    why: str
    turns: tuple[int, ...] = ()
    cache: CacheUse = "extended"
    has_plain_head: bool = True

    def rotation_index(self, length: int) -> int:
        """Which of the rotations a sequence of this length has: the same number, the same rotation."""
        return bisect_left(self.turns, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence to compute: the packed positions of its tokens, the places in it (K) whose output predicts
    the scored tokens numbered ``scored``.
    """

    tokens: tuple[int, ...]
    indices: tuple[int, ...]
    scored: tuple[int, ...]


def compute_logits(model: PreTrainedModel, ids_N: Tensor, positions_K: Tensor) -> Tensor:
    """[K, V] as the architecture defines them, whatever it does behind its vocabulary projection."""
    run: Any = model
    logits: Tensor = run(
        input_ids=ids_N[None], position_ids=_positions(ids_N), use_cache=False, logits_to_keep=positions_K
    ).logits
    return logits[0]


def compute_hidden(model: PreTrainedModel, ids_N: Tensor, positions_K: Tensor) -> Tensor:
    """[K, E]: last hidden states."""
    backbone: Any = model.base_model
    states: Tensor = backbone(
        input_ids=ids_N[None], position_ids=_positions(ids_N), use_cache=False
    ).last_hidden_state
    return states[0, positions_K]


def _positions(ids_N: Tensor) -> Tensor:
    return torch.arange(len(ids_N), device=ids_N.device)[None]


def split_into_sequences(plan: TreePlan, predictors: Sequence[int], unpacked: Unpacked) -> Iterator[Pass]:
    """The sequences that give every scored token its log-prob once; ``predictors`` are packed positions.

    A shared token is scored in the first sequence that it is part of: its context is the same in all of them.
    Nothing behind the last place that is asked for is computed. A longrope sequence is read once for each
    rotation, because a token is predicted with the rotation of the length that it is sampled at.
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
    """Packed positions of every sequence of a row: of each segment that nothing follows, and what it sees."""
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
    """Lengths behind which a longrope configuration takes its other factors, ascending."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # some have one per kind of layer
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = {
        kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"
    }
    return sorted(int(length) for length in lengths if length)


# Whether the unpacked path gives a model's own numbers, tried with a dozen tokens when it is loaded.


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
    """[K, V] of the last ``num_logits`` of N tokens behind the ``start`` that the cache holds; it holds these
    too then.
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
