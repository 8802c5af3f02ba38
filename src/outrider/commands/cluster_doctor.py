"""``outrider doctor --cluster``: what a run on several processes needs, tried with a tiny model of random
weights.
"""

import importlib.metadata
import math
import random
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.algorithms.base import Algorithm
from outrider.config import validate
from outrider.distributed import remote_rollouts, sharded_learner
from outrider.distributed.engines import probes
from outrider.distributed.ray_session import Session, on_node
from outrider.distributed.weights import Carrier, ObjectStore
from outrider.doctor import Check, report
from outrider.errors import ClusterFault
from outrider.printing import plural
from outrider.smoke import save_model
from outrider.trace import Leaf, Trace
from outrider.training.settings import RunSettings
from outrider.training.setup import build, local_learner
from outrider.types import Message, Origin, Outcome, Task

_BLOB_BYTES: Final = 128 * 2**20
_WAIT_S: Final = 30.0
_TOLERANCE: Final = 1e-5  # of the gradient's norm: a wrong factor is off by a third at least
_PACKAGES: Final = ("ray", "torch", "transformers", "outrider")


def examine_cluster(*, ray_address: str, folder: Path) -> int:
    """Print a line a part; 1 where something does not work, else 0. ``folder`` is where runs will be."""
    cluster_checks = _ClusterChecks(ray_address, folder)
    restart = "the same packages on every machine"
    checks = [
        ("ray", cluster_checks.ray, "pip install 'outrider[cluster]'; start Ray on the machines first"),
        ("nodes", cluster_checks.nodes, restart),
        (
            "shared folder",
            cluster_checks.shared_folder,
            "runs and models belong on storage that all machines see",
        ),
        ("shared memory", cluster_checks.shared_memory, "a larger /dev/shm: Ray's object store is there"),
        ("object store", cluster_checks.object_store, "see the network between the machines"),
        ("gradient of 2 ranks", cluster_checks.gradient, restart),
        ("weights and log-probs of 2 engines", cluster_checks.engines, restart),
    ]
    try:
        return report(
            [Check(name=name, look=look, advice=advice, required=True) for name, look, advice in checks],
            title="outrider doctor --cluster",
        )
    finally:
        cluster_checks.close()


class _ClusterChecks:
    """The checks; the first ones share a Ray, the last two start what a run starts."""

    def __init__(self, ray_address: str, folder: Path) -> None:
        self._address, self._folder = ray_address, folder
        self._session: Session | None = None
        self._node_reports: list[Mapping[str, Any]] = []

    def ray(self) -> str:
        """Start or join it, and look at every node."""
        settings = _settings(Path(), self._address)
        self._session = Session(settings.cluster)
        ray = self._session.ray
        marker = self._folder / f".outrider-doctor-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(marker.name)
        try:
            carrier = ObjectStore(ray)
            blob = carrier.put(random.Random(0).randbytes(_BLOB_BYTES))
            reports = [
                ray.remote(num_cpus=0, scheduling_strategy=on_node(node["NodeID"]))(_inspect_node).remote(
                    str(marker.resolve()), carrier, [blob]
                )
                for node in ray.nodes()
                if node["Alive"]
            ]
            self._node_reports = ray.get(reports, timeout=settings.cluster.placement_timeout_s)
        finally:
            marker.unlink()
        cpus = ray.cluster_resources().get("CPU", 0)
        return (
            f"{ray.__version__}, {plural(len(self._node_reports), 'node')}, "
            f"{plural(cpus, 'processor')} for actors"
        )

    def _nodes(self) -> list[Mapping[str, Any]]:
        if not self._node_reports:
            raise ClusterFault("Ray was not reached")
        return self._node_reports

    def nodes(self) -> str:
        """Whether all have the packages of this process."""
        own = _versions()
        for node in self._nodes():
            if node["versions"] != own:
                raise ClusterFault(f"{node['host']} has {node['versions']}, this process {own}")
        return ", ".join(f"{name} {version}" for name, version in own.items())

    def shared_folder(self) -> str:
        """Whether all see a file that was written here."""
        if blind := [str(node["host"]) for node in self._nodes() if not node["sees"]]:
            raise ClusterFault(f"{self._folder.resolve()} is not seen by {', '.join(blind)}")
        return str(self._folder.resolve())

    def shared_memory(self) -> str:
        """The least that is free."""
        least = min(self._nodes(), key=lambda node: int(node["shm"]))
        if least["shm"] < 2 * _BLOB_BYTES:
            raise ClusterFault(f"{least['host']}: {least['shm'] / 1e9:.2f} GB of /dev/shm are free")
        return f"{least['shm'] / 1e9:.1f} GB free on {least['host']}"

    def object_store(self) -> str:
        """Megabytes a second of one object to every node."""
        rates = [_BLOB_BYTES / 1e6 / max(node["seconds"], 1e-9) for node in self._nodes()]
        return f"{min(rates):,.0f} MB/s at least"

    def gradient(self) -> str:
        """The norm of a gradient by two ranks and by one process."""
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder))
            norms = []
            for num_trainers in (1, 2):
                settings = _settings(Path(folder), self._address, num_trainers=num_trainers)
                start = local_learner if num_trainers == 1 else sharded_learner
                learner = start(settings, initial=False)
                try:
                    groups = [_group(number) for number in range(4)]
                    result = learner.update(
                        groups, _MinimalAlgorithm(settings), on_batch=lambda num_tokens: None
                    )
                    # missing if the step was skipped
                    norms.append(result.metrics.get("grad/norm", math.nan))
                finally:
                    learner.close()
        deviation = abs(norms[1] / norms[0] - 1.0)
        if not deviation < _TOLERANCE:
            raise ClusterFault(f"its norm is {norms[1]:.6g}, and {norms[0]:.6g} in one process")
        return f"norm {norms[0]:.6g}, off by {deviation:.0e} from one process"

    def engines(self) -> str:
        """A transfer with its checksum, and tokens of each engine against the trainer's log-probs."""
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder))
            settings = _settings(Path(folder), self._address, num_engines=2, weights="store")
            start_time = time.perf_counter()
            parts = build(
                settings, buffer_path=Path(folder) / "buffer.sqlite", resumed=False,
                on_tokens=lambda num_tokens: None, note=lambda line: None, start_remote=remote_rollouts,
            )  # fmt: skip
            try:
                assert parts.remote is not None
                started_s = time.perf_counter() - start_time
                parts.engine.load(1)
                result = parts.learner.update(
                    [], parts.algorithm, on_batch=lambda num_tokens: None, version=1,
                    probes=probes(parts.engine, _group(0), num=2),
                )  # fmt: skip
            finally:
                if parts.remote is not None:
                    parts.remote.close()
                parts.factory.close()
        mismatch = result.metrics["gap/logprob_max"]
        if not mismatch < 1e-3:
            raise ClusterFault(f"an engine's log-probs are {mismatch:.2g} nats off the trainer's")
        return f"started in {started_s:.1f} s, {mismatch:.0e} nats off at most"

    def close(self) -> None:
        """End the Ray that was started here; may be called twice."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _MinimalAlgorithm(Algorithm):
    """The least that an update needs of an algorithm."""

    def __init__(self, settings: RunSettings) -> None:
        self.objective = settings.algorithm


def _inspect_node(marker: str, carrier: Carrier, blobs: Sequence[Any]) -> dict[str, Any]:
    """On a node: what is there, and how long an object takes. In a list, so that Ray does not fetch it
    before.
    """
    start_time = time.perf_counter()
    assert all(len(carrier.get(blob)) == _BLOB_BYTES for blob in blobs)
    seconds = time.perf_counter() - start_time
    path = Path(marker)
    return {
        "host": socket.gethostname(),
        "versions": _versions(),
        "sees": path.is_file() and path.read_text() == path.name,
        "shm": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "seconds": seconds,
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _settings(model: Path, ray_address: str, **cluster: Any) -> RunSettings:
    return validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo", "group_size": 2},
            "model": {"name": str(model), "precision": "float32"},
            # the groups' log-probs are drawn: no engine wrote them
            "update": {"max_logprob_gap": 1e9},
            "num_threads": 1,
            "cluster": {
                "ray_address": ray_address,
                "update_timeout_s": 300.0,
                "placement_timeout_s": _WAIT_S,
                **cluster,
            },
        },
    )


def _group(number: int) -> Trace:
    """Two rollouts with one prompt, tokens drawn by the number, one better than the other."""
    rng = random.Random(number)
    trace = Trace(task=Task(key=f"doctor/{number}", question=""), modes=("plain",) * 2)
    message = Message(role="user", content="")

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 90) for _ in range(size))

    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids(9), message=message)
    for rollout, value in enumerate((1.0, -1.0)):
        response_ids = ids(5 + number)
        node = trace.append(
            parent=root.node_id, origin=Origin.POLICY, token_ids=response_ids, message=message,
            logprobs=(-4.5,) * len(response_ids), entropies=(1.0,) * len(response_ids),
            credit=(value,) * len(response_ids),
        )  # fmt: skip
        trace.finish(
            Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value)
        )
    return trace
