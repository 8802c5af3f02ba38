"""A Ray of the run's own, or the one of a cluster, and places in it; everything that waits has a limit."""

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from outrider.errors import ClusterFault, NoRepair
from outrider.scale.waiting import AGAIN
from outrider.train.cluster_settings import ClusterSettings

_PREFIX: Final = "outrider-ray-"
_KINDS: Final = {"CPU": "processors", "GPU": "GPUs"}  # what is asked of Ray
_CONNECT_TIMEOUT_S: Final = 5.0  # for one answer
_STORE_BYTES: Final = 2**30  # traces of a step and small weights: what does not fit Ray writes to disk
_OWN_END: Final = {"RAY_kill_child_processes_on_worker_exit": "0"}


class Session:
    """Ray for as long as the run lasts. Raises ClusterFault where it cannot be reached."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._has_begun = False
        # else whoever asks a Ray that was ended starts another one, or finds a stray one
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        self.ray: Any = import_module("ray")
        self.is_local = settings.ray_address == "local"
        with _own_sigterm():
            self._start()

    def _start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # of several processes that broke, the first one's error is told, in a line
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: the ranks are the work, not beside it
        for name, value in _OWN_END.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.is_local:
            _remove_stale()
            # a short name: sockets inside have to fit into 107 characters
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
            options |= {
                "num_cpus": max(os.cpu_count() or 1, self._settings.num_processes),
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": str(self._folder),
                "_node_ip_address": "127.0.0.1",
            }
        until = time.monotonic() + self._settings.placement_timeout_s
        try:
            self._init(options, until)
        except Exception as error:  # whatever a cluster that is not there raises
            self.close()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterFault(
                f"cluster.ray_address = {self._settings.ray_address}: {reason[:300]}{self._hint(reason)}"
            ) from error

    def _hint(self, reason: str) -> str:
        """Ray sends its token to no address that is named, unless it is told to, and does not say that this
        is why.
        """
        if self.is_local or "Failed to connect" not in reason or "RAY_AUTH_MODE" in os.environ:
            return ""
        return (
            "; where that Ray asks for a token (a machine with ~/.ray/auth_token), set RAY_AUTH_MODE=token "
            "for this command, and for every `ray start`"
        )

    def _init(self, options: dict[str, Any], until: float) -> None:
        """A machine under load starts Ray too slowly for Ray's own limit of half a minute: again, then. Where
        nobody listens at an address Ray would ask for many minutes.
        """
        host, separator, port = self._settings.ray_address.removeprefix("ray://").rpartition(":")
        if separator and port.isdigit():
            _wait_until_reachable(host, int(port), until)
        self._has_begun = True
        while True:
            try:
                self.ray.init(address=self._settings.ray_address, namespace="outrider", **options)
                return
            except Exception:
                if not self.is_local or time.monotonic() > until:
                    raise
                self.ray.shutdown()

    @property
    def actor_options(self) -> dict[str, Any]:
        """Options of an actor that starts processes: Ray is not to kill them when it ends the actor. They see
        its end, and end what they have started in turn; launchers that are killed would leave that behind.
        """
        return {} if self.is_local else {"runtime_env": {"env_vars": dict(_OWN_END)}}

    def reserve(self, bundles: Sequence[Mapping[str, float]], *, subject: str) -> Any:
        """So many processors and GPUs at each of several places; ``subject`` says who asks. Raises ClusterFault
        where they do not come in time: Ray itself would wait for ever.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        limit = self._settings.placement_timeout_s
        if not group.wait(limit):
            totals = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in _KINDS}
            request = " and ".join(f"{num:g} {_KINDS[kind]}" for kind, num in totals.items() if num)
            free = " and ".join(self._free(kind) for kind, num in totals.items() if num)
            remove_placement_group(group)
            raise ClusterFault(
                f"{subject} {request}, and {free} were free within {limit:g} s (cluster.placement_timeout_s)"
            )
        return group

    def await_placement(self, actor: Any, name: str) -> None:
        """Raises NoRepair where an actor that takes another one's place does not come to one in time: its
        node was lost, and no other one has room.
        """
        limit = self._settings.placement_timeout_s
        ready, _ = self.ray.wait([actor.__ray_ready__.remote()], timeout=limit)
        if not ready:
            free = " and ".join(self._free(kind) for kind in _KINDS if self._has(kind))
            raise NoRepair(
                f"{name} found no other place within {limit:g} s (cluster.placement_timeout_s): "
                f"{free} were free; {AGAIN}"
            )

    def _has(self, kind: str) -> bool:
        return bool(self.ray.cluster_resources().get(kind, 0))

    def _free(self, kind: str) -> str:
        there = self.ray.cluster_resources().get(kind, 0)
        return f"{self.ray.available_resources().get(kind, 0):g} of {there:g} {_KINDS[kind]}"

    def release(self, group: Any) -> None:
        """Let others have the processors of :meth:`places`: a Ray that is shared goes on."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):
            remove_placement_group(group)

    def close(self) -> None:
        """End Ray where it is the run's own, and what it left on disk; may be called twice."""
        if self._has_begun:  # else it would end one that somebody else is connected to
            with suppress(Exception), _own_sigterm():
                self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def on_node(node_id: str) -> Any:
    """A scheduling strategy: there and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray puts a handler of its own in the place of the one that asks the trainer to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_reachable(host: str, port: int, until: float) -> None:
    """Raises OSError where nobody listens there in time."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_CONNECT_TIMEOUT_S / 10)


def _remove_stale() -> None:
    """Folders of runs that were killed, and could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
