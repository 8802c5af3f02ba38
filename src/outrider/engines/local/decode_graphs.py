"""Decoding steps as CUDA graphs.

A decoding step of a small model is a thousand short kernels, and starting them from Python takes longer
than their work. A graph starts all of them at once. It has fixed shapes and addresses: rows are padded to a
bucket, and so are the positions that attention reads; padding writes into a slot that no rollout uses.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.engines.local.attention import DecodePlan, SlotCache, bucket, decode_mask, deterministic_mode
from outrider.engines.local.model import LanguageModel

_LEAST_ROWS = 8
_LEAST_POSITIONS = 512
_LEAST_USES = 3  # a capture takes as long as a few steps, and a bucket may be left after one


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs_3B: Tensor  # newest ids, stored positions, slots
    logits_BV: Tensor


class DecodeGraphs:
    """Captures and replays decoding steps of one model on a GPU.

    Graphs refer to the tensors of weights and cache: call :meth:`drop` when weights may have been replaced. A
    cache that has grown or was freed is captured again.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        self._lm = language_model
        self.is_supported = language_model.device.type == "cuda"
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._num_uses: Counter[tuple[int, int]] = Counter()
        self._keys: Tensor | None = None  # of the cache that was captured
        self._stream: torch.cuda.Stream | None = None

    def drop(self) -> None:
        """Free the graphs and their memory."""
        self._captured.clear()
        self._num_uses.clear()
        self._keys = None

    @staticmethod
    def num_slots(num_rows: int) -> int:
        """Return the number of slots that a step of ``num_rows`` needs, with that of the padding."""
        return bucket(num_rows, _LEAST_ROWS) + 1

    def logits(
        self, newest: Sequence[int], stored: Sequence[int], cache: SlotCache, *, used_slots: int
    ) -> Tensor | None:
        """Return the logits [B, V] after the ids ``newest`` of the slots 0..B-1, which have ``stored``
        positions. The next call overwrites them. The cache has :meth:`num_slots` and one more than
        ``used_slots``. The first steps of a bucket are computed without a graph, with the same padding.

        None if the model cannot be captured, which is reported once.
        """
        keys = next(iter(cache.layers.values()))[0]
        if keys is not self._keys:
            self.drop()
            self._keys = keys
        num_rows, padding = len(newest), bucket(len(newest), _LEAST_ROWS) - len(newest)
        spare = cache.num_slots - 1
        assert spare >= max(used_slots, num_rows + padding)
        inputs_3B = torch.tensor(
            [
                [*newest, *[0] * padding],
                [*stored, *[0] * padding],
                [*range(num_rows), *[spare] * padding],
            ]
        )
        num_seen = min(bucket(max(stored) + 1, _LEAST_POSITIONS), cache.num_positions)
        key = (num_rows + padding, num_seen)
        self._num_uses[key] += 1
        captured = self._captured.get(key)
        if captured is None:
            try:
                if self._num_uses[key] < _LEAST_USES:
                    return self._step(inputs_3B.to(keys.device), num_seen, cache)[:num_rows]
                captured = self._captured[key] = self._capture(inputs_3B.to(keys.device), num_seen, cache)
            except RuntimeError as error:
                self.is_supported = False
                self.drop()
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(f"decoding without CUDA graphs, which is slower: {reason}", stacklevel=2)
                return None
        else:
            captured.inputs_3B.copy_(inputs_3B)
        captured.graph.replay()
        return captured.logits_BV[:num_rows]

    def _capture(self, inputs_3B: Tensor, num_seen: int, cache: SlotCache) -> _Captured:
        step = partial(self._step, inputs_3B, num_seen, cache)
        device, graph = inputs_3B.device, torch.cuda.CUDAGraph()
        if self._stream is None:  # one for all graphs, which share the memory of a stream only
            self._stream = torch.cuda.Stream(device)
        side = self._stream
        side.wait_stream(torch.cuda.current_stream(device))
        # A failed capture leaves its stream the current one: the outer block takes it back.
        with torch.cuda.stream(side):
            step()  # libraries allocate at their first call, which a capture forbids
            with torch.cuda.graph(graph, pool=self._pool(), stream=side, capture_error_mode="thread_local"):
                logits_BV = step()
        torch.cuda.current_stream(device).wait_stream(side)
        return _Captured(graph, inputs_3B, logits_BV)

    def _step(self, inputs_3B: Tensor, num_seen: int, cache: SlotCache) -> Tensor:
        ids_B, lengths_B, rows_B = inputs_3B
        # Every row writes its own position of the cache: sorting the positions would cost more than the step.
        with deterministic_mode(False):
            mask_B11T = decode_mask(lengths_B, num_seen, dtype=self._lm.dtype)
            plan = DecodePlan(cache=cache, lengths_B=lengths_B, mask_B11T=mask_B11T, rows_B=rows_B)
            logits: Tensor = self._lm.head(self._lm.hidden(ids_B[:, None], lengths_B[:, None], plan)[:, 0])
        return logits

    def _pool(self) -> Any:
        """One memory for all graphs, of which one runs at a time."""
        first = next(iter(self._captured.values()), None)
        return None if first is None else first.graph.pool()
