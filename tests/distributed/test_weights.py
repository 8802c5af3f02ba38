"""Weights in files: what arrives is what was sent, and an engine with other weights refuses requests."""

import os
import socket
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import validate
from outrider.distributed import processes
from outrider.distributed import weights as module
from outrider.distributed.engines import EnginePool, EngineProcess, GroupEngine
from outrider.distributed.recipe import Recipe
from outrider.distributed.weights import Parcel, WeightFiles, engine_weights, pieces, read
from outrider.engines.base import LocalSettings, Request
from outrider.engines.local.engine import LocalEngine
from outrider.errors import ClusterFault, ConfigError
from outrider.plugins import registry
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, RunSettings
from tests.tiny import tiny_model

Usage = namedtuple("Usage", "free")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of a cluster that knows folders; its shared memory is a folder."""
    for name in ("memory", "outrider-1-a"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "memory")
    notes: list[str] = []
    return SimpleNamespace(is_local=True, folder=tmp_path / "outrider-1-a", note=notes.append, notes=notes)


def weights() -> dict[str, torch.Tensor]:
    """Views, half precision, and values that equal no number."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(8, 6, generator=generator)
    return {
        "view": whole[2:5].t(),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "whole": whole,
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.full(tensor.shape, 7.0, dtype=tensor.dtype) for name, tensor in weights().items()}


def test_weights_arrive_bit_for_bit_and_their_files_are_removed(cluster: Any, tmp_path: Path) -> None:
    files = WeightFiles(cluster, tmp_path / "run")
    parcel = files.write(weights(), 4)
    for _ in range(2):  # several engines read it
        arrived = empty()
        assert read(parcel, arrived, version=None) == sum(each.nbytes for each in weights().values())
        for name, tensor in weights().items():
            same = arrived[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
            assert torch.equal(*same), name
    files.write({**weights(), "half": torch.zeros(5)}, 5)
    assert len(list(tmp_path.rglob("weights-*"))) == 2  # an engine may still read the one before
    files.drop_older()
    assert [path.name for path in tmp_path.rglob("weights-*")] == ["weights-5.safetensors"]
    files.close()
    assert not list(tmp_path.rglob("weights-*"))


def test_only_changed_tensors_are_read_and_unchanged_weights_are_not_written(
    cluster: Any, tmp_path: Path
) -> None:
    files = WeightFiles(cluster, tmp_path)
    files.write(weights(), 0)
    unchanged = files.write(weights(), 1)  # NaN, too
    files.drop_older()
    assert unchanged.path.endswith("weights-0.safetensors") and unchanged.changed == ()
    assert read(unchanged, {}, version=0) == 0
    assert read(unchanged, empty(), version=None) > 0  # an engine that replaces another one
    changed = files.write({**weights(), "odd": torch.tensor([float("nan"), float("inf"), 0.0])}, 2)
    assert changed.changed == ("odd",)
    arrived = empty()
    assert read(changed, arrived, version=1) == 12 and (arrived["half"] == 7).all()
    # an engine that missed a version
    assert read(changed, arrived, version=0) > 12 and (arrived["half"] != 7).all()


def test_weights_that_do_not_fit_into_shared_memory_are_on_disk(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.nbytes for tensor in weights().values())
    usage = {"free": 2 * size}
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(**usage))
    parcel = WeightFiles(cluster, tmp_path).write(weights(), 0)
    assert Path(parcel.path).parent == cluster.folder
    assert "no room for two versions of the weights" in cluster.notes[0]
    usage["free"] += 1
    parcel = WeightFiles(cluster, tmp_path).write(weights(), 0)
    assert Path(parcel.path).parent == tmp_path / "memory" / cluster.folder.name and len(cluster.notes) == 1
    cluster.is_local = False
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights-9.safetensors").write_text("of a run that was killed")
    WeightFiles(cluster, tmp_path / "run").write(weights(), 0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["weights-0.safetensors"]


def test_other_weights_than_those_sent_are_refused(cluster: Any, tmp_path: Path) -> None:
    parcel = WeightFiles(cluster, tmp_path).write(weights(), 4)
    with pytest.raises(ClusterFault, match=r"another model were sent: half \(5,\)"):
        read(parcel, {**empty(), "half": torch.zeros(6)}, version=None)
    with pytest.raises(ClusterFault, match="another model were sent: half"):
        read(parcel, {name: each for name, each in empty().items() if name != "half"}, version=None)
    data = bytearray(Path(parcel.path).read_bytes())
    data[-1] ^= 1
    Path(parcel.path).write_bytes(data)
    with pytest.raises(ClusterFault, match="did not arrive as they were sent"):
        read(parcel, empty(), version=None)
    Path(parcel.path).unlink()
    with pytest.raises(ClusterFault, match="all machines share"):
        read(parcel, empty(), version=None)


def test_a_file_that_cannot_be_written_is_a_fault(cluster: Any, tmp_path: Path) -> None:
    files = WeightFiles(cluster, tmp_path)
    Path(files.write(weights(), 0).path).parent.rename(tmp_path / "gone")
    with pytest.raises(ClusterFault, match=r"the weights for the engines: .*weights-1"):
        files.write(weights(), 1)


def test_the_fork_server_of_a_killed_run_removes_its_files(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(processes, "_PRELOADED", ())
    WeightFiles(cluster, tmp_path).write(weights(), 0)
    own, other = socket.socketpair()
    pid = os.fork()
    if not pid:
        own.close()
        processes.run_fork_server(other.fileno(), str(cluster.folder))
    other.close()
    own.close()  # as the kernel does after a kill
    assert os.waitpid(pid, 0)[1] == 0
    assert not cluster.folder.exists() and not list((tmp_path / "memory").iterdir())


@pytest.mark.parametrize("part", [{"trained_layers": 1}, {}])
def test_an_engine_with_the_same_model_gets_the_trained_tensors(part: dict[str, Any]) -> None:
    policy = Policy(tiny_model(), OptimizerSettings(), **part)
    model = policy.model
    learner: Any = SimpleNamespace(
        language_model=SimpleNamespace(model=model), trained_parameters=set(policy.masters)
    )
    sent = engine_weights(learner, LocalSettings())
    assert sent.keys() == policy.masters.keys()
    assert (len(sent) < len(dict(model.named_parameters()))) == bool(part)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_pieces_hold_every_name_once_in_order_and_have_room(sizes: list[int], room: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    found = list(pieces(named, room=room))
    assert [name for piece in found for name in piece] == list(named)
    for piece in found:
        assert piece and (len(piece) == 1 or sum(named[name] for name in piece) <= room)
    for piece, after in pairwise(found):  # none had room for the next name
        assert sum(named[name] for name in piece) + named[after[0]] > room


@pytest.fixture(scope="module")
def settings(folder: Path) -> RunSettings:
    return validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo"},
            "model": {"name": str(folder), "precision": "float32"},
            "num_threads": 1,
        },
    )


class Direct:
    """An engine process in this process."""

    def __init__(self, name: str, engine: EngineProcess) -> None:
        self.name, self.engine = name, engine

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        return lambda: getattr(self.engine, method)(*arguments)


def newest(pool: EnginePool) -> Parcel:
    assert pool._files.newest is not None
    return pool._files.newest


def test_engines_serve_one_version_and_no_older_one(
    settings: RunSettings, cluster: Any, tmp_path: Path
) -> None:
    engine, second = (EngineProcess(Recipe.from_settings(settings), n, str(tmp_path)) for n in (0, 1))
    engine.build()
    request = [Request(request_id="g/0/0", token_ids=(5, 6, 7), max_tokens=4, seed=1, cache_key="g/0")]
    with pytest.raises(ClusterFault, match="engine 0 has no weights yet, and version 0 was requested"):
        engine.generate("one", request, 0)
    policy = Policy(tiny_model(), OptimizerSettings())
    model = policy.model
    learner: Any = SimpleNamespace(
        language_model=SimpleNamespace(model=model, tokenizer=None), trained_parameters=set(policy.masters)
    )
    cluster.wait = lambda calls: {name: call() for name, call in calls.items()}
    remote: Any = SimpleNamespace(
        settings=settings, cluster=cluster, engines={"engine 0": Direct("engine 0", engine)}
    )
    pool = EnginePool(learner, remote, WeightFiles(cluster, tmp_path), context_length=64)
    pool.load(0)
    [first] = engine.generate("one", request, 0)
    assert first.weight_version == 0 and pool.sent["weights/bytes"] > 0
    own = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():  # num_steps of the policy stays, as in a cold start
        for tensor in model.parameters():
            tensor.mul_(1.5)
    pool.load(1)
    [other] = engine.generate("one", request, 1)
    assert other.weight_version == 1 and other.logprobs != first.logprobs
    with pytest.raises(ClusterFault, match="weights of version 1, and version 0 was requested"):
        engine.generate("one", request, 0)
    with pytest.raises(ClusterFault, match="weights of version 1, and was sent 0"):
        engine.load(replace(newest(pool), version=0))
    pool.load(2)  # an update without a step
    assert pool.sent["weights/bytes"] == 0
    assert engine.generate("one", request, 2)[0].logprobs == other.logprobs
    second.build()  # a replacement after it gets all tensors
    assert second.load(newest(pool)) == sum(tensor.nbytes for tensor in own.values())
    assert second.generate("one", request, 2)[0].logprobs == other.logprobs
    engine.end_group("one")
    with pytest.raises(ClusterFault, match="one has ended"):  # a turn of a lost worker
        engine.generate("one", request, 2)
    assert engine._groups == {}
    # no cached key or value of version 2 is used under version 3
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(own[name])
    pool.load(3)
    [again] = engine.generate("two", request, 3)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    # an incomplete transfer is used by no request
    with pytest.raises(ClusterFault, match="did not arrive"):
        engine.load(replace(newest(pool), version=4, checksum=1, previous=None))
    with pytest.raises(ClusterFault, match="has no weights yet"):
        engine.generate("two", request, 3)


class Tasks:
    """An environment as an object has its methods."""

    def tasks(self, split: str) -> tuple[()]:
        return ()

    def make(self) -> None:
        """Never called."""


def test_an_object_instead_of_a_name_is_refused(settings: RunSettings) -> None:
    with (
        registry.substitute({"environments": Tasks()}),
        pytest.raises(ConfigError, match="an object was given for environments"),
    ):
        Recipe.from_settings(settings)


def test_a_group_releases_keys_and_values_with_its_next_requests() -> None:
    """Calls may overtake each other, and the cache of a finished rollout would be found by another one."""
    calls: list[tuple[Any, ...]] = []

    def call(method: str, *arguments: Any) -> Any:
        calls.append((method, *arguments))
        return SimpleNamespace(result=list)

    process: Any = SimpleNamespace(call=call)
    group = GroupEngine(
        process=process, name="g", tokenizer=None, context_length=8, weight_version=0, is_alone=True
    )  # type: ignore[arg-type]
    group.release(["a", "b"])
    for _ in range(2):
        group.generate([])
    group.close()
    assert calls == [
        ("generate", "g", [], 0, False, ["a", "b"]), ("generate", "g", [], 0, False, []), ("end_group", "g"),
    ]  # fmt: skip


def test_groups_share_packed_weights_and_nothing_that_belongs_to_a_cache() -> None:
    """Captured decoding steps refer to one cache: shared ones would be dropped at every turn of another."""
    engine = LocalEngine(tiny_model())
    group = engine.with_own_cache()
    assert group._packed is engine._packed
    assert all(getattr(group, name) is not getattr(engine, name) for name in ("_cache", "_slots", "_graphs"))
