"""The engine and the update on another device than the CPU: nothing forgets where the model is."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engines.base import Request
from outrider.engines.local.attention import decode_mask
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import LanguageModel
from outrider.trace import Trace
from outrider.training.cold_start import cold_start, successful_paths
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import (
    ColdStartSettings,
    LoraSettings,
    OptimizerSettings,
    UpdateSettings,
)
from outrider.training.update import measure_kl, update
from tests.distributed.groups import distinct_objectives, groups
from tests.far_device import FAR, FarTensor, far_device, moved
from tests.tiny import tiny_model

SETTINGS = UpdateSettings(max_tokens=256, max_logprob_gap=1e9)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    """The tiny model far away, where fused optimisers are not."""
    adam = torch.optim.AdamW

    def plain(*given: Any, fused: bool, **options: Any) -> torch.optim.AdamW:
        return adam(*given, foreach=False, **options)

    monkeypatch.setattr(torch.optim, "AdamW", plain)
    with far_device():
        model = tiny_model(num_layers=1)
        moved(model.model)
        yield model


def _alone() -> list[Trace]:
    """Groups in which no node belongs to several rollouts."""
    return groups(6, longest=20)[::2]


def test_the_device_refuses_what_cuda_refuses() -> None:
    with far_device():
        one = torch.ones(2, device=FAR)
        assert one.device == FAR and (one + torch.tensor(1.0)).tolist() == [2.0, 2.0]
        assert one[torch.tensor([0])].tolist() == [1.0]
        with pytest.raises(RuntimeError, match="same device"):
            one + torch.ones(2)
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2)[torch.zeros(1, dtype=torch.long, device=FAR)]


def test_the_engine_samples_the_same_on_the_far_device(far: LanguageModel) -> None:
    requests = [
        Request(
            request_id=str(i), token_ids=tuple(range(5, 12 + i)), max_tokens=4, seed=i, cache_key=str(i % 4),
            temperature=(1.0, 0.7, 0.0)[i % 3],
        )
        for i in range(4)
    ]  # fmt: skip
    there = LocalEngine(far, max_rows=3)
    here = LocalEngine(tiny_model(num_layers=1), max_rows=3)
    for _ in range(2):  # the second turn goes on in the slots of the first
        ours, theirs = here.generate(requests), there.generate(requests)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        requests = [
            replace(one, token_ids=(*one.token_ids, *done.token_ids, 7))
            for one, done in zip(requests, ours, strict=True)
        ]
    there.release(["0"])
    there.free_cache()
    there.load(1)
    assert [one.token_ids for one in there.generate(requests)] == [
        one.token_ids for one in here.generate(requests)
    ]


@pytest.mark.parametrize("name", [*distinct_objectives()][::9])
def test_every_update_is_the_same_on_the_far_device(far: LanguageModel, name: str) -> None:
    objective = distinct_objectives()[name]
    found = []
    for model in (tiny_model(num_layers=1), far):
        policy = Policy(model, OptimizerSettings(learning_rate=1e-3))
        traces = groups(5, rollouts=2, longest=12)
        traces[4].is_replayed = True
        reference = policy.frozen_copy() if objective.kl_weight > 0 else None
        report = update(policy, traces, objective=objective, settings=SETTINGS, reference=reference)
        found.append(report.metrics)
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"lora": LoraSettings(rank=2)},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"checkpoint_activations": True})),
    ],
)
def test_cold_start_and_checkpoint_are_the_same_on_the_far_device(
    far: LanguageModel, options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses of the cold start, the reward's KL to the model before it, and a checkpoint that is read."""
    values: list[list[float]] = []
    for model in (tiny_model(num_layers=1), far):
        policy = Policy(model, OptimizerSettings(learning_rate=1e-3), **options)
        reference = policy.frozen_copy()
        losses: list[float] = []
        cold_start(
            policy,
            successful_paths(_alone()),
            ColdStartSettings(num_examples=4, batch_size=3),
            run_seed=0,
            max_tokens=SETTINGS.max_tokens,
            on_step=lambda done, total, values, to=losses: to.append(values["sft/loss"]),
        )
        traces = _alone()
        measure_kl(policy, reference, traces, max_tokens=SETTINGS.max_tokens)
        values.append(
            [*losses, *(value for trace in traces for node in trace.nodes for value in node.kl or ())]
        )
    assert len(values[0]) > 20 and values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-4)
    policy.save(tmp_path)
    before = {name: one.tolist() for name, one in policy.masters.items()}
    for one in policy.masters.values():
        one.zero_()
    policy.load(tmp_path, num_steps=policy.num_steps)
    assert {name: one.tolist() for name, one in policy.masters.items()} == before
    assert all(
        isinstance(value, FarTensor)
        for moments in policy.optimizer.state.values()
        for value in moments.values()
    )


def test_the_mask_of_a_step_begins_where_a_gpu_s_kernel_wants_it() -> None:
    stored = torch.tensor([3, 0, 8])
    here = decode_mask(stored, 9, dtype=torch.float32)
    assert here.is_contiguous()
    assert [row.index(float("-inf")) if float("-inf") in row else 9 for row in here[:, 0, 0].tolist()] == [
        4,
        1,
        9,
    ]
    with far_device():
        there = decode_mask(torch.tensor([3, 0, 8], device=FAR), 9, dtype=torch.float32)
        assert there.tolist() == here.tolist()
        assert there.stride(0) == 16 and there.stride(-1) == 1


def test_a_gpu_s_products_get_a_fixed_workspace_and_no_attention_of_cudnn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the test's end takes it back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    monkeypatch.setenv(caches[0], "7")  # the user's
    monkeypatch.delenv(caches[1], raising=False)
    num = torch.get_num_threads()
    try:
        set_threads(num)
        assert [os.environ[name] for name in caches] == ["7", "128"]
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        set_threads(num, device="cuda")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        set_threads(num, device="xpu:0")  # another device of torch
        current: list[int] = []
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        for is_available in (False, True):  # without a GPU, loading the model reports it
            monkeypatch.setattr(torch.cuda, "is_available", lambda found=is_available: found)
            set_threads(num, device="cuda:1")
        assert current == [1]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        set_threads(num)
