"""Trainer ranks: one process (:class:`Rank`), all of them (:class:`RankGroup`), and the learner that
uses them.
"""

import os
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    first_row,
    free_cached_memory,
    local,
    require_shardable,
    shard,
)
from outrider.distributed.processes import AGAIN, PROGRESS, Cluster, Process
from outrider.distributed.weights import EngineClient, Sender, Source, pieces
from outrider.engines.local.model import LanguageModel, load_model, resolve_model, resolve_precision
from outrider.errors import ClusterFault, ConfigError, ProcessLost
from outrider.files import file_checksum, replacing_by_name
from outrider.trace import Trace
from outrider.training.adapters import choose_trained
from outrider.training.checkpoint import require_intact, require_reference
from outrider.training.cold_start import cold_start
from outrider.training.learner import OnStep
from outrider.training.packing import RolloutPath
from outrider.training.policy import (
    TEACHER,
    checkpoint_layers,
    export,
    save_teacher,
    set_threads,
    tensor_files,
    tensor_folder,
)
from outrider.training.rounding import dither
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
    """Settings of a run for a rank. ``folder`` has the model's configuration and safetensors; ``initial`` is
    a checkpoint to start from, or None for the folder's weights. ``teacher_rate`` is that of an averaged
    teacher (self-distillation).
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
    device: str = "cpu"
    num_gpus_of_engine: int = 1
    stall_s: float = 1800.0
    teacher_rate: float | None = None


class Rank:
    """A trainer rank. Every method is called on all ranks concurrently and returns the same on all
    of them.
    """

    def __init__(self, settings: RankSettings, rank: int, size: int) -> None:
        self._settings, self._rank, self._size = settings, rank, size
        self._store: Any = None
        self._sender: Any = None
        self._is_sent = False  # whether the engines have the current weights
        self._device = settings.device
        set_threads(settings.num_threads, device=self._device)

    def open_store(self, host: str) -> int:
        """Open the store at which ranks meet, on rank 0 only; returns its port."""
        limit = self._settings.stall_s
        self._store = collective.open_store(host, size=self._size, timeout_s=limit)
        return int(self._store.port)

    def build(self, host: str, port: int) -> tuple[int, int]:
        """Join the other ranks and load the weights; returns process id and number of parameters here."""
        limit = self._settings.stall_s
        collective.join(host, port, rank=self._rank, size=self._size, timeout_s=limit, device=self._device)
        self.policy = self._policy()
        self.reference: ShardedScorer | None = None
        if self._settings.has_reference:
            self._copy_reference()
        self.teacher: ShardedScorer | None = None
        if self._settings.teacher_rate is not None:
            model, scoring = self._sharded(choose=False)
            self.teacher = ShardedScorer(model, scoring, self.ranks, uses_flex=self._uses_flex)
            self._reset_teacher()
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
        if settings.precision == "bfloat16":
            for name, master in policy.masters.items():
                dither(local(master), name, seed=settings.seed, first_row=first_row(master))
        if settings.initial is not None:
            fill(tensor_folder(Path(settings.initial)), policy.masters)
        return policy

    @property
    def _uses_flex(self) -> bool:
        return self._settings.update.uses_flex(self._device)

    def _sharded(self, *, choose: bool) -> tuple[LanguageModel, nn.Module]:
        """Build a sharded model with the folder's weights and new adapters; ``choose`` if it is trained."""
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
        """Build a second sharded model with the policy's weights, because FSDP2 cannot copy the first."""
        model, scoring = self._sharded(choose=False)
        precision = getattr(torch, self._settings.precision)
        self.reference = ShardedScorer(model, scoring, self.ranks, uses_flex=self._uses_flex)
        newest = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.model.named_parameters():
                # rounded like the working copy, which a reference in one process copies
                parameter.copy_(newest[name].to(precision))

    @torch.no_grad()
    def _reset_teacher(self) -> None:
        """Copy the policy's weights to the averaged teacher, if there is one. Its shards are float32, and a
        forward pass rounds them.
        """
        if self.teacher is not None:
            newest = dict(self.policy.model.named_parameters())
            for name, parameter in self.teacher.model.named_parameters():
                parameter.copy_(newest[name])

    @torch.no_grad()
    def _move_teacher(self) -> None:
        """Move every shard of the averaged teacher towards the policy."""
        if self.teacher is not None and (rate := self._settings.teacher_rate) is not None:
            for name, average in self._averages().items():
                local(average).lerp_(local(self.policy.masters[name]), rate)

    def _averages(self) -> dict[str, Tensor]:
        assert self.teacher is not None
        parameters = self.teacher.model.named_parameters()
        return {name: parameter for name, parameter in parameters if name in self.policy.masters}

    def update(
        self,
        traces: Sequence[Trace],
        objective: ObjectiveSettings,
        token_loss: TokenLossFn | None,
        version: int | None,
        probes: Sequence[Trace],
        training_step: int = 0,
    ) -> tuple[UpdateReport, int, float]:
        """Run the update; returns its report, the optimizer steps so far, and the learning rate."""
        self._is_sent = False
        num_steps = self.policy.num_steps
        report = update(
            self.policy,
            traces,
            objective=objective,
            settings=self._settings.update,
            token_loss=token_loss,
            reference=self.reference,
            teacher=self.teacher,
            always_check_mismatch=True,  # the engine has its own weights
            version=version,
            probes=probes,
            seed=self._settings.seed,
            training_step=training_step,
        )
        if self.policy.num_steps != num_steps:
            self._move_teacher()
        if self._rank:  # the caller reads the tokens of the first rank
            report = replace(report, tokens=[])
        return report, self.policy.num_steps, self.policy.learning_rate

    def score(self, traces: Sequence[Trace]) -> list[list[tuple[float, ...] | None]]:
        """Return the KL to the reference for every node of every trace."""
        assert self.reference is not None
        measure_kl(self.policy, self.reference, traces, max_tokens=self._settings.update.max_tokens)
        return [[node.kl for node in trace.nodes] for trace in traces]

    def fit(self, paths: Sequence[RolloutPath]) -> list[tuple[int, int, dict[str, float]]]:
        """Run the cold start; returns the progress and metrics of each step."""
        self._is_sent = False
        steps: list[tuple[int, int, dict[str, float]]] = []

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            steps.append((done, total, values))
            PROGRESS.advance()

        cold_start(
            self.policy,
            paths,
            self._settings.cold_start,
            run_seed=self._settings.seed,
            max_tokens=self._settings.update.max_tokens,
            on_step=on_step,
        )
        self.policy.fresh_optimizer()
        self._reset_teacher()
        return steps

    def save(self, folder: str) -> None:
        self.policy.save(Path(folder))
        if self.teacher is not None:
            averages = _whole(self._averages(), is_receiver=self._rank == 0)
            if self._rank == 0:
                save_teacher(averages, Path(folder))

    def load(self, folder: str, num_steps: int) -> tuple[int, float]:
        self._is_sent = False
        self.policy.load(Path(folder), num_steps=num_steps)
        self._reset_teacher()
        if self.teacher is not None and (Path(folder) / TEACHER).exists():
            fill(Path(folder), self._averages(), file=TEACHER)
        return self.policy.num_steps, self.policy.learning_rate

    def freeze_reference(self, path: str) -> None:
        """Copy the policy to the reference; rank 0 writes it to one file."""
        self._copy_reference()
        assert self.reference is not None
        whole = _whole(dict(self.reference.model.named_parameters()), is_receiver=self._rank == 0)
        if self._rank == 0:
            precision = getattr(torch, self._settings.precision)
            with replacing_by_name(Path(path)) as temporary:
                save_file({name: tensor.to(precision) for name, tensor in whole.items()}, temporary)

    def load_reference(self, folder: str) -> None:
        assert self.reference is not None
        with torch.no_grad():
            fill(Path(folder), dict(self.reference.model.named_parameters()))

    def free_address(self, host: str) -> str:
        """Return an address of the first rank's host with a port that is free on this rank's."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{host}:{free.getsockname()[1]}"

    def meet(self, engines: Sequence[Process], address: str) -> None:
        """Connect to the engines, before :meth:`send` and after an engine was replaced."""
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender(
            Source(self.policy.model, getattr(torch, self._settings.precision)),
            EngineClient(engines, tensor_parallel=self._settings.num_gpus_of_engine),
            rank=self._rank,
            address=address,
        )

    def send(self, version: int, is_again: bool = False) -> tuple[int, int]:
        """Send the weights to all engines; returns the bytes of one copy and the calls of one engine.

        With ``is_again`` the last weights are sent again; raises ClusterFault if they have changed since.
        """
        assert self._sender is not None
        if is_again and not self._is_sent:
            raise ClusterFault(
                f"the weights of version {version} are no longer there: an engine was lost during an update; "
                f"{AGAIN}"
            )
        self._is_sent = True
        sizes: tuple[int, int] = self._sender.send(version)
        return sizes

    def sizes(self) -> dict[str, int]:
        """Return the size of every parameter in float32, in order."""
        return {name: 4 * master.numel() for name, master in self.policy.masters.items()}

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Gather whole parameters on rank 0; the other ranks return nothing."""
        gathered = _whole({name: self.policy.masters[name] for name in names}, is_receiver=self._rank == 0)
        free_cached_memory(torch.device(self._device))
        return gathered


def _whole(tensors: dict[str, Any], *, is_receiver: bool) -> dict[str, Tensor]:
    gathered = {}
    for name, tensor in tensors.items():  # one at a time, because only rank 0 stores them
        whole = tensor.detach().full_tensor()
        if is_receiver:
            gathered[name] = whole.cpu().contiguous()
    return gathered


class RankGroup:
    """``size`` rank processes of the class ``kind``, joined. Raises ClusterFault if that fails."""

    def __init__(
        self,
        cluster: Cluster,
        settings: RankSettings,
        *,
        size: int,
        kind: type[Rank] = Rank,
    ) -> None:
        self._cluster = cluster
        self._call_lock = threading.Lock()
        self._ranks: list[Process] = []
        try:
            for rank in range(size):
                process = cluster.start(
                    f"trainer rank {rank}",
                    kind,
                    settings,
                    rank,
                    size,
                    busy_s=settings.stall_s,
                    place=("rank", rank),
                )
                self._ranks.append(process)
            self.host = self._ranks[0].host
            [port] = cluster.call_all(self._ranks[:1], "open_store", self.host)
        except BaseException:
            self.close()
            raise
        self.built = self.call("build", self.host, port)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks and return their results.

        Raises an OutriderError of a rank as it is, and ClusterFault for a rank that failed, died or made no
        progress; all ranks are ended then.
        """
        with self._call_lock:  # calls of two threads in different orders would deadlock the ranks
            if not self._ranks:
                raise ClusterFault(f"the trainer ranks have ended; {AGAIN}")
            try:
                return self._cluster.call_all(self._ranks, method, *arguments)
            except BaseException as error:
                found = self._cluster.check()
                lost = [found[rank.name] for rank in self._ranks if rank.name in found]
                self.close()
                if isinstance(error, ClusterFault) and lost:  # the others only lost their connection to it
                    raise ClusterFault(str(lost[0])) from error
                if isinstance(error, ProcessLost):  # a rank cannot be replaced
                    raise ClusterFault(str(error)) from error
                raise

    def close(self) -> None:
        """End all ranks; may be called twice."""
        for rank in self._ranks:
            self._cluster.kill(rank)
        self._ranks = []


_PIECE_BYTES: Final = 256 * 2**20  # of weights gathered at a time


class ShardedLearner:
    """Learner with several trainer ranks; rollouts run in this process, with a copy of the weights."""

    def __init__(self, settings: RunSettings, cluster: Cluster, *, initial: bool) -> None:
        self.num_steps = 0
        self.learning_rate = 0.0
        self.has_reference = settings.algorithm.needs_reference
        self.language_model, self.trained_parameters = _load_copy(settings)
        require_shardable(str(_folder(settings)))
        self._has_fresh_copy = not settings.uses_nccl  # after every change, because rollouts use the copy
        self._connected: list[Process] = []
        self._is_stale = False
        self._cluster = cluster
        cluster.reserve(settings, "ranks")
        try:
            self._group = RankGroup(
                cluster, _rank_settings(settings, initial=initial), size=settings.cluster.num_trainers
            )
            self._pieces = list(pieces(self._group.call("sizes")[0], room=_PIECE_BYTES))
            if initial and settings.model.initial_checkpoint is not None:
                self._mark_stale()
        except BaseException:
            self.close()
            raise

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
        training_step: int = 0,
    ) -> UpdateReport:
        own_loss = _own_loss(algorithm)
        [first, *_] = self._group.call(
            "update", list(traces), algorithm.objective, own_loss, version, list(probes), training_step
        )
        report: UpdateReport
        num_steps_before = self.num_steps
        report, self.num_steps, self.learning_rate = first
        on_batch(report.num_scored_tokens)
        if self.num_steps != num_steps_before:  # no step without a signal
            self._mark_stale()
        return report

    def score(self, traces: Sequence[Trace]) -> None:
        [node_values, *_] = self._group.call("score", list(traces))
        for trace, values in zip(traces, node_values, strict=True):
            for node, kl in zip(trace.nodes, values, strict=True):
                node.kl = kl

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        # the progress of all steps arrives at the end
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
        require_reference(path, checksum=checksum)
        self._group.call("load_reference", str(path.parent))

    def export(self, folder: Path) -> None:
        if self._is_stale:
            self._sync()
        export(self.language_model, folder, check=False)

    def close(self) -> None:
        if hasattr(self, "_group"):
            self._group.close()
        self._cluster.release("ranks")

    def send(self, version: int, engines: Sequence[Process], *, is_again: bool = False) -> tuple[int, int]:
        """Send the weights from the ranks' GPUs to the engines; see :meth:`Rank.send`."""
        if self._connected != list(engines):
            [address, *_] = self._group.call("free_address", self._group.host)
            self._group.call("meet", list(engines), address)
            self._connected = list(engines)
        sizes: tuple[int, int] = self._group.call("send", version, is_again)[0]
        return sizes

    def _mark_stale(self) -> None:
        """Update the local copy; if no rollouts use it, only when it is needed."""
        self._is_stale = True
        if self._has_fresh_copy:
            self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        """Copy the weights of the ranks to the local model, piece by piece."""
        self._is_stale = False
        own = dict(self.language_model.model.named_parameters())
        for names in self._pieces:
            for name, whole in self._group.call("weights", names)[0].items():
                own[name].copy_(whole)


def _load_copy(settings: RunSettings) -> tuple[LanguageModel, frozenset[str]]:
    """Load the copy for rollouts; also returns the names of the trained parameters."""
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
    distill = settings.algorithm.distill
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
        device=settings.model.device,
        num_gpus_of_engine=settings.cluster.tensor_parallel,
        stall_s=settings.cluster.stall_s,
        teacher_rate=distill.teacher_rate if distill is not None and distill.teacher == "ema" else None,
    )


def _precision(settings: RunSettings) -> Literal["bfloat16", "float32"]:
    """Resolve the precision of all processes. Raises ConfigError if that is impossible in this one."""
    model = settings.model
    if model.precision == "auto" and model.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError('model.precision = "auto": no GPU is seen here; set "bfloat16" or "float32"')
    return resolve_precision(model.precision, model.device)


def _own_loss(algorithm: Algorithm) -> Any:
    """Return an overridden token loss, or None. Raises ConfigError if it cannot be pickled."""
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
