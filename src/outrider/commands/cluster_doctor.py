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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.algorithms.base import Algorithm
from outrider.config import validate
from outrider.distributed import open_cluster, start_ranks, start_rollout_processes
from outrider.distributed.engines import probes
from outrider.distributed.processes import SHARED_MEMORY
from outrider.doctor import Check, report
from outrider.errors import ClusterFault
from outrider.files import file_checksum
from outrider.printing import plural
from outrider.smoke import save_model
from outrider.trace import Leaf, Trace
from outrider.training.settings import RunSettings
from outrider.training.setup import build, local_learner
from outrider.types import Message, Origin, Outcome, Task

_FILE_BYTES: Final = 128 * 2**20
_WAIT_S: Final = 30.0
_TOLERANCE: Final = 1e-5  # of the gradient's norm: a wrong factor is off by a third at least
_PACKAGES: Final = ("ray", "torch", "transformers", "outrider")


def examine_cluster(*, ray_address: str, folder: Path) -> int:
    """Print a line per part; returns 1 if a part does not work, else 0. ``folder`` is where runs will be."""
    checks = _ClusterChecks(ray_address, folder)
    restart = "the same packages on every machine"
    rows = [
        ("ray", checks.ray, "pip install 'outrider[cluster]'; start Ray on the machines first"),
        ("nodes", checks.nodes, restart),
        ("shared folder", checks.shared_folder, "runs and models belong on storage that all machines share"),
    ]
    if ray_address == "local":
        rows = [
            ("shared memory", checks.shared_memory, "a larger /dev/shm: weights for the engines are there")
        ]
    rows += [
        ("gradient of 2 ranks", checks.gradient, restart),
        ("weights and log-probs of 2 engines", checks.engines, restart),
    ]
    return report(
        [Check(name=name, look=look, advice=advice, required=True) for name, look, advice in rows],
        title="outrider doctor --cluster",
    )


class _ClusterChecks:
    """The checks; the last two start the processes of a run."""

    def __init__(self, ray_address: str, folder: Path) -> None:
        self._address, self._folder = ray_address, folder
        self._nodes: list[Mapping[str, Any]] = []

    def ray(self) -> str:
        """Join the Ray, and examine every node."""
        from outrider.distributed.nodes import RayCluster

        self._folder.mkdir(parents=True, exist_ok=True)
        marker = self._folder / f".outrider-doctor-{uuid.uuid4().hex}"
        with open_cluster(_settings(Path(), self._address)) as cluster:
            assert isinstance(cluster, RayCluster)
            try:
                marker.write_bytes(random.Random(0).randbytes(_FILE_BYTES))
                self._nodes = cluster.on_every_node(
                    _inspect_node, str(marker.resolve()), file_checksum(marker), _PACKAGES
                )
            finally:
                marker.unlink(missing_ok=True)
        return f"{_versions(_PACKAGES)['ray']}, {plural(len(self._nodes), 'node')}"

    def _require_nodes(self) -> list[Mapping[str, Any]]:
        if not self._nodes:
            raise ClusterFault("Ray was not reached")
        return self._nodes

    def nodes(self) -> str:
        """Check that all nodes have the packages of this process."""
        own = _versions(_PACKAGES)
        for node in self._require_nodes():
            if node["versions"] != own:
                raise ClusterFault(f"{node['host']} has {node['versions']}, this process {own}")
        return ", ".join(f"{name} {version}" for name, version in own.items())

    def shared_folder(self) -> str:
        """Check that all nodes can read a file that was written here."""
        nodes = self._require_nodes()
        if missing := [str(node["host"]) for node in nodes if node["seconds"] is None]:
            raise ClusterFault(f"{self._folder.resolve()} is not the same folder on {', '.join(missing)}")
        rate = min(_FILE_BYTES / 1e6 / max(node["seconds"], 1e-9) for node in nodes)
        return f"{self._folder.resolve()}, read at {rate:,.0f} MB/s or more"

    def shared_memory(self) -> str:
        """Measure the free space."""
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        if free < 2 * _FILE_BYTES:
            raise ClusterFault(f"{free / 1e9:.2f} GB of {SHARED_MEMORY} are free")
        return f"{free / 1e9:.1f} GB free"

    def gradient(self) -> str:
        """The norm of a gradient by two ranks and by one process."""
        norms = []
        with self._model() as folder:
            settings = _settings(folder, self._address, num_trainers=2)
            with open_cluster(settings) as cluster:
                for start in (local_learner, partial(start_ranks, cluster=cluster)):
                    with closing(start(settings, initial=False)) as learner:
                        groups = [_group(number) for number in range(4)]
                        result = learner.update(
                            groups, _MinimalAlgorithm(settings), on_batch=lambda num_tokens: None
                        )
                        # missing if the step was skipped
                        norms.append(result.metrics.get("grad/norm", math.nan))
        deviation = abs(norms[1] / norms[0] - 1.0)
        if not deviation < _TOLERANCE:
            raise ClusterFault(f"its norm is {norms[1]:.6g}, and {norms[0]:.6g} in one process")
        return f"norm {norms[0]:.6g}, off by {deviation:.0e} from one process"

    def engines(self) -> str:
        """A transfer with its checksum, and tokens of each engine against the trainer's log-probs."""
        with self._model() as folder:
            settings = _settings(folder, self._address, num_engines=2)
            start_time = time.perf_counter()
            with open_cluster(settings) as cluster:
                parts = build(
                    settings, buffer_path=folder / "buffer.sqlite", resumed=False,
                    on_tokens=lambda num_tokens: None, note=lambda line: None,
                    start_remote=partial(start_rollout_processes, cluster=cluster, folder=folder),
                )  # fmt: skip
                assert parts.remote is not None
                with closing(parts.factory), closing(parts.remote):
                    started_s = time.perf_counter() - start_time
                    parts.engine.load(1)
                    result = parts.learner.update(
                        [], parts.algorithm, on_batch=lambda num_tokens: None, version=1,
                        probes=probes(parts.engine, _group(0), num=2),
                    )  # fmt: skip
        mismatch = result.metrics["gap/logprob_max"]
        if not mismatch < 1e-3:
            raise ClusterFault(f"an engine's log-probs are {mismatch:.2g} nats off the trainer's")
        return f"started in {started_s:.1f} s, {mismatch:.0e} nats off at most"

    @contextmanager
    def _model(self) -> Iterator[Path]:
        """Yield a temporary folder with a tiny model, below the folder of runs with a Ray, whose nodes read
        it.
        """
        parent = None if self._address == "local" else self._folder.resolve()
        with tempfile.TemporaryDirectory(prefix=".outrider-doctor-", dir=parent) as folder:
            save_model(Path(folder))
            yield Path(folder)


class _MinimalAlgorithm(Algorithm):
    """The least that an update needs of an algorithm."""

    def __init__(self, settings: RunSettings) -> None:
        self.objective = settings.algorithm


def _inspect_node(marker: str, checksum: int, packages: Sequence[str]) -> dict[str, Any]:
    """Return the packages of a node, and the seconds in which it reads a file; None if it cannot."""
    start_time = time.perf_counter()
    is_same = Path(marker).is_file() and file_checksum(marker) == checksum
    return {
        "host": socket.gethostname(),
        "versions": _versions(packages),
        "seconds": time.perf_counter() - start_time if is_same else None,
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


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
            "cluster": {"ray_address": ray_address, "placement_timeout_s": _WAIT_S, **cluster},
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
