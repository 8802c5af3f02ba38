"""What only runs on GPUs, against stand-ins that keep the order of calls: which GPU is whose, weights from
the ranks straight to vLLM, and vLLM asleep while trainers work. None of it has run on a GPU.
"""

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from outrider.config import validate
from outrider.distributed.engines import VllmEngineActor
from outrider.distributed.learner import Rank, RankGroup
from outrider.distributed.ray_session import Resources
from outrider.distributed.weights import EngineClient, Source
from outrider.engines.vllm.async_engine import AsyncVllm
from outrider.engines.vllm.weight_sum import NAME, Checking, WeightSum, append_sum
from outrider.errors import ClusterFault, EngineFault
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings, RunSettings
from tests.tiny import tiny_model

GPUS: dict[str, Any] = {
    "environment": {"type": "factbook"},
    "algorithm": {"type": "grpo"},
    "engine": {"type": "vllm"},
    "model": {"device": "cuda"},
}


def of(**cluster: Any) -> RunSettings:
    return validate(RunSettings, {**GPUS, "cluster": cluster})


@pytest.mark.parametrize(
    ("cluster", "rank", "engine"),
    [
        ({"num_engines": 2}, ({"CPU": 1, "GPU": 1}, 1), ({"CPU": 1, "GPU": 1}, 1)),
        ({"weights": "nccl", "tensor_parallel": 4}, ({"CPU": 1, "GPU": 1}, 1), ({"CPU": 1, "GPU": 4}, 4)),
        ({"placement": "colocate"}, ({"CPU": 2, "GPU": 1}, 0.5), ({"CPU": 1, "GPU": 1}, 0.5)),
    ],
)
def test_every_process_requests_its_gpus(cluster: dict[str, Any], rank: Any, engine: Any) -> None:
    settings = of(**cluster)
    asked = Resources.from_settings(settings)
    assert settings.has_ranks  # a trainer beside engines is told its GPU by Ray
    assert (asked.rank_bundle, asked.rank["num_gpus"]) == rank
    assert (asked.engine_bundle, asked.engine["num_gpus"]) == engine


def test_no_gpu_is_requested_on_a_cpu() -> None:
    asked = Resources()
    assert asked.rank_bundle == asked.engine_bundle == {"CPU": 1}
    assert asked.rank == asked.engine == {"num_cpus": 1}


class Calls:
    """vLLM's AsyncLLM as far as weights go: refuses what comes in another order than 0.32 allows."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.is_paused = self.is_updating = False
        self.version = "default"
        self.cached = True
        self.taken: list[Any] = []

    async def shutdown_weight_transfer_engine(self) -> None:
        assert not self.is_updating
        self.calls.append("leave")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        assert self.calls[-1] == "leave"
        self.calls.append("meet")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", True)
        self.is_paused = True
        self.calls.append("pause")

    async def sleep(self, level: int) -> None:
        assert not self.is_updating
        self.asleep = {"weights", "kv_cache"}
        self.is_paused = True
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        assert {*tags} <= self.asleep
        assert tags != ["kv_cache"] or not self.is_updating  # it would lie in the way of the weights
        self.asleep -= {*tags}
        self.calls.append(f"wake {tags[0]}")

    async def start_weight_update(self) -> None:
        assert self.is_paused and "weights" not in self.asleep and not self.is_updating
        self.is_updating = True
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        assert self.is_updating
        self.taken.append(request.update_info)
        self.calls.append("update")

    async def finish_weight_update(self, *, weight_version: str) -> None:
        assert self.is_updating
        self.is_updating, self.version, self.cached = False, weight_version, True
        self.calls.append("finish")

    async def reset_prefix_cache(self) -> bool:
        assert not self.is_updating and not self.asleep
        self.cached = False
        self.calls.append("reset")
        return True

    async def resume_generation(self) -> None:
        assert not self.cached and not self.asleep
        self.is_paused = False
        self.calls.append("resume")

    async def get_weight_version(self) -> str:
        return self.version


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> AsyncVllm:
    import sys

    requests = SimpleNamespace(
        WeightTransferInitRequest=SimpleNamespace, WeightTransferUpdateRequest=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", requests)  # type: ignore[arg-type]
    made = AsyncVllm.__new__(AsyncVllm)
    made.llm, made._is_asleep = Calls(), False
    return made


AWAKE = ["pause", "start", "update", "update", "finish", "reset", "resume"]
ASLEEP = [
    "sleep 2", "pause", "wake weights", "start", "update", "update", "finish", "wake kv_cache", "reset",
    "resume",
]  # fmt: skip


@pytest.mark.parametrize(("sleeps", "wanted"), [(False, AWAKE), (True, ASLEEP)])
def test_weights_are_loaded_in_vllm_s_order_around_sleep(
    vllm: AsyncVllm, sleeps: bool, wanted: list[str]
) -> None:
    parts = [save({"a": torch.ones(3)}), save({"b": torch.zeros(2)})]

    async def pieces() -> AsyncIterator[bytes]:
        for one in parts:
            yield one

    async def play() -> int:
        if sleeps:
            await vllm.sleep()
            await vllm.sleep()  # it sleeps once
        return await vllm.load(7, pieces())

    assert asyncio.run(play()) == zlib.crc32(b"".join(parts))
    assert vllm.llm.calls == wanted and vllm.llm.version == "7"
    assert [one["checksum"] for one in vllm.llm.taken] == [zlib.crc32(one) for one in parts]


def test_a_transfer_that_vllm_refuses_is_a_fault_of_the_engine(vllm: AsyncVllm) -> None:
    async def broken(request: Any) -> None:
        raise RuntimeError("CUDA error\nout of memory")

    async def play() -> None:
        vllm.llm.update_weights = broken
        await vllm.begin_update()
        await vllm.take({})

    with pytest.raises(
        EngineFault, match="vLLM did not load new weights: RuntimeError: CUDA error out of memory"
    ):
        asyncio.run(play())


class FakeRay:
    """Calls are coroutines of :class:`AsyncVllm` that have run when they are waited for."""

    exceptions = SimpleNamespace(
        RayTaskError=KeyError, OutOfMemoryError=LookupError, RayError=ArithmeticError
    )

    def __init__(self) -> None:
        self.is_silent = False

    def wait(self, waiting: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], waiting) if self.is_silent else (waiting[:1], waiting[1:])

    def get(self, reference: Any) -> Any:
        return reference[1]


class FakeActor:
    """An engine process that notes what it is asked."""

    def __init__(self, *, lies: bool = False) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._lies = lies

    def __getattr__(self, method: str) -> Any:
        def remote(*given: Any) -> tuple[object, Any]:
            self.asked.append((method, *given))
            return object(), (given[0] + self._lies if method == "end_update" else None)

        return SimpleNamespace(remote=remote)


def test_the_client_assigns_ranks_to_engines_and_checks_the_version() -> None:
    actors = [FakeActor(), FakeActor()]
    client = EngineClient(FakeRay(), actors, tensor_parallel=4, limit_s=1.0)
    assert client.num_receivers == 8
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9})
    client.version = 3
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    offsets = [actor.asked[0][1]["rank_offset"] for actor in actors]
    assert offsets == [1, 5]
    for actor in actors:
        assert [one[0] for one in actor.asked] == ["meet", "begin_update", "take", "end_update"]
        assert actor.asked[-1] == ("end_update", 3)
    assert client.num_calls == 3  # at most four an engine and transfer


def test_an_engine_with_another_version_or_without_a_response_is_named() -> None:
    client = EngineClient(FakeRay(), [FakeActor(), FakeActor(lies=True)], tensor_parallel=1, limit_s=1.0)
    client.version = 3
    with pytest.raises(ClusterFault, match="engine 1 has other weights than version 3"):
        client.finish_weight_update()
    ray = FakeRay()
    ray.is_silent = True
    hasty = EngineClient(ray, [FakeActor()], tensor_parallel=1, limit_s=0.01)
    with pytest.raises(ClusterFault, match=r"engine 0 did not end begin_update within 0.01 s"):
        hasty.start_weight_update()


def test_changed_weights_are_not_sent_under_an_older_version() -> None:
    """An engine died beside an update, and another one is to take what the others have."""
    rank: Any = Rank.__new__(Rank)
    rank._sender = SimpleNamespace(send=lambda version: (8, 3))
    rank._is_sent = False
    rank.teacher = None
    assert rank.send(4) == rank.send(4, True) == (8, 3)
    rank.policy = SimpleNamespace(load=lambda folder, num_steps: None, num_steps=1, learning_rate=0.5)
    rank.load("folder", 1)
    with pytest.raises(ClusterFault, match="the weights of version 4 are no longer there"):
        rank.send(4, True)
    assert rank.send(5) == (8, 3)


def test_all_ranks_receive_calls_in_one_order() -> None:
    """A thread that replaces an engine asks them beside the one that trains: they would wait for each
    other.
    """
    asked: list[list[str]] = [[], []]
    others: list[threading.Thread] = []

    class Actor:
        def __init__(self, number: int) -> None:
            self._number = number

        def __getattr__(self, method: str) -> Any:
            def remote() -> str:
                asked[self._number].append(method)
                if (self._number, method) == (0, "update"):
                    others.append(threading.Thread(target=group.call, args=("send",)))
                    others[0].start()
                    others[0].join(0.5)  # it has the time to come in between
                return method

            return SimpleNamespace(remote=remote)

    group: Any = RankGroup.__new__(RankGroup)
    ray = SimpleNamespace(
        put=lambda one: one, wait=lambda left, **given: (left[:1], left[1:]), get=lambda one: one
    )
    group._ray, group._timeout_s, group._actors = ray, 60.0, [Actor(0), Actor(1)]
    group._call_lock = threading.Lock()
    assert group.call("update") == ["update", "update"]
    others[0].join(60.0)
    assert asked == [["update", "send"], ["update", "send"]]


@pytest.mark.parametrize(
    ("method", "given"), [("meet", {}), ("begin_update", None), ("take", {}), ("end_update", 1)]
)
def test_a_failed_transfer_from_the_ranks_restarts_the_run(
    vllm: AsyncVllm, method: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a vLLM that has ended is an engine that has."""

    async def broken(*given: Any) -> None:
        raise EngineFault("vLLM did not load new weights: out of memory")

    engine: Any = VllmEngineActor(None, 1, "folder", None)  # type: ignore[arg-type]
    engine._engine = SimpleNamespace(is_dead=False, **{method: broken})
    ask = [] if given is None else [given]
    with pytest.raises(
        ClusterFault, match="engine 1: vLLM did not load new weights: out of memory; continue"
    ):
        asyncio.run(getattr(engine, method)(*ask))
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    engine._engine.is_dead = True
    with pytest.raises(ClusterFault):
        asyncio.run(getattr(engine, method)(*ask))
    assert ended == [1]


class Loaded:
    """A model that takes weights."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.found |= dict(weights)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
def test_the_source_describes_its_tensors_and_their_sum_matches(
    lora: LoraSettings | None, tmp_path: Path
) -> None:
    policy = Policy(tiny_model(), OptimizerSettings(), lora=lora)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.1)
    source = Source(policy.model, torch.bfloat16)
    sent = list(source)
    described = [(one.name, one.dtype, one.shape) for one in source.metadata()]
    assert described == [(name, one.dtype, tuple(one.shape)) for name, one in sent]
    assert sent[-1][0] == NAME
    assert source.num_bytes == sum(one.nbytes for _, one in sent[:-1])
    model, found = Loaded(), WeightSum()
    checking = Checking(model, found)
    checking.load_weights(sent[:5])  # packed buffers come one after the other
    assert not checking.is_confirmed
    checking.load_weights(sent[5:])
    assert checking.is_confirmed
    plain = tiny_model().model
    assert model.found.keys() == dict(plain.named_parameters()).keys()
    policy.export(tmp_path)


@pytest.mark.parametrize("how", ["a bit", "an order", "one less"])
def test_other_weights_than_those_sent_are_detected(how: str) -> None:
    sent = list(
        append_sum([("a", torch.randn(5)), ("b", torch.randn(2, 3)), ("c", torch.randn(4).bfloat16())])
    )
    if how == "a bit":
        sent[1][1].view(torch.int32)[0, 0] ^= 1
    elif how == "an order":
        sent[0], sent[1] = sent[1], sent[0]
    else:
        del sent[1]
    with pytest.raises(ValueError, match="did not arrive as they were sent"):
        Checking(Loaded(), WeightSum()).load_weights(sent)
