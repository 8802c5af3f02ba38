"""Code for GPUs with stand-ins that check the order of calls: the GPUs of each process, weights from the
ranks to vLLM, and vLLM asleep while trainers work. None of it has run on a GPU.
"""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import validate
from outrider.distributed.engines import VllmProcess
from outrider.distributed.learner import Rank, RankGroup
from outrider.distributed.processes import Cluster
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


def settings(**cluster: Any) -> RunSettings:
    return validate(RunSettings, {**GPUS, "cluster": cluster})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A machine with eight GPUs, of which 2 to 7 are visible, without a process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5,6,7")
    cluster = Cluster.__new__(Cluster)
    cluster._gpus = {}
    return cluster


@pytest.mark.parametrize(
    ("given", "visible"),
    [
        ({"num_trainers": 2, "num_engines": 2}, {"rank": ["2", "3"], "engine": ["4", "5"]}),
        ({"num_engines": 1, "tensor_parallel": 4}, {"rank": ["2"], "engine": ["3,4,5,6"]}),
        (
            {"placement": "colocate", "num_trainers": 2, "num_engines": 2},
            {"rank": ["2", "3"], "engine": ["2", "3"]},
        ),
    ],
)
def test_every_process_sees_its_gpus_and_workers_see_none(
    machine: Cluster, given: dict[str, Any], visible: dict[str, list[str]]
) -> None:
    machine.reserve(settings(**given), "ranks")
    for kind, gpus in visible.items():
        for number, own in enumerate(gpus):
            assert machine._environ((kind, number))["CUDA_VISIBLE_DEVICES"] == own  # type: ignore[arg-type]
    assert machine._environ(("worker", 0))["CUDA_VISIBLE_DEVICES"] == ""


def test_too_few_gpus_are_one_line_and_a_cpu_needs_none(machine: Cluster) -> None:
    with pytest.raises(ClusterFault, match="need 8 GPUs, and 6 are seen here"):
        machine.reserve(settings(num_trainers=4, num_engines=4), "ranks")
    machine.reserve(validate(RunSettings, {**GPUS, "model": {}, "cluster": {"num_engines": 9}}), "ranks")
    assert "CUDA_VISIBLE_DEVICES" not in machine._environ(("engine", 0))


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
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", requests)
    made = AsyncVllm.__new__(AsyncVllm)
    made.llm, made._is_asleep = Calls(), False
    return made


AWAKE = ["pause", "start", "update", "finish", "reset", "resume"]
ASLEEP = [
    "sleep 2", "pause", "wake weights", "start", "update", "finish", "wake kv_cache", "reset",
    "resume",
]  # fmt: skip


@pytest.mark.parametrize(("sleeps", "expected"), [(False, AWAKE), (True, ASLEEP)])
def test_weights_are_loaded_in_vllm_s_order_around_sleep(
    vllm: AsyncVllm, sleeps: bool, expected: list[str]
) -> None:
    async def play() -> None:
        if sleeps:
            await vllm.sleep()
            await vllm.sleep()  # it sleeps once
        await vllm.load(7, "weights-7.safetensors", 5)

    asyncio.run(play())
    assert vllm.llm.calls == expected and vllm.llm.version == "7"
    assert vllm.llm.taken == [{"path": "weights-7.safetensors", "checksum": 5}]


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


class FakeProcess:
    """An engine process that records its calls."""

    def __init__(self, *, error: int = 0) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._error = error

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        self.calls.append((method, *arguments))
        result: Future[Any] = Future()
        result.set_result(arguments[0] + self._error if method == "end_update" else None)
        return result


def test_the_client_assigns_ranks_to_engines_and_checks_the_version() -> None:
    engines: list[Any] = [FakeProcess(), FakeProcess()]
    client = EngineClient(engines, tensor_parallel=4)
    assert client.num_receivers == 8
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9})
    client.version = 3
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    assert [engine.calls[0][1]["rank_offset"] for engine in engines] == [1, 5]
    for engine in engines:
        assert [call[0] for call in engine.calls] == ["meet", "begin_update", "take", "end_update"]
        assert engine.calls[-1] == ("end_update", 3)
    assert client.num_calls == 3  # at most four per engine and transfer
    wrong: Any = FakeProcess(error=1)
    with pytest.raises(ClusterFault, match="engine 1 has other weights than version 0"):
        EngineClient([*engines[:1], wrong], tensor_parallel=1).finish_weight_update()


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
    """A thread that replaces an engine calls them concurrently with the one that trains: in different orders,
    the ranks would wait for each other.
    """
    calls: list[str] = []
    others: list[threading.Thread] = []

    def call_all(ranks: Any, method: str) -> list[str]:
        calls.append(f"{method} begins")
        if method == "update":
            others.append(threading.Thread(target=group.call, args=("send",)))
            others[0].start()
            others[0].join(0.2)  # it has the time to come in between
        calls.append(f"{method} ends")
        return [method]

    group: Any = RankGroup.__new__(RankGroup)
    group._cluster, group._ranks, group._call_lock = (
        SimpleNamespace(call_all=call_all),
        [None],
        threading.Lock(),
    )
    assert group.call("update") == ["update"]
    others[0].join(60.0)
    assert calls == ["update begins", "update ends", "send begins", "send ends"]


@pytest.mark.parametrize(
    ("method", "given"), [("meet", {}), ("begin_update", None), ("take", {}), ("end_update", 1)]
)
def test_a_failed_transfer_from_the_ranks_restarts_the_run(
    vllm: AsyncVllm, method: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a vLLM that has ended is an engine that has."""

    async def broken(*given: Any) -> None:
        raise EngineFault("vLLM did not load new weights: out of memory")

    engine: Any = VllmProcess(None, 1, "folder")  # type: ignore[arg-type]
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


def test_vllm_finishes_running_requests_before_an_update_begins() -> None:
    """vLLM would sample the rest of a request that has just begun with new weights."""
    events: list[str] = []

    class Vllm:
        is_dead = False

        async def stream(self, request: Any, version: int) -> Any:
            await asyncio.sleep(0.05)
            events.append("sampled")
            return SimpleNamespace(token_ids=(1,))

        async def begin_update(self) -> None:
            events.append("update")

    async def both() -> None:
        process = VllmProcess.__new__(VllmProcess)
        VllmProcess.__init__(process, None, 0, "")  # type: ignore[arg-type]
        process._engine, process._version = Vllm(), 3  # type: ignore[assignment]
        turn = asyncio.ensure_future(process.generate(None, [SimpleNamespace()], 3))  # type: ignore[list-item]
        await asyncio.sleep(0)  # the turn has passed the check of its version
        await process.begin_update()
        await turn

    asyncio.run(both())
    assert events == ["sampled", "update"]


def test_ranks_that_have_ended_are_named() -> None:
    group: Any = RankGroup.__new__(RankGroup)
    group._ranks, group._call_lock = [], threading.Lock()
    with pytest.raises(ClusterFault, match="the trainer ranks have ended"):
        group.call("load")
