"""The unpacked path: transformers' own forward pass, one sequence at a time, without padding.

For architectures that packed rows cannot hold (state beside attention, sinks, capped logits) and for contexts
behind a sliding window. Attention is transformers' eager one, which every architecture defines in full.

Shape letters: N tokens of a sequence, K positions whose output is wanted, V vocabulary, E hidden size.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engines.local.attention import TreePlan

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
