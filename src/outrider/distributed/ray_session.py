"""The way into this package: what it needs is asked for before a model is loaded."""

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
from outrider.rollout.base import RolloutStatus
from outrider.training.settings import ClusterSettings, RunSettings

# A run's settings on their way to another process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``folder`` is where relative paths begin, ``searched`` where import paths are looked for. The settings
    are ``pickled`` apart: a plug-in's module has to be found before they can be read.
    """

    folder: str
    searched: tuple[str, ...]
    pickled: bytes

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Recipe":
        """Raises ConfigError for an object in the place of a name: another process cannot make it."""
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
        """In the other process: go to the folder, where it is there, and read them."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        for folder in reversed(self.searched):
            add_search_folder(Path(folder))
        return cast(RunSettings, pickle.loads(self.pickled))


# What the processes of a run ask Ray for: processors, and on GPUs a GPU a rank, ``tensor_parallel`` an
# engine. Where both are in one place (``colocate``), a rank and its engine have half of one GPU each: Ray
# gives them the same one, and vLLM sleeps while the rank works.


Bundle = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """``device`` is ``cpu`` or ``cuda``."""

    device: str = "cpu"
    tensor_parallel: int = 1
    colocates: bool = False

    @classmethod
    def from_settings(cls, settings: RunSettings) -> "Resources":
        """Of a run."""
        return cls(
            device=settings.model.device,
            tensor_parallel=settings.cluster.tensor_parallel,
            colocates=settings.cluster.placement == "colocate",
        )

    @property
    def rank_bundle(self) -> Bundle:
        """A place for a rank, and for the engine beside it where there is one."""
        return {"CPU": 2, "GPU": 1} if self.colocates else self._with_gpus(1)

    @property
    def engine_bundle(self) -> Bundle:
        """A place for an engine of its own."""
        return self._with_gpus(self.tensor_parallel)

    @property
    def rank(self) -> dict[str, Any]:
        """Of the actor, within its place."""
        return self._actor(0.5 if self.colocates else 1)

    @property
    def engine(self) -> dict[str, Any]:
        return self._actor(0.5 if self.colocates else self.tensor_parallel)

    def _with_gpus(self, num: float) -> Bundle:
        return {"CPU": 1} | ({} if self.device == "cpu" else {"GPU": num})

    def _actor(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": 1} | ({} if self.device == "cpu" else {"num_gpus": num_gpus})


# Waiting for other processes: with a limit, and with a line that says who is gone and how to go on.


AGAIN: Final = "continue from the newest checkpoint with --resume"
_TICK_S: Final = 0.5  # how long a signal may have to wait


def results(
    ray: Any,
    calls: Mapping[str, Any],
    *,
    action: str,
    limit_s: float,
    setting: str,
    watch: Callable[[], None] | None = None,
) -> list[Any]:
    """What each call returned, in order. ``calls``: by who was called (``engine 1``). ``watch`` is called all
    the while.

    Raises what a call raised where it is an error of ours, and ClusterFault for a process that broke or died
    in ``action``, or did not end it within ``limit_s`` of ``setting``.
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
    """What each call returned, or the :class:`ProcessLost` of a process that it broke with: the others are
    waited for. ``watch`` is called all the while; it names those that are not waited for any more.

    Raises any other error of a call.
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
    """What a call returned, or the :class:`ProcessLost` that it broke with. Raises any other error of it."""
    try:
        return _get(ray, reference, process, action)
    except ProcessLost as fault:
        return fault


def timeout_error(process: str, action: str, limit_s: float, setting: str) -> ProcessLost:
    """The error for a process that does not answer."""
    return ProcessLost(
        f"{process} did not end {action} within {limit_s:g} s ({setting}); {AGAIN}", process, is_silent=True
    )


def add_location(error: ProcessLost, location: str | None) -> ProcessLost:
    """The same error with the task and the place that the process was last seen at."""
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
    """A typed error for whatever Ray raises of a call; any other error as it is."""
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


# Signs of life of a process of this machine that does not answer: a call may hold its interpreter's lock.


_NAME: Final = "outrider-place"
_SIZE: Final = 512


class SharedRolloutStatus(RolloutStatus):
    """Also writes the newest place into memory that other processes can read (:func:`read_location`)."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)

    def set(self, rollout: str, location: str) -> None:
        """Record the new location of a rollout and write it to the shared memory file."""
        super().set(rollout, location)
        line = f"{rollout}: {location}".encode("utf-8", "replace")[:_SIZE]
        os.pwrite(self._file, line.ljust(_SIZE, b"\0"), 0)


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used; None if it is not there."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_location(pid: int) -> str | None:
    """The place that a worker's rollouts have moved to last; None if that cannot be read."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if _NAME in os.readlink(descriptor):
                    text = descriptor.read_bytes()[:_SIZE].rstrip(b"\0").decode("utf-8", "replace")
                    if text:
                        return text
    return None


# A Ray of the run's own, or the one of a cluster, and places in it; everything that waits has a limit.


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
        """So many processors and GPUs at each of several places; ``subject`` says who asks. Raises
        ClusterFault where they do not come in time: Ray itself would wait for ever.
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
