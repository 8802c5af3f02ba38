"""Processes on the machines of a Ray: Ray reserves processors and GPUs and places them, nothing else."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

from outrider.distributed.processes import (
    AGAIN,
    Address,
    Cluster,
    Kind,
    Place,
    Process,
    Server,
    Spec,
    cpu_seconds,
)
from outrider.errors import ClusterFault, NoRepair
from outrider.training.settings import RunSettings

_KINDS: Final = {"CPU": "processors", "GPU": "GPUs"}
_CONNECT_TIMEOUT_S: Final = 5.0  # of one attempt
_CPU_TIMEOUT_S: Final = 10.0
_BETWEEN_STARTS_S: Final = 0.5
_OWN_END: Final = {"RAY_kill_child_processes_on_worker_exit": "0"}


class RayCluster(Cluster):
    """The processes of a run on the machines of an existing Ray. Raises ClusterFault if it cannot be
    reached.
    """

    @property
    def is_local(self) -> bool:
        return False

    def _begin(self) -> None:
        # otherwise a call after the end would start or find another Ray
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise 15, but the ranks are the main work
        for name, value in _OWN_END.items():
            os.environ.setdefault(name, value)
        self._ray: Any = import_module("ray")
        self._groups: dict[Kind, Any] = {}
        self._actors: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        address = self.settings.ray_address
        until = time.monotonic() + self.settings.placement_timeout_s
        try:
            # Ray itself would try an address without a listener for many minutes
            host, separator, port = address.removeprefix("ray://").rpartition(":")
            if separator and port.isdigit():
                _wait_until_reachable(host, int(port), until)
            with _own_sigterm():
                self._ray.init(
                    address=address, namespace="outrider", log_to_driver=False, logging_level="ERROR"
                )
        except Exception as error:  # an unreachable cluster raises various exceptions
            self.close()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterFault(f"cluster.ray_address = {address}: {reason[:300]}{_hint(reason)}") from error

    def reserve(self, settings: RunSettings, kind: Kind) -> None:
        """Reserve a placement group. Raises ClusterFault if it is not available in time; Ray itself would
        wait forever.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        cluster, is_shared = settings.cluster, settings.cluster.placement == "colocate"
        self._has_gpus, self._is_shared = settings.model.device != "cpu", is_shared
        self._tensor_parallel, self._num_engines = cluster.tensor_parallel, cluster.num_engines
        gpus = {"GPU": 1.0} if self._has_gpus else {}
        if kind == "ranks":
            bundle = {"CPU": 2.0 if is_shared else 1.0, **gpus}
            bundles, subject = [bundle] * cluster.num_trainers, f"num_trainers = {cluster.num_trainers} needs"
        else:
            engine = {"CPU": 1.0} | {name: each * cluster.tensor_parallel for name, each in gpus.items()}
            bundles = [engine] * (0 if is_shared else cluster.num_engines)
            bundles += [{"CPU": 1.0}] * cluster.num_rollout_workers
            subject = (
                f"num_engines = {cluster.num_engines} and cluster.num_rollout_workers = "
                f"{cluster.num_rollout_workers} need"
            )
        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        limit = self.settings.placement_timeout_s
        if not group.wait(limit):
            totals = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in _KINDS}
            request = " and ".join(f"{num:g} {_KINDS[name]}" for name, num in totals.items() if num)
            free = " and ".join(self._free(name) for name, num in totals.items() if num)
            remove_placement_group(group)
            raise ClusterFault(
                f"cluster.{subject} {request}, and {free} were free within {limit:g} s "
                "(cluster.placement_timeout_s)"
            )
        self._groups[kind] = group

    def _free(self, kind: str) -> str:
        there = self._ray.cluster_resources().get(kind, 0)
        return f"{self._ray.available_resources().get(kind, 0):g} of {there:g} {_KINDS[kind]}"

    def release(self, kind: Kind) -> None:
        from ray.util.placement_group import remove_placement_group

        if (group := self._groups.pop(kind, None)) is not None:
            with suppress(Exception):  # a shared Ray continues
                remove_placement_group(group)

    def _environ(self, place: Place) -> dict[str, str]:
        return {}

    def _new_address(self, name: str) -> Address:
        return "", 0

    def _start(self, spec: Spec, place: Place) -> Process:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind, number = place
        shares_gpu = self._is_shared and kind != "worker"
        group = self._groups["ranks" if kind == "rank" or shares_gpu else "rollouts"]
        index = number + (0 if self._is_shared or kind != "worker" else self._num_engines)
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
        if self._has_gpus and kind != "worker":
            size = self._tensor_parallel if kind == "engine" else 1
            options["num_gpus"] = 0.5 if shares_gpu else size
        if (
            kind == "worker"
        ):  # Ray must not kill its processes: they notice its end and end their own children
            options["runtime_env"] = {"env_vars": dict(_OWN_END)}
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        limit = self.settings.placement_timeout_s
        until = time.monotonic() + limit
        while True:
            actor = self._ray.remote(**options)(_Host).options(scheduling_strategy=placed).remote()
            started = actor.start.remote(spec)
            ready, _ = self._ray.wait([started], timeout=max(0.0, until - time.monotonic()))
            if not ready:
                free = " and ".join(
                    self._free(name) for name in _KINDS if self._ray.cluster_resources().get(name, 0)
                )
                raise NoRepair(
                    f"{spec.name} found no place within {limit:g} s (cluster.placement_timeout_s): "
                    f"{free} were free; {AGAIN}"
                )
            try:
                address, pid, self._nodes[spec.name] = self._ray.get(started)
                break
            # Ray notices a lost node late, and then moves its bundles
            except self._ray.exceptions.ActorDiedError:
                time.sleep(_BETWEEN_STARTS_S)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
                raise ClusterFault(f"{spec.name} could not start: {reason[:300]}; {AGAIN}") from error
        self._actors[spec.name] = actor
        return Process(name=spec.name, address=address, key=spec.key, pid=pid)

    def _cpu_seconds(self, process: Process) -> float | None:
        with suppress(Exception):  # the node or the process is lost
            call = self._call_on(self._nodes[process.name], cpu_seconds, process.pid)
            seconds: float | None = self._ray.get(call, timeout=_CPU_TIMEOUT_S)
            return seconds
        return None

    def _kill(self, process: Process) -> None:
        if (actor := self._actors.pop(process.name, None)) is not None:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        super().close()
        for kind in list(self._groups):
            self.release(kind)
        if self._ray.is_initialized():
            with suppress(Exception), _own_sigterm():
                self._ray.shutdown()

    def on_every_node(self, function: Any, *arguments: Any) -> list[Any]:
        """Call a function on every node; returns the results."""
        calls = [
            self._call_on(node["NodeID"], function, *arguments) for node in self._ray.nodes() if node["Alive"]
        ]
        answers: list[Any] = self._ray.get(calls, timeout=self.settings.placement_timeout_s)
        return answers

    def _call_on(self, node: str, function: Any, *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._ray.remote(num_cpus=0, scheduling_strategy=there)(function).remote(*arguments)


class _Host:
    """An actor whose process serves the object of a :class:`Spec`."""

    def start(self, spec: Spec) -> tuple[Address, int, str]:
        """Listen at an address of this node; returns it, the process id and the node's id."""
        from dataclasses import replace

        import ray

        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        server = Server(replace(spec, address=(host, 0)))
        threading.Thread(target=server.run, name="server", daemon=True).start()
        return server.address, os.getpid(), str(ray.get_runtime_context().get_node_id())


def _hint(reason: str) -> str:
    # Ray sends its token to a given address only if RAY_AUTH_MODE is set, and its error does not say so.
    if "Failed to connect" not in reason or "RAY_AUTH_MODE" in os.environ:
        return ""
    return (
        "; if that Ray requires a token (a machine with ~/.ray/auth_token), set RAY_AUTH_MODE=token "
        "for this command and for every `ray start`"
    )


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM that stops the trainer, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_reachable(host: str, port: int, until: float) -> None:
    """Raises OSError if there is no listener in time."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_CONNECT_TIMEOUT_S / 10)
