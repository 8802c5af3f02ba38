"""A run's Ray session: settings for other processes, resources, waiting with limits, errors, life signs."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from outrider.errors import ClusterFault, ConfigError, NoRepair, OutriderError, ProcessLost
from outrider.plugins.imports import add_search_folder, search_folders
from outrider.plugins.registry import substituted_kinds
from outrider.rollout.hooks import RolloutStatus
from outrider.training.settings import ClusterSettings, RunSettings

AGAIN: Final = "continue from the newest checkpoint with --resume"
_TICK_S: Final = 0.5  # the longest time that a signal has to wait
_NAME: Final = "outrider-place"
_SIZE: Final = 512
_PREFIX: Final = "outrider-ray-"
_KINDS: Final = {"CPU": "processors", "GPU": "GPUs"}
_CONNECT_TIMEOUT_S: Final = 5.0  # of one attempt
_STORE_BYTES: Final = 2**30  # traces of a step and small weights; Ray writes what does not fit to disk
_OWN_END: Final = {"RAY_kill_child_processes_on_worker_exit": "0"}

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run's settings for another process.

    Relative paths start at ``folder``, and import paths are searched in ``searched``. The settings are
    ``pickled`` separately, because modules of plug-ins must be found before they can be unpickled.
    """

    folder: str
    searched: tuple[str, ...]
    pickled: bytes

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Recipe":
        """Raises ConfigError for an object in place of a name, which another process cannot create."""
        if objects := substituted_kinds():
            raise ConfigError(
                f"an object was given for {', '.join(objects)}: engines and rollout workers in processes of "
                "their own make theirs by name, so give a name, or play in one process"
            )
        return cls(
            folder=os.getcwd(),
            searched=tuple(str(folder) for folder in search_folders()),
            pickled=pickle.dumps(settings),
        )

    def settings(self) -> RunSettings:
        """Unpickle the settings in the other process, after changing to the folder if it exists there."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        for folder in reversed(self.searched):
            add_search_folder(Path(folder))
        return cast(RunSettings, pickle.loads(self.pickled))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a run's processes in Ray; ``device`` is ``cpu`` or ``cuda``.

    Each rank has one GPU, each engine ``tensor_parallel``. If a rank and an engine are colocated, each
    requests half of a GPU, so that Ray assigns the same one; vLLM sleeps while the rank works.
    """

    device: str = "cpu"
    tensor_parallel: int = 1
    colocates: bool = False

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Resources":
        return cls(
            device=settings.model.device,
            tensor_parallel=settings.cluster.tensor_parallel,
            colocates=settings.cluster.placement == "colocate",
        )

    @property
    def rank_bundle(self) -> Bundle:
        """Resources reserved for a rank, and for its engine if they are colocated."""
        return {"CPU": 2, "GPU": 1} if self.colocates else self._with_gpus("CPU", "GPU", 1)

    @property
    def engine_bundle(self) -> Bundle:
        """Resources reserved for an engine of its own."""
        return self._with_gpus("CPU", "GPU", self.tensor_parallel)

    @property
    def rank(self) -> dict[str, Any]:
        """Options of a rank's actor."""
        return self._with_gpus("num_cpus", "num_gpus", 0.5 if self.colocates else 1)

    @property
    def engine(self) -> dict[str, Any]:
        """Options of an engine's actor."""
        return self._with_gpus("num_cpus", "num_gpus", 0.5 if self.colocates else self.tensor_parallel)

    def _with_gpus(self, cpu_key: str, gpu_key: str, num_gpus: float) -> dict[str, float]:
        return {cpu_key: 1} | ({} if self.device == "cpu" else {gpu_key: num_gpus})


# --- Waiting for other processes, with a limit and an error that names the process ---


def results(
    ray: Any,
    calls: Mapping[str, Any],
    *,
    action: str,
    limit_s: float,
    setting: str,
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """Wait for calls and return their results in order.

    Args:
        calls: The calls by the name of the process, for example ``engine 1``.
        action: What the processes do, for error messages.
        limit_s: Time limit, which is the setting ``setting``.
        watch: Called repeatedly while waiting.

    Raises an OutriderError of a call as it is, and ClusterFault for a process that failed, died or exceeded
    the limit.
    """
    owners = {reference: process for process, reference in calls.items()}
    waiting = list(owners)
    until = time.monotonic() + limit_s
    while waiting:
        tick = min(_TICK_S, max(0.0, until - time.monotonic()))
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=tick)
        for call in ready:
            _get(ray, call, owners[call], action)
        if watch is not None:
            watch()
        if waiting and not ready and time.monotonic() >= until:
            raise timeout_error(owners[waiting[0]], action, limit_s, setting)
    return [_get(ray, reference, process, action) for process, reference in calls.items()]


def outcomes(
    ray: Any, calls: Mapping[str, Any], *, action: str, watch: Callable[[], Mapping[str, ProcessLost]]
) -> dict[str, Any]:
    """Return the result of each call, or its :class:`ProcessLost`; the others are still waited for.

    ``watch`` is called repeatedly and returns faults of processes that are no longer waited for. Raises any
    other error of a call.
    """
    answers: dict[str, Any] = {}
    while missing := {reference: process for process, reference in calls.items() if process not in answers}:
        ready, _ = ray.wait(list(missing), num_returns=1, timeout=_TICK_S)
        for call in ready:
            answers[missing[call]] = get_answer(ray, call, missing[call], action)
        answers |= {
            process: fault
            for process, fault in watch().items()
            if process in calls and process not in answers
        }
    return answers


def get_answer(ray: Any, reference: Any, process: str, action: str) -> Any:
    """Return the result of a call, or its :class:`ProcessLost`. Raises any other error of the call."""
    try:
        return _get(ray, reference, process, action)
    except ProcessLost as fault:
        return fault


def timeout_error(process: str, action: str, limit_s: float, setting: str) -> ProcessLost:
    """Return the error for a process that does not respond."""
    return ProcessLost(
        f"{process} did not end {action} within {limit_s:g} s ({setting}); {AGAIN}", process, is_silent=True
    )


def add_location(error: ProcessLost, location: str | None) -> ProcessLost:
    """Add the task and the place where the process was last seen."""
    if not location:
        return error
    fault, separator, rest = str(error).partition("; ")
    return ProcessLost(
        f"{fault}, last seen at {location.replace('; ', ', ')}{separator}{rest}",
        error.process,
        error.is_silent,
    )


def _get(ray: Any, reference: Any, process: str, action: str) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:
        raise convert_error(ray, error, process, action) from error


def convert_error(ray: Any, error: Exception, process: str, action: str) -> Exception:
    """Convert an exception of Ray to a typed error; returns any other exception unchanged."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, OutriderError):
        return cause
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return ProcessLost(f"{process} was ended in {action} by Ray's memory monitor; {AGAIN}", process)
    if isinstance(error, ray.exceptions.RayTaskError):
        reason = (str(cause or error).strip() or type(error).__name__).splitlines()[-1]
        return ClusterFault(
            f"{process} broke in {action}: {type(cause or error).__name__}: {reason[:300]}; {AGAIN}"
        )
    if getattr(error, "actor_init_failed", False):
        reason = str(error).strip().splitlines()[-1].strip()
        return ClusterFault(f"{process} could not start: {reason[:300]}")
    if isinstance(error, ray.exceptions.RayError):
        return ProcessLost(f"{process} died in {action} ({type(error).__name__}); {AGAIN}", process)
    return error


# --- Signs of life of a local process that does not respond because a call holds the interpreter's lock ---


class SharedRolloutStatus(RolloutStatus):
    """Also writes the newest location to memory that other processes can read (:func:`read_location`)."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)

    def set(self, rollout: str, location: str) -> None:
        super().set(rollout, location)
        line = f"{rollout}: {location}".encode("utf-8", "replace")[:_SIZE]
        os.pwrite(self._file, line.ljust(_SIZE, b"\0"), 0)


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_location(pid: int) -> str | None:
    """Return the newest location of a worker's rollouts; None if it cannot be read."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAME in os.readlink(descriptor):
                    text = descriptor.read_bytes()[:_SIZE].rstrip(b"\0").decode("utf-8", "replace")
                    if text:
                        return text
    return None


# --- The session ---


class Session:
    """Ray during a run: its own or that of a cluster. Raises ClusterFault if it cannot be reached."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._has_begun = False
        # otherwise a call after the end would start or find another Ray
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        self.ray: Any = import_module("ray")
        self.is_local = settings.ray_address == "local"
        with _own_sigterm():
            self._start()

    def _start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # if several processes fail, the first error is reported in one line
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise 15, but the ranks are the main work
        for name, value in _OWN_END.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.is_local:
            _remove_stale()
            # a short name, because paths of sockets are limited to 107 characters
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
        except Exception as error:  # an unreachable cluster raises various exceptions
            self.close()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterFault(
                f"cluster.ray_address = {self._settings.ray_address}: {reason[:300]}{self._hint(reason)}"
            ) from error

    def _hint(self, reason: str) -> str:
        # Ray sends its token to a given address only if RAY_AUTH_MODE is set, and its error does not say so.
        if self.is_local or "Failed to connect" not in reason or "RAY_AUTH_MODE" in os.environ:
            return ""
        return (
            "; if that Ray requires a token (a machine with ~/.ray/auth_token), set RAY_AUTH_MODE=token "
            "for this command and for every `ray start`"
        )

    def _init(self, options: dict[str, Any], until: float) -> None:
        # Ray itself would try an address without a listener for many minutes.
        host, separator, port = self._settings.ray_address.removeprefix("ray://").rpartition(":")
        if separator and port.isdigit():
            _wait_until_reachable(host, int(port), until)
        self._has_begun = True
        while True:  # on a busy machine Ray exceeds its own limit of half a minute
            try:
                self.ray.init(address=self._settings.ray_address, namespace="outrider", **options)
                return
            except Exception:
                if not self.is_local or time.monotonic() > until:
                    raise
                self.ray.shutdown()

    @property
    def actor_options(self) -> dict[str, Any]:
        """Options of an actor that starts processes: Ray must not kill these when it ends the actor. They
        notice its end and end their own children; killed launchers would leave theirs behind.
        """
        return {} if self.is_local else {"runtime_env": {"env_vars": dict(_OWN_END)}}

    def reserve(self, bundles: Sequence[Mapping[str, float]], *, subject: str) -> Any:
        """Reserve a placement group; ``subject`` begins the error message. Raises ClusterFault if it is not
        available in time; Ray itself would wait forever.
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
        """Wait until an actor that replaces another one is placed. Raises NoRepair if that takes too long,
        because its node was lost and no other one has room.
        """
        limit = self._settings.placement_timeout_s
        ready, _ = self.ray.wait([actor.__ray_ready__.remote()], timeout=limit)
        if not ready:
            free = " and ".join(
                self._free(kind) for kind in _KINDS if self.ray.cluster_resources().get(kind, 0)
            )
            raise NoRepair(
                f"{name} found no other place within {limit:g} s (cluster.placement_timeout_s): "
                f"{free} were free; {AGAIN}"
            )

    def _free(self, kind: str) -> str:
        there = self.ray.cluster_resources().get(kind, 0)
        return f"{self.ray.available_resources().get(kind, 0):g} of {there:g} {_KINDS[kind]}"

    def release(self, group: Any) -> None:
        """Release a placement group, because a shared Ray continues."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):
            remove_placement_group(group)

    def close(self) -> None:
        """Disconnect from Ray, or end it if it is the run's own, and remove its files; may be
        called twice.
        """
        if self._has_begun:  # otherwise it would end a Ray of somebody else
            with suppress(Exception), _own_sigterm():
                self.ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def on_node(node_id: str) -> Any:
    """Return the scheduling strategy for one node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


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


def _remove_stale() -> None:
    """Remove folders of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
