"""One trainer rank: an actor that holds its shards, and does what all ranks are told at the same time."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.algorithms.base import ObjectiveSettings
from outrider.atomic_io import replacing_by_name
from outrider.engines.local.model import LanguageModel
from outrider.errors import ClusterFault
from outrider.scale import collective
from outrider.scale.placement import Shape
from outrider.scale.policy import ShardedPolicy, ShardedScorer, local
from outrider.scale.resources import Resources
from outrider.scale.sharding import allocate, begin, choose_empty, empty_model, fill, shard
from outrider.scale.waiting import AGAIN
from outrider.trace import Trace
from outrider.train.data.sft import cold_start
from outrider.train.learning_settings import (
    ColdStartSettings,
    LoraSettings,
    OptimizerSettings,
    UpdateSettings,
)
from outrider.train.update.batch_loss import TokenLossFn
from outrider.train.update.pack import RolloutPath
from outrider.train.update.policy import checkpoint_layers, set_threads
from outrider.train.update.reward_kl import measure_kl
from outrider.train.update.update import UpdateReport, update
from outrider.train.update.weight_files import tensor_folder


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
        :class:`outrider.scale.direct.Sender`.
        """
        import ray

        from outrider.scale.direct import EngineClient, Sender, Source

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
