"""An engine process with the real vLLM on the CPU: two shards of a tiny model (``tensor_parallel``), merged
adapters, no barrier between turns, and a process of vLLM that dies.
"""

import importlib.util
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.config import validate
from outrider.distributed import open_cluster
from outrider.distributed.remote import RemoteProcesses
from outrider.distributed.weights import Sender, Source
from outrider.engines.base import Request
from outrider.errors import ClusterFault, EngineFault
from outrider.testing import check_engine
from outrider.trace import Trace
from outrider.training.components import Components
from outrider.training.packing import pack
from outrider.training.settings import RunSettings
from outrider.training.update import rollout_paths
from tests.distributed import gloo_transfer
from tests.distributed.command_runs import CommandRuns
from tests.distributed.components import components_on
from tests.engines.test_vllm import exact_logprobs
from tests.tiny import save_tiny_model, tiny_model
from tests.training.tool_run import TAGS, save_model, write_tool_run
from tests.training.whole_runs import metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@dataclass
class Crew:
    """The processes of a run that does not train."""

    parts: Components
    remote: RemoteProcesses
    num_batches: int = 0

    def play(self) -> list[Trace]:
        rollouts = self.remote.rollouts(self.parts, training=True, on_finished=lambda done, pending: None)
        self.num_batches += 1
        tasks = self.parts.train_tasks[:4]
        return list(rollouts.run(tasks, modes=("plain",) * 2, training_step=self.num_batches).traces)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    root = tmp_path_factory.mktemp("vllm")
    settings = validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo", "group_size": 2},
            "engine": {"type": "vllm", "memory": 1},
            "model": {
                "name": str(save_tiny_model(root / "model", hidden_size=128)),  # heads of 32
                "precision": "float32",
                "lora": {"rank": 2},
            },
            "rollout": {"max_turns": 2, "max_turn_tokens": 8},
            "train": {"tasks_per_step": 4},
            "num_threads": 1,
            "cluster": {"num_rollout_workers": 2, "tensor_parallel": 2, "max_restarts": 20},
        },
    )
    with open_cluster(settings) as cluster, components_on(cluster, settings, root) as parts:
        assert isinstance(parts.remote, RemoteProcesses)
        yield Crew(parts, parts.remote)
    until = time.monotonic() + 60
    while vllm_processes():
        assert time.monotonic() < until, vllm_processes()
        time.sleep(0.1)


def vllm_processes() -> dict[int, str]:
    """Those of vLLM that live, by their numbers."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if command.startswith("VLLM::"):
            found[int(entry.name)] = command.strip("\0")
    return found


@torch.no_grad()
def gap(crew: Crew, traces: list[Trace]) -> float:
    """Nats between vLLM's log-probs and the trainer's."""
    policy, apart, num = crew.parts.learner.policy, 0.0, 0  # type: ignore[attr-defined]
    for node in (node for trace in traces for node in trace.nodes if node.trainable):
        node.credit = (1.0,) * len(node.token_ids)  # else nobody scores it
    paths = rollout_paths(traces)
    for batch in pack(paths, max_tokens=4096):
        theirs = policy.score(batch).logprobs_T
        apart = max(apart, float((theirs - batch.engine_logprobs_T).abs().max()))
        num += len(theirs)
    assert num >= 8
    return apart


def test_tokens_are_the_trainer_s_before_and_after_new_weights(crew: Crew) -> None:
    assert sorted(vllm_processes().values()).count("VLLM::EngineCore") == 1
    traces = crew.play()
    assert gap(crew, traces) < 1e-3
    learner = crew.parts.learner
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for master in learner.policy.masters.values():  # type: ignore[attr-defined]
            master.add_(0.2 * torch.randn(master.shape, generator=dice))
        learner.policy.round_masters()  # type: ignore[attr-defined]
    assert gap(crew, traces) > 0.1  # which the old tokens are not
    engine = crew.remote.engine
    engine.load(engine.weight_version + 1)
    assert engine.sent["weights/rpcs"] == 1.0 and engine.sent["weights/bytes"] > 10_000
    renewed = crew.play()
    assert gap(crew, renewed) < 1e-3
    versions = {node.weight_version for trace in renewed for node in trace.nodes if node.trainable}
    assert versions == {engine.weight_version}


def test_the_contract_of_an_engine(crew: Crew) -> None:
    check_engine(crew.remote.engine)


def test_no_turn_waits_for_another_one(crew: Crew) -> None:
    version = crew.remote.engine.weight_version
    ended: list[tuple[str, int]] = []

    def play(name: str, num_tokens: int) -> None:
        request = Request(
            request_id=f"{name}/0", token_ids=(5, 6, 7), max_tokens=num_tokens, seed=1, temperature=1.0
        )
        [generation] = crew.remote.engines["engine 0"].call("generate", name, [request], version).result()
        ended.append((name, len(generation.token_ids)))

    threads = [threading.Thread(target=play, args=(f"long {number}", 400)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(3):
        play(f"short {number}", 1)
    for thread in threads:
        thread.join()
    assert [name for name, _ in ended][:3] == ["short 0", "short 1", "short 2"]
    assert max(num for _, num in ended) > 100


def test_weights_of_another_version_are_refused(crew: Crew) -> None:
    engine = crew.remote.engine
    newest = engine.weight_version
    engine.weight_version = newest - 1
    try:
        with pytest.raises(ClusterFault, match=f"has weights of version {newest}"):
            engine.generate([Request(request_id="g/0", token_ids=(5,), max_tokens=2, seed=1)])
    finally:
        engine.weight_version = newest


@pytest.mark.parametrize("which", ["VLLM::EngineCore", "engine 0"])
def test_a_process_that_dies_is_replaced_with_all_that_it_started(crew: Crew, which: str) -> None:
    before = vllm_processes()
    cores = [number for number, name in before.items() if name == "VLLM::EngineCore"]
    os.kill(crew.remote.engines[which].pid if which == "engine 0" else cores[0], signal.SIGKILL)
    traces = crew.play()
    assert gap(crew, traces) < 1e-3
    counts = crew.remote.repairs.pop_counts()
    assert counts["cluster/engine_deaths"] == 1.0 and 1.0 <= counts["rollout/num_groups_replayed"] <= 4.0
    until = time.monotonic() + 60
    while before.keys() & vllm_processes().keys():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_run_of_two_steps_from_the_command_line(tmp_path: Path) -> None:
    """Two trainer ranks with adapters, an engine with vLLM, requests one by one: the second step's tokens are
    of weights that the first one moved, and nothing is left behind.
    """
    write_tool_run(tmp_path)
    shutil.rmtree(tmp_path / "model")
    save_model(tmp_path / "model", TAGS, hidden_size=128)  # heads of 32: vLLM has no smaller ones
    recipe = tmp_path / "plain.toml"
    recipe.write_text((tmp_path / "recipe.toml").read_text().replace("num_hybrid = 2", ""))
    before, run = vllm_processes(), tmp_path / "run"
    CommandRuns().run(
        "train", recipe, "--run", run, "--progress", "plain", "algorithm.type=grpo", "algorithm.group_size=4",
        "engine.type=vllm", "engine.memory=1", "model.lora.rank=2", "optimizer.learning_rate=1e-2",
        "train.num_steps=2", "evaluation.every=0", "evaluation.num_tasks=1", "cluster.num_trainers=2",
        "cluster.weights=files",
        timeout=600,
    )  # fmt: skip
    first, second = (one for one in metrics(run) if one["kind"] == "train")
    assert first["grad/norm"] > 0 and first["weights/rpcs"] == 1
    assert max(first["gap/logprob_max"], second["gap/logprob_max"]) < 1e-3
    assert vllm_processes().keys() <= before.keys()


def test_vllm_s_own_sender_takes_what_the_ranks_give(crew: Crew) -> None:
    """As far as it goes without a GPU: names, types and shapes are those that were told before."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    model = crew.parts.learner.language_model.model
    source = Source(model, torch.bfloat16)
    sent = list(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    assert len(sent) == 1 + len([name for name, _ in model.named_parameters() if ".lora_" not in name])


def test_what_vllm_s_receivers_load_passes_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from outrider.engines.vllm.weight_sum import append_sum
    from outrider.engines.vllm.weights import CheckedNccl

    events: list[str] = []
    for name in ("start_weight_update", "finish_weight_update"):
        monkeypatch.setattr(NCCLWeightTransferEngine, name, lambda self, name=name: events.append(name))
    monkeypatch.setattr(
        NCCLWeightTransferEngine, "receive_weights", lambda self, info: self.model.load_weights(info)
    )

    class Model:
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            events.extend(name for name, _ in weights)

    engine = CheckedNccl.__new__(CheckedNccl)
    engine.model = Model()
    sent = list(append_sum([("a", torch.ones(2)), ("b", torch.zeros(3))]))
    engine.start_weight_update()
    engine.receive_weights(sent[:1])
    with pytest.raises(ValueError, match="without their sum"):
        engine.finish_weight_update()
    engine.receive_weights(sent[1:])
    engine.finish_weight_update()
    assert events == ["start_weight_update", "a", "b", "finish_weight_update"]
    assert isinstance(engine.model, Model)


def test_the_real_sender_and_receiver_transfer_weights_in_several_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo in place of NCCL: after each transfer tokens have the trainer's log-probs."""
    from vllm.distributed.weight_transfer import nccl_engine

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo_transfer.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gloo_transfer.replace_nccl(monkeypatch.setattr)
    small = partial(nccl_engine.NCCLTrainerInitInfo, packed_buffer_size_bytes=150_000)
    monkeypatch.setattr(nccl_engine, "NCCLTrainerInitInfo", small)
    model = tiny_model(hidden_size=128)
    with gloo_transfer.engine(save_tiny_model(tmp_path / "model", hidden_size=128)) as client:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        sender = Sender(Source(model.model, torch.float32), client, rank=0, address=address)
        dice = torch.Generator().manual_seed(5)
        request = Request(request_id="r", token_ids=(5, 6, 7), max_tokens=8, seed=1)
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=dice))
            num_bytes, num_calls = sender.send(version)
            assert num_bytes == 4 * sum(parameter.numel() for parameter in model.model.parameters())
            assert num_bytes > 300_000 and num_calls == 3
            generation = client.ask("stream", request, version)
            exact = exact_logprobs(model, request.token_ids, generation.token_ids)
            assert generation.logprobs == pytest.approx(exact, abs=1e-3)
        with pytest.raises(EngineFault, match="of version"):
            client.ask("stream", request, 1)
        sender.close()
