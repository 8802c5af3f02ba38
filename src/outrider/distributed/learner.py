"""One trainer rank: an actor that holds its shards, and does what all ranks are told at the same time."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.algorithms.base import Algorithm, ObjectiveSettings
from outrider.distributed import fsdp as collective
from outrider.distributed.fsdp import (
    Shape,
    ShardedPolicy,
    ShardedScorer,
    allocate,
    begin,
    choose_empty,
    empty_model,
    fill,
    local,
    require_shardable,
    shard,
)
from outrider.distributed.ray_session import AGAIN, Resources, Session
from outrider.engines.local.model import LanguageModel, load_model, resolve_model, resolve_precision
from outrider.errors import CheckpointError, ClusterFault, ConfigError, OutriderError
from outrider.files import replacing_by_name
from outrider.trace import Trace
from outrider.training.adapters import choose_trained
from outrider.training.checkpoint import file_checksum, require_intact
from outrider.training.cold_start import cold_start
from outrider.training.learner import OnStep
from outrider.training.packing import RolloutPath
from outrider.training.policy import checkpoint_layers, export, set_threads, tensor_files, tensor_folder
from outrider.training.settings import (
    ColdStartSettings,
    LoraSettings,
    OptimizerSettings,
    RunSettings,
    UpdateSettings,
)
from outrider.training.update import TokenLossFn, UpdateReport, measure_kl, update


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank has to know of a run. ``folder`` holds the model's configuration and safetensors;
    ``initial`` is a checkpoint to begin with, None: the folder's weights. ``resources``: on what it computes.
    """

    folder: str
    precision: str
    lora: LoraSettings | None
    trained_layers: int | None
    initial: str | None
    has_reference: bool
    optimizer: OptimizerSettings
    update: UpdateSettings
    cold_start: ColdStartSettings
    seed: int
    num_threads: int
    timeout_s: float
    resources: Resources = field(default_factory=Resources)


class Rank:
    """Every method is called on all ranks at once; what it returns is the same on all of them."""

    def __init__(self, settings: RankSettings, rank: int, size: int) -> None:
        self._settings, self._rank, self._size = settings, rank, size
        self._store: Any = None
        self._sender: Any = None
        self._is_sent = False  # whether engines have got the weights as they are
        self._device = settings.resources.device
        set_threads(settings.num_threads, device=self._device)

    def open_store(self, host: str) -> int:
        """Of rank 0 alone: where the others meet it, a port."""
        limit = self._settings.timeout_s
        self._store = collective.open_store(host, size=self._size, timeout_s=limit)
        return int(self._store.port)

    def build(self, host: str, port: int) -> tuple[int, int]:
        """Meet, and load the weights. The process id, and the parameters that this rank holds."""
        limit = self._settings.timeout_s
        collective.join(host, port, rank=self._rank, size=self._size, timeout_s=limit, device=self._device)
        self.policy = self._policy()
        self.reference: ShardedScorer | None = None
        if self._settings.has_reference:
            self._copy_reference()
        num_parameters = sum(local(parameter).numel() for parameter in self.policy.model.parameters())
        return os.getpid(), num_parameters

    def _policy(self) -> ShardedPolicy:
        settings = self._settings
        model, scoring = self._sharded(choose=True)
        num_parameters = sum(parameter.numel() for parameter in model.model.parameters())
        self.ranks = collective.GlooRanks(
            Shape.from_config(model.model.config, num_parameters=num_parameters)
        )
        policy = ShardedPolicy(
            model, scoring, settings.optimizer, ranks=self.ranks, uses_flex=self._uses_flex
        )
        if settings.initial is not None:
            fill(tensor_folder(Path(settings.initial)), policy.masters)
        return policy

    @property
    def _uses_flex(self) -> bool:
        return self._settings.update.uses_flex(self._device)

    def _sharded(self, *, choose: bool) -> tuple[LanguageModel, nn.Module]:
        """A model in shards with the folder's weights and fresh adapters; ``choose``: one that trains."""
        settings, precision = self._settings, getattr(torch, self._settings.precision)
        model = empty_model(settings.folder, device=self._device)
        adapters = choose_empty(
            model.model,
            lora=settings.lora,
            trained_layers=settings.trained_layers,
            seed=settings.seed,
            precision=precision,
        )
        if not choose:
            model.model.requires_grad_(False)
        elif settings.update.checkpoint_activations:
            checkpoint_layers(model.model)
        scoring = shard(model.model, size=self._size, precision=precision, device=self._device)
        allocate(scoring, model.model, device=self._device)
        begin(model.model, Path(settings.folder), adapters)
        return model, scoring

    def _copy_reference(self) -> None:
        """A second model in shards with the policy's weights: FSDP2 refuses to copy the first."""
        model, scoring = self._sharded(choose=False)
        precision = getattr(torch, self._settings.precision)
        self.reference = ShardedScorer(model, scoring, self.ranks, uses_flex=self._uses_flex)
        newest = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.model.named_parameters():
                # rounded as the working copy is, which a reference in one process is a copy of
                parameter.copy_(newest[name].to(precision))

    def update(
        self,
        traces: Sequence[Trace],
        objective: ObjectiveSettings,
        token_loss: TokenLossFn | None,
        version: int | None,
        probes: Sequence[Trace],
    ) -> tuple[UpdateReport, int, float]:
        """The update; its report, the optimiser steps so far, and the learning rate."""
        self._is_sent = False
        report = update(
            self.policy,
            traces,
            objective=objective,
            settings=self._settings.update,
            token_loss=token_loss,
            reference=self.reference,
            first=self.policy.num_steps == 0,
            gate_always=True,  # the engine has weights of its own
            version=version,
            probes=probes,
        )
        return report, self.policy.num_steps, self.policy.learning_rate

    def score(self, traces: Sequence[Trace]) -> list[list[tuple[float, ...] | None]]:
        """The KL to the reference of every node of every trace."""
        assert self.reference is not None
        measure_kl(self.policy, self.reference, traces, max_tokens=self._settings.update.max_tokens)
        return [[node.kl for node in trace.nodes] for trace in traces]

    def fit(self, paths: Sequence[RolloutPath]) -> list[tuple[int, int, dict[str, float]]]:
        """The cold start; what each of its steps has to tell."""
        self._is_sent = False
        steps: list[tuple[int, int, dict[str, float]]] = []
        cold_start(
            self.policy,
            paths,
            self._settings.cold_start,
            run_seed=self._settings.seed,
            max_tokens=self._settings.update.max_tokens,
            on_step=lambda done, total, values: steps.append((done, total, values)),
        )
        self.policy.fresh_optimizer()
        return steps

    def save(self, folder: str) -> None:
        """Every rank its shards into the folder."""
        self.policy.save(Path(folder))

    def load(self, folder: str, num_steps: int) -> tuple[int, float]:
        """A checkpoint; optimiser steps and learning rate."""
        self._is_sent = False
        self.policy.load(Path(folder), num_steps=num_steps)
        return self.policy.num_steps, self.policy.learning_rate

    def freeze_reference(self, path: str) -> None:
        """The reference becomes the policy as it is; rank 0 writes it into one file."""
        self._copy_reference()
        assert self.reference is not None
        whole = _whole(dict(self.reference.model.named_parameters()), is_receiver=self._rank == 0)
        if self._rank == 0:
            precision = getattr(torch, self._settings.precision)
            with replacing_by_name(Path(path)) as temporary:
                save_file({name: tensor.to(precision) for name, tensor in whole.items()}, temporary)

    def load_reference(self, folder: str) -> None:
        """The weights of the one file of a folder."""
        assert self.reference is not None
        with torch.no_grad():
            fill(Path(folder), dict(self.reference.model.named_parameters()))

    def free_address(self) -> str:
        """Where engines can meet this rank."""
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{host}:{free.getsockname()[1]}"

    def meet(self, actors: Sequence[Any], kind: str, address: str) -> None:
        """Before :meth:`send`, and again where another process is an engine: see
        :class:`outrider.distributed.weights.Sender`.
        """
        import ray

        from outrider.distributed.weights import EngineClient, Sender, Source

        if self._sender is not None:
            self._sender.close()
        limit, num_gpus = self._settings.timeout_s, self._settings.resources.tensor_parallel
        self._sender = Sender(
            Source(self.policy.model, getattr(torch, self._settings.precision)),
            EngineClient(ray, actors, tensor_parallel=num_gpus, limit_s=limit),
            kind=kind,
            rank=self._rank,
            address=address,
        )

    def send(self, version: int, is_again: bool = False) -> tuple[int, int]:
        """The weights to all engines; bytes of one copy, and calls of one engine. ``is_again``: those that
        were sent last. Raises ClusterFault where they have moved since.
        """
        assert self._sender is not None
        if is_again and not self._is_sent:
            raise ClusterFault(
                f"the weights of version {version} are no longer there: an engine was gone beside an update; "
                f"{AGAIN}"
            )
        self._is_sent = True
        sizes: tuple[int, int] = self._sender.send(version)
        return sizes

    def sizes(self) -> dict[str, int]:
        """Bytes of every parameter in float32, in order."""
        return {name: 4 * master.numel() for name, master in self.policy.masters.items()}

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The whole parameters of these names, from rank 0; the others help and return nothing."""
        return _whole({name: self.policy.masters[name] for name in names}, is_receiver=self._rank == 0)


def _whole(tensors: dict[str, Any], *, is_receiver: bool) -> dict[str, Tensor]:
    gathered = {}
    for name, tensor in tensors.items():  # one at a time: only one rank keeps them
        whole = tensor.detach().full_tensor()
        if is_receiver:
            gathered[name] = whole.cpu().contiguous()
    return gathered


# All trainer ranks as one: a call goes to every rank, and none is waited for without a limit.


_TICK_S: Final = 1.0  # how long a signal may have to wait


class RankGroup:
    """``size`` actors of the class ``kind``, placed and joined. Raises ClusterFault where that does not come
    to be.
    """

    def __init__(
        self, session: Session, settings: RankSettings, *, size: int, kind: type[Rank] = Rank
    ) -> None:
        self._session, self._ray, self._timeout_s = session, session.ray, settings.timeout_s
        self._actors: list[Any] = []
        self._call_lock = threading.Lock()
        resources = settings.resources
        self.placement_group = placement_group = session.reserve(
            [resources.rank_bundle] * size, subject=f"cluster.num_trainers = {size} needs"
        )
        variables = {"GLOO_SOCKET_IFNAME": "lo"} if session.is_local else {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Not restarted: a rank that Ray starts again has its first weights.
        actor = self._ray.remote(max_restarts=0, **resources.rank)(kind)
        for rank in range(size):
            placed = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank)
            options = {"scheduling_strategy": placed, "runtime_env": {"env_vars": variables}}
            self._actors.append(actor.options(**options).remote(settings, rank, size))
        host = "127.0.0.1" if session.is_local else self._ray.util.get_node_ip_address()
        [port] = self._wait([self._actors[0].open_store.remote(host)], "open_store")
        self.built = self.call("build", host, port)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, in their order."""
        return [pid for pid, _ in self.built]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What every rank returned. Raises a rank's own error where it is one of ours, and ClusterFault for a
        rank that broke, died or took longer than ``cluster.update_timeout_s``; the ranks are ended then.
        """
        # once into the store, however many ranks read it
        references = [self._ray.put(argument) for argument in arguments]
        with self._call_lock:  # two threads in two orders: ranks would wait for each other
            calls = [getattr(actor, method).remote(*references) for actor in self._actors]
        return self._wait(calls, method)

    def _wait(self, references: Sequence[Any], method: str) -> list[Any]:
        until = time.monotonic() + self._timeout_s
        waiting = list(references)
        try:
            while waiting:
                # One at a time, and soon: where one rank has died, the others wait for it.
                ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=_TICK_S)
                for reference in ready:
                    self._ray.get(reference)
                if waiting and time.monotonic() > until:
                    number = references.index(waiting[0])
                    raise ClusterFault(
                        f"trainer rank {number} did not end {method} within {self._timeout_s:g} s "
                        "(cluster.update_timeout_s)"
                    )
            return list(self._ray.get(list(references)))
        except BaseException as error:
            self.close()
            raise self._convert_error(error, method) from error

    def _convert_error(self, error: BaseException, method: str) -> BaseException:
        cause = getattr(error, "cause", None)
        if isinstance(error, self._ray.exceptions.RayTaskError) and isinstance(cause, OutriderError):
            return cause
        if isinstance(error, self._ray.exceptions.RayError):
            reason = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
            return ClusterFault(
                f"a trainer rank broke or died in {method}: {type(cause or error).__name__}: {reason[:300]}; "
                "continue from the newest checkpoint with --resume"
            )
        return error

    def close(self) -> None:
        """End all ranks; may be called twice."""
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        if self._actors:
            self._session.release(self.placement_group)
        self._actors = []


# The learner of a run with several trainer ranks; rollouts are played in this process, with a copy of the
# weights.


_PIECE_BYTES: Final = 256 * 2**20  # of weights that are on their way at a time


class ShardedLearner:
    """Calls every rank; :attr:`language_model` gets the weights after whatever moves them."""

    def __init__(self, settings: RunSettings, *, initial: bool) -> None:
        self.num_steps = 0
        self.learning_rate = 0.0
        self.has_reference = settings.algorithm.needs_reference
        self.language_model, self.trained = _load_copy(settings)
        require_shardable(str(_folder(settings)))
        self._weights = settings.cluster.weights if settings.cluster.sends_directly else None
        self._connected_actors: list[Any] = []
        self._is_stale = False
        self.session = Session(settings.cluster)
        try:
            self._group = RankGroup(
                self.session, _rank_settings(settings, initial=initial), size=settings.cluster.num_trainers
            )
            self.placement_group = self._group.placement_group
            self._pieces = _pieces(self._group.call("sizes")[0])
            if initial and settings.model.initial_checkpoint is not None:
                self._mark_stale()
        except BaseException:
            self.session.close()
            raise

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
    ) -> UpdateReport:
        [first, *_] = self._group.call(
            "update", list(traces), algorithm.objective, _own_loss(algorithm), version, list(probes)
        )
        report: UpdateReport
        num_steps_before = self.num_steps
        report, self.num_steps, self.learning_rate = first
        on_batch(report.num_scored_tokens)
        if self.num_steps != num_steps_before:  # without a signal there is no step, and nothing to gather
            self._mark_stale()
        return report

    def score(self, traces: Sequence[Trace]) -> None:
        [node_values, *_] = self._group.call("score", list(traces))
        for trace, values in zip(traces, node_values, strict=True):
            for node, kl in zip(trace.nodes, values, strict=True):
                node.kl = kl

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        """See :class:`outrider.training.learner.Learner`. What the steps tell comes at the end."""
        [steps, *_] = self._group.call("fit", list(paths))
        self._mark_stale()
        for done, total, values in steps:
            on_step(done, total, values)

    def save(self, folder: Path) -> None:
        self._group.call("save", str(folder))

    def load(self, folder: Path, *, num_steps: int) -> None:
        [(self.num_steps, self.learning_rate), *_] = self._group.call("load", str(folder), num_steps)
        self._mark_stale()

    def freeze_reference(self, path: Path) -> int:
        self._group.call("freeze_reference", str(path))
        return file_checksum(path)

    def load_reference(self, path: Path, *, checksum: int | None) -> None:
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: it holds the weights that the KL term refers to; put it back"
            )
        if checksum is not None and file_checksum(path) != checksum:
            raise CheckpointError(
                f"reference weights {path} are damaged: the contents are not what was written"
            )
        self._group.call("load_reference", str(path.parent))

    def export(self, folder: Path) -> None:
        if self._is_stale:
            self._sync()
        export(self.language_model, folder, check=False)

    def close(self) -> None:
        self._group.close()
        self.session.close()

    def send(self, version: int, actors: Sequence[Any], *, is_again: bool = False) -> tuple[int, int]:
        """The weights from the ranks' GPUs to engine processes; bytes of one copy, and calls of one engine.
        ``is_again``: those that were sent last. Raises ClusterFault where that is not done in time, or they
        have moved since.
        """
        if self._connected_actors != list(actors):
            [address, *_] = self._group.call("free_address")
            self._group.call("meet", list(actors), self._weights, address)
            self._connected_actors = list(actors)
        sizes: tuple[int, int] = self._group.call("send", version, is_again)[0]
        return sizes

    def _mark_stale(self) -> None:
        """The copy here follows the ranks; where nobody plays with it, once it is asked for."""
        self._is_stale = True
        if self._weights is None:
            self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        """The weights of all ranks into the copy that rollouts are played with, a piece at a time."""
        self._is_stale = False
        own = dict(self.language_model.model.named_parameters())
        for names in self._pieces:
            for name, whole in self._group.call("weights", names)[0].items():
                own[name].copy_(whole)


def _load_copy(settings: RunSettings) -> tuple[LanguageModel, frozenset[str]]:
    """The copy that rollouts are played with, and the names of what trains in it."""
    model_settings = settings.model
    model = load_model(
        model_settings.name, precision=_precision(settings), device="cpu", forward=model_settings.forward
    )
    if model.unpacked is not None:
        raise ConfigError(
            f"cluster.num_trainers = {settings.cluster.num_trainers} needs a model that runs packed; "
            f"{model_settings.name!r} does not, because {model.unpacked.why}: set cluster.num_trainers = 1"
        )
    choose_trained(
        model.model,
        lora=model_settings.lora,
        trained_layers=model_settings.trained_layers,
        seed=settings.seed,
    )
    trained = frozenset(name for name, parameter in model.model.named_parameters() if parameter.requires_grad)
    model.model.requires_grad_(False)
    return model, trained


def _folder(settings: RunSettings) -> Path:
    """Where the model's files are."""
    folder = Path(resolve_model(settings.model.name)).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(settings.model.name, local_files_only=True))
    return folder.resolve()


def _rank_settings(settings: RunSettings, *, initial: bool) -> RankSettings:
    checkpoint = settings.model.initial_checkpoint if initial else None
    if checkpoint is not None:
        for name in tensor_files(Path(checkpoint)):
            require_intact(Path(checkpoint), name)
    return RankSettings(
        folder=str(_folder(settings)),
        precision=_precision(settings),
        lora=settings.model.lora,
        trained_layers=settings.model.trained_layers,
        initial=None if checkpoint is None else str(Path(checkpoint).resolve()),
        has_reference=settings.algorithm.needs_reference,
        optimizer=settings.optimizer,
        update=settings.update,
        cold_start=settings.cold_start,
        seed=settings.seed,
        num_threads=settings.num_threads,
        timeout_s=settings.cluster.update_timeout_s,
        resources=Resources.from_settings(settings),
    )


def _precision(settings: RunSettings) -> Literal["bfloat16", "float32"]:
    """The same for all processes. Raises ConfigError where this one cannot tell for theirs."""
    model = settings.model
    if model.precision == "auto" and model.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError('model.precision = "auto": no GPU is seen here; set "bfloat16" or "float32"')
    return resolve_precision(model.precision, model.device)


def _pieces(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, in pieces of about as many bytes as may be on their way at a time."""
    pieces: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not pieces or size > room:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append(name)
        room -= size
    return pieces


def _own_loss(algorithm: Algorithm) -> Any:
    """None where the objective has the loss, which every algorithm of this package leaves to it. Raises
    ConfigError for one whose object cannot be sent.
    """
    if type(algorithm).token_loss is Algorithm.token_loss:
        return None
    try:
        pickle.dumps(algorithm.token_loss)
    except Exception as error:
        raise ConfigError(
            f"{type(algorithm).__name__}.token_loss cannot be sent to other processes: "
            "put it on the settings of the algorithm, or train with cluster.num_trainers = 1"
        ) from error
    return algorithm.token_loss
