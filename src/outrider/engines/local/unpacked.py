"""The unpacked path: transformers' own forward pass over batches of sequences.

For architectures that cannot run packed rows (state beside attention, sinks, capped logits) and for contexts
beyond a sliding window. Attention is transformers' eager one, which every architecture defines in full.

Whole sequences are padded on the right: later tokens change nothing before them. New tokens after a cache
are never padded, because a pad would change a recurrent state; only cached keys and values are padded, on the
left.

Shape letters: B sequences, N tokens of each, K outputs that are needed, V vocabulary, E hidden size.
"""

import copy
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from outrider.engines.local.attention import TreePlan, hidden_states
from outrider.errors import ModelError

_LOG = logging.getLogger(__name__)

EAGER = "eager"
CacheUse = Literal["extended", "stepped", "none"]
_NUM_TOKENS = 12  # of the test sequence
# Allowed difference, as a share of the effect of the context on the logits: a larger one means that a state
# or a mask is lost, a smaller one is rounding.
_ROUNDING = {torch.bfloat16: 0.1, torch.float32: 0.001}
# Allowed mean difference of log-probs between a batch and each sequence alone, as a share of the same effect
# (of 1 if that is less, in float32): a token that sees a pad has 0.01 and more.
_BATCH_ROUNDING = {torch.bfloat16: 0.1, torch.float32: 1e-5}
# Tokens of a batch of whole sequences, pads included: eager attention stores all of its weights.
_MAX_TOKENS = 4096
_LEAST_FILL = 0.75  # shortest by longest sequence of a batch
# of a layer's cache
_KEYS = ("keys", "values")
_STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """Properties of a model on this path, found by :func:`examine` when it is loaded.

    ``why`` is the reason why it is not packed. ``turns`` are the lengths, ascending, beyond which longrope
    uses other factors for all positions. ``cache``: transformers' cache gives the same numbers for any number
    of new tokens (``extended``), only for one at a time (``stepped``), or never (``none``: every token is
    computed from the first one). ``has_plain_head``: logits are the vocabulary projection of the last hidden
    states and nothing else. ``batches_scoring`` and ``batches_generation``: several sequences in one pass
    have the same log-probs as each alone.
    """

    why: str
    turns: tuple[int, ...] = ()
    cache: CacheUse = "extended"
    has_plain_head: bool = True
    batches_scoring: bool = True
    batches_generation: bool = True

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


def compute_logits(model: PreTrainedModel, ids_BN: Tensor, rows_K: Tensor, positions_K: Tensor) -> Tensor:
    """Return the logits [K, V] at these positions of these rows, including anything that follows the
    vocabulary projection.
    """
    run: Any = model
    options = {"input_ids": ids_BN, "position_ids": _positions(ids_BN), "use_cache": False}
    if len(ids_BN) == 1:
        logits: Tensor = run(**options, logits_to_keep=positions_K).logits
        return logits[0]
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    # Chosen before the projection: the logits of all positions would need more memory than everything else.
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows_K, positions_K][None],))
    try:
        logits = run(**options).logits
    finally:
        handle.remove()
    return logits[0]


def compute_hidden(model: PreTrainedModel, ids_BN: Tensor, rows_K: Tensor, positions_K: Tensor) -> Tensor:
    """Return the last hidden states [K, E] at these positions of these rows."""
    return hidden_states(model, ids_BN, _positions(ids_BN))[rows_K, positions_K]


def _positions(ids_BN: Tensor) -> Tensor:
    return torch.arange(ids_BN.shape[1], device=ids_BN.device).expand(ids_BN.shape)


def compute_batch(
    compute: Callable[[PreTrainedModel, Tensor, Tensor, Tensor], Tensor],
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    indices: Sequence[Sequence[int]],
) -> Tensor:
    """Return the outputs of ``compute`` (one of the two functions above) at the ``indices`` of every
    sequence, one after the other.
    """
    ids_BN = pad_sequence(list(sequences), batch_first=True)
    rows = [row for row, own in enumerate(indices) for _ in own]
    positions = [index for own in indices for index in own]
    rows_K, positions_K = torch.tensor([rows, positions], device=ids_BN.device)
    return compute(model, ids_BN, rows_K, positions_K)


def sequence_logits(model: PreTrainedModel, ids_N: Tensor) -> Tensor:
    """Return the logits [N, V] of one sequence."""
    return compute_batch(compute_logits, model, [ids_N], [range(len(ids_N))])


def batch_sequences(sequences: Iterable[Pass], unpacked: Unpacked) -> Iterator[list[Pass]]:
    """Group sequences of similar lengths, and of the same rotations, for :func:`compute_batch`."""
    batch: list[Pass] = []
    for sequence in sorted(sequences, key=lambda each: -len(each.tokens)):
        length, longest = len(sequence.tokens), len(batch[0].tokens) if batch else 0
        if batch and (
            not unpacked.batches_scoring
            or length < _LEAST_FILL * longest
            or longest * (len(batch) + 1) > _MAX_TOKENS
            or unpacked.rotation_index(length) != unpacked.rotation_index(longest)
        ):
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


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
    half = num // 2
    try:
        whole, begun, alone = (sequence_logits(model, part) for part in (ids, ids[:half], ids[half:]))
        picked = compute_batch(compute_logits, model, [ids], [(1, num - 2)])
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
        difference = head(compute_batch(compute_hidden, model, [ids], [range(num)])) - whole
        has_plain_head = bool(difference.float().norm() <= 1e-5 * context.float().norm())
    unpacked = Unpacked(
        why=why, turns=turns, cache=_cache_use(model, ids, whole, context), has_plain_head=has_plain_head
    )
    # the other rows differ from the first one in most tokens
    rows = [ids, (ids[: num - 2] * 5 + 3) % vocabulary, (ids[:half] * 7 + 5) % vocabulary]
    expected = [sequence_logits(model, row) for row in rows]
    least = 1.0 if whole.dtype == torch.float32 else 0.0
    limit = _BATCH_ROUNDING[whole.dtype] * max(least, float(context.float().abs().mean()))

    def is_exact(compute: Callable[[PreTrainedModel, Sequence[Tensor], Unpacked], Sequence[Tensor]]) -> bool:
        try:
            batched = compute(model, rows, unpacked)
            ends = [all_NV[-len(own) :] for own, all_NV in zip(batched, expected, strict=True)]
            ours, theirs = (torch.cat(list(parts)).float().log_softmax(dim=-1) for parts in (batched, ends))
            return bool((ours - theirs).abs().mean() <= limit)
        except Exception as error:  # the architecture does not run in batches
            _LOG.info("no batches: %s: %s", type(error).__name__, error)
            return False

    return replace(
        unpacked,
        batches_scoring=is_exact(_score_rows),
        batches_generation=unpacked.cache != "none" and is_exact(_generate_rows),
    )


def _score_rows(model: PreTrainedModel, rows: Sequence[Tensor], unpacked: Unpacked) -> Sequence[Tensor]:
    """Return the logits of every position, as the update computes them."""
    lengths = [len(row) for row in rows]
    compute = compute_hidden if unpacked.has_plain_head else compute_logits
    outputs = compute_batch(compute, model, rows, [range(length) for length in lengths])
    head: Any = model.get_output_embeddings() if unpacked.has_plain_head else nn.Identity()
    parts: Sequence[Tensor] = head(outputs).split(lengths)
    return parts


def _generate_rows(model: PreTrainedModel, rows: Sequence[Tensor], unpacked: Unpacked) -> Sequence[Tensor]:
    """Return the logits of the last three positions, as generation computes them: what is before them alone,
    then two tokens of all rows, then the last ones of the rows in another order.
    """
    starts = [len(row) - 3 for row in rows]
    caches = [DynamicCache(config=model.config) for _ in rows]
    for row, start, cache in zip(rows, starts, caches, strict=True):
        cached_logits(model, row[None, :start], [0], cache)
    stacked, parts = stack_caches(caches, starts), []
    for num in [2] if unpacked.cache == "extended" else [1, 1]:
        news = [row[start : start + num] for row, start in zip(rows, starts, strict=True)]
        parts.append(cached_logits(model, torch.stack(news), starts, stacked, num_logits=num))
        starts = [start + num for start in starts]
    backwards = list(reversed(range(len(rows))))
    taken = take_rows(stacked, backwards, max(starts))
    last = torch.stack([rows[row][-1:] for row in backwards])
    parts.append(cached_logits(model, last, starts[::-1], taken)[backwards])
    return list(torch.cat(parts, dim=1))


def _cache_use(model: PreTrainedModel, ids: Tensor, whole: Tensor, context: Tensor) -> CacheUse:
    half = len(ids) // 2
    new = len(ids) - half
    # the first part, then at least one decoding step
    tries: dict[CacheUse, list[int]] = {"extended": [half, new - 1, 1], "stepped": [half, *[1] * new]}
    for use, lengths in tries.items():
        try:
            cache, parts, start = DynamicCache(config=model.config), [], 0
            for part in ids.split(lengths):
                parts.append(cached_logits(model, part[None], [start], cache, num_logits=len(part))[0])
                start += len(part)
                if len(parts) == 1:  # another sequence, as state outside of the cache would mix the two
                    others = ids[:half].flip(0)
                    cached_logits(model, others[None], [0], DynamicCache(config=model.config))
            logits = torch.cat(parts)
        except Exception as error:  # the architecture has its own cache, or none
            _LOG.info("keys and values cannot be %s: %s: %s", use, type(error).__name__, error)
            continue
        if logits.shape == whole.shape and _same(logits, whole, context):
            return use
    return "none"


def cached_logits(
    model: PreTrainedModel,
    ids_BN: Tensor,
    starts: Sequence[int],
    cache: DynamicCache,
    *,
    num_logits: int = 1,
) -> Tensor:
    """Extend the rows of a cache, which have ``starts`` tokens, by N each; return the logits [B, K, V] of the
    last ``num_logits``.
    """
    run: Any = model
    num, device = ids_BN.shape[1], ids_BN.device
    starts_B1 = torch.tensor(starts, device=device)[:, None]
    options: dict[str, Any] = {}
    if min(starts) != max(starts):
        is_padded_B1 = max(starts) - starts_B1
        options["attention_mask"] = torch.arange(max(starts) + num, device=device) >= is_padded_B1
    logits: Tensor = run(
        input_ids=ids_BN,
        position_ids=starts_B1 + torch.arange(num, device=device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=num_logits,
        **options,
    ).logits
    return logits


def stack_caches(caches: Sequence[DynamicCache], lengths: Sequence[int]) -> DynamicCache:
    """Return a cache with copies of the rows of all, which have ``lengths`` tokens: zeros, which
    :func:`cached_logits` masks, precede the keys and values of the shorter ones.
    """
    if len(caches) == 1:
        return copy.deepcopy(caches[0])
    longest = lengths.index(max(lengths))  # its layers count the most tokens
    stacked = copy.copy(caches[longest])
    stacked.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        parts = [_tensors(layer) for layer in layers]
        tensors = {key: _cat_rows([part[key] for part in parts]) for key in parts[longest]}
        stacked.layers.append(_with_tensors(layers[longest], tensors))
    return stacked


def take_rows(cache: DynamicCache, rows: Sequence[int], length: int) -> DynamicCache:
    """Return a cache with copies of these rows, of which the longest has ``length`` tokens."""
    taken = copy.copy(cache)
    taken.layers = []
    layer: Any
    for layer in cache.layers:
        tensors = {
            (name, index): (tensor[..., -length:, :] if index is None else tensor)[list(rows)]
            for (name, index), tensor in _tensors(layer).items()
        }
        layer = _with_tensors(layer, tensors)
        if hasattr(layer, "cumulative_length"):  # of a sliding window
            layer.cumulative_length = length
        taken.layers.append(layer)
    return taken


def _tensors(layer: Any) -> dict[tuple[str, int | None], Tensor]:
    """Return the tensors of a layer's cache by attribute and, for states beside attention, by number."""
    values: dict[tuple[str, int | None], Any] = {(name, None): getattr(layer, name, None) for name in _KEYS}
    for name in _STATES:
        values |= {(name, index): state for index, state in getattr(layer, name, {}).items()}
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def _with_tensors(layer: Any, tensors: Mapping[tuple[str, int | None], Tensor]) -> Any:
    """Return a copy of a layer's cache with other tensors."""
    result = copy.copy(layer)
    for name in _STATES:
        if hasattr(layer, name):
            setattr(result, name, dict(getattr(layer, name)))
    for (name, index), tensor in tensors.items():
        if index is None:
            setattr(result, name, tensor)
        else:
            getattr(result, name)[index] = tensor
    return result


def _cat_rows(parts: Sequence[Tensor]) -> Tensor:
    # states beside attention have equal shapes
    longest = max(part.shape[-2] for part in parts)
    return torch.cat([pad(part, (0, 0, longest - part.shape[-2], 0)) for part in parts])


def _same(ours: Tensor, theirs: Tensor, context: Tensor) -> bool:
    return bool((ours - theirs).float().norm() <= _ROUNDING[ours.dtype] * context.float().norm())
