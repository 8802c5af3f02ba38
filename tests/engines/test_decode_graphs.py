"""Decoding steps as graphs: padded rows and positions give the tokens of a plain step. A GPU's capture is
replaced by computing the step again at every replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from outrider.engines.base import Request
from outrider.engines.local import decode_graphs
from outrider.engines.local.attention import SlotCache
from outrider.engines.local.decode_graphs import DecodeGraphs
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel
from tests.tiny import tiny_model


class _Replayed(DecodeGraphs):
    """Computes the step at every replay, from the inputs' memory as a graph does."""

    num_captured = 0

    def _capture(self, inputs_3B, num_seen, cache):
        self.num_captured += 1
        step = partial(self._step, inputs_3B, num_seen, cache)
        logits_BV = step().clone()

        class Graph:
            def replay(self) -> None:
                logits_BV.copy_(step())

        return decode_graphs._Captured(Graph(), inputs_3B, logits_BV)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(decode_graphs, "_LEAST_ROWS", 4)
    monkeypatch.setattr(decode_graphs, "_LEAST_POSITIONS", 16)
    monkeypatch.setattr(decode_graphs, "_LEAST_USES", 2)
    return


def _engines(model, **options) -> tuple[LocalEngine, LocalEngine]:
    plain, graphs = (LocalEngine(model, **options) for _ in range(2))
    graphs._graphs = _Replayed(model)
    graphs._graphs.is_supported = True
    return plain, graphs


def _requests(num: int, *, turn: int = 0) -> list[Request]:
    # of different lengths, so that rows leave at different times and the buckets of rows shrink
    return [
        Request(
            request_id=f"{turn}-{i}", token_ids=tuple(range(3, 10 + 2 * i + 6 * turn)), max_tokens=3 + 5 * i,
            seed=100 * turn + i, cache_key=str(i),
        )
        for i in range(num)
    ]  # fmt: skip


@pytest.mark.parametrize("max_rows", [3, 64])
def test_padded_steps_sample_the_tokens_of_plain_steps(model, max_rows):
    plain, graphs = _engines(model, max_rows=max_rows)
    for turn in range(2):
        requests = _requests(7, turn=turn)
        ours, theirs = graphs.generate(requests), plain.generate(requests)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.num_prefilled_tokens == other.num_prefilled_tokens
    assert graphs._graphs.num_captured > 2


def test_padding_writes_into_no_slot_of_a_rollout(model):
    _, graphs = _engines(model)
    graphs.generate(_requests(5))
    kept = {slot: ids for slot, (key, ids) in enumerate(graphs._slots) if key is not None}
    keys = next(iter(graphs._cache.layers.values()))[0].clone()
    graphs.generate([Request(request_id="x", token_ids=(5, 6, 7), max_tokens=12, seed=0)])
    after = next(iter(graphs._cache.layers.values()))[0]
    moved = {ids: slot for slot, (_, ids) in enumerate(graphs._slots)}
    for slot, ids in kept.items():
        length = len(ids) - 1  # the newest token is not stored yet
        torch.testing.assert_close(after[moved[ids], :, :length], keys[slot, :, :length])


def test_a_grown_or_freed_cache_and_new_weights_are_captured_again(model):
    plain, graphs = _engines(model)
    for requests in (_requests(2), _requests(6)):
        assert [one.token_ids for one in graphs.generate(requests)] == [
            one.token_ids for one in plain.generate(requests)
        ]
    before = graphs._graphs.num_captured
    graphs.load(1)
    assert not graphs._graphs._captured
    graphs.generate(_requests(2))
    assert graphs._graphs._captured
    graphs.free_cache()
    assert not graphs._graphs._captured
    graphs.generate(_requests(2))
    assert graphs._graphs.num_captured > before


def test_a_model_that_cannot_be_captured_decodes_plainly_and_warns_once(model, monkeypatch):
    plain, graphs = _engines(model)

    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors")

    monkeypatch.setattr(graphs._graphs, "_capture", refuse)
    with pytest.warns(UserWarning, match=r"without CUDA graphs.*operation not permitted") as caught:
        ours = graphs.generate(_requests(3))
    assert len(caught) == 1
    assert [one.token_ids for one in ours] == [one.token_ids for one in plain.generate(_requests(3))]


def test_the_spare_slot_is_behind_those_of_the_rollouts(model):
    graphs = _Replayed(model)
    cache = SlotCache(dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(4, 128)
    cache.layer(0, torch.zeros(1, 2, 1, 8))
    with pytest.raises(AssertionError):
        graphs.logits([3], [1], cache, used_slots=4)


def test_a_bucket_is_captured_when_it_is_used_again(model, monkeypatch):
    monkeypatch.setattr(decode_graphs, "_LEAST_USES", 3)
    _, graphs = _engines(model)
    sizes, step = [], graphs._graphs._step

    def record(inputs_3B, num_seen, cache):
        sizes.append((inputs_3B.shape[1], num_seen))
        return step(inputs_3B, num_seen, cache)

    monkeypatch.setattr(graphs._graphs, "_step", record)
    one = Request(request_id="x", token_ids=(5, 6, 7), max_tokens=3, seed=0)  # two steps after the prefill
    graphs.generate([one])
    assert not graphs._graphs._captured
    assert sizes == [(4, 16)] * 2  # padded as the graph's
    graphs.generate([one])
    assert len(graphs._graphs._captured) == 1


def test_a_step_is_computed_without_the_deterministic_mode_and_restores_it(model, monkeypatch):
    """In that mode, writing to the cache would sort the positions of all rows."""
    _, graphs = _engines(model)
    modes, hidden = [], type(model).hidden

    def record(*args):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return hidden(*args)

    monkeypatch.setattr(type(model), "hidden", record)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        graphs.generate(_requests(1))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes[0] and not any(modes[1:])  # prefill, steps


def test_the_cache_is_reserved_with_its_padding_at_once(model, monkeypatch):
    _, graphs = _engines(model)
    sizes = []
    reserve = SlotCache.reserve

    def keep(self, num_slots, num_positions, **options):
        reserve(self, num_slots, num_positions, **options)
        if self.num_slots not in sizes:
            sizes.append(self.num_slots)

    monkeypatch.setattr(SlotCache, "reserve", keep)
    graphs.generate(_requests(7))
    assert sizes == [1, DecodeGraphs.num_slots(7)]


def test_a_failed_recording_leaves_the_stream_that_was_current(model, monkeypatch):
    """With stand-ins for CUDA: as in torch, the end of a failed capture leaves its stream the current one."""
    streams = ["default"]

    @contextmanager
    def stream(chosen):
        before = list(streams)
        streams.append(chosen)
        try:
            yield
        finally:
            streams[:] = before

    @contextmanager
    def graph(_, *, stream, **options):
        streams.append(stream)
        yield
        raise RuntimeError("capture invalidated")

    side = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        CUDAGraph=object, Stream=lambda device: side, stream=stream, graph=graph,
        current_stream=lambda device: None,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    graphs, used = DecodeGraphs(model), []
    monkeypatch.setattr(graphs, "_step", lambda *_: used.append(streams[-1]))
    with pytest.raises(RuntimeError, match="capture invalidated"):
        graphs._capture(torch.zeros(3, 1), 1, SlotCache(dtype=torch.float32, device=torch.device("cpu")))
    assert used == [side, side] and streams == ["default"]
