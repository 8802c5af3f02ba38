"""Transfer of new weights to the engines, with a version, and checked on arrival.

Two ways: a file in memory that all processes of a machine share (on several machines, in the run's folder),
or NCCL from the GPUs of the trainer ranks to those of vLLM. Engines read only the tensors that have changed.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from outrider.distributed.processes import SHARED_MEMORY, Cluster, Process
from outrider.engines.base import EngineSettings
from outrider.engines.vllm.engine import require_interface
from outrider.engines.vllm.weight_sum import NAME, append_sum
from outrider.errors import ClusterFault, ConfigError
from outrider.files import file_checksum
from outrider.training.adapters import (
    broken_ties,
    iter_merged,
    merge_adapters,
    merged_names,
    to_folder_format,
)
from outrider.training.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Weights in a file of safetensors.

    Attributes:
        version: Version of the weights.
        path: File with all tensors.
        checksum: CRC-32 of the file.
        previous: Version that was sent before, or None.
        changed: Names of the tensors that differ from those of ``previous``.
    """

    version: int
    path: str
    checksum: int
    previous: int | None
    changed: tuple[str, ...]


class WeightFiles:
    """Writes one file per version; the newest one stays for engines that replace others."""

    def __init__(self, cluster: Cluster, run_folder: Path) -> None:
        self._cluster, self._run_folder = cluster, run_folder
        self._folder: Path | None = None
        self.newest: Parcel | None = None

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], version: int) -> Parcel:
        """Write all tensors, unless they equal those of the version before. That file may still be read until
        :meth:`drop_older`.

        Raises ClusterFault if the file cannot be written.
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        folder = self._choose_folder(sum(tensor.nbytes for tensor in own.values()))
        path = folder / f"weights-{version}.safetensors"
        before, previous, changed = self.newest, None, tuple(own)
        try:
            if before is not None:
                previous, changed = before.version, _changed(own, before.path)
            if before is not None and not changed:
                self.newest = replace(before, version=version, previous=previous, changed=())
                return self.newest
            temporary = path.with_suffix(".tmp")
            save_file({name: _unshared(tensor) for name, tensor in own.items()}, temporary)
            temporary.replace(path)
            checksum = file_checksum(path)
        except (OSError, SafetensorError) as error:
            raise ClusterFault(f"the weights for the engines: {path}: {error}") from error
        self.newest = Parcel(
            version=version, path=str(path), checksum=checksum, previous=previous, changed=changed
        )
        return self.newest

    def _choose_folder(self, num_bytes: int) -> Path:
        """Return the folder of the files: shared memory if two versions fit there."""
        if self._folder is not None:
            return self._folder
        if not self._cluster.is_local:
            self._folder = self._run_folder.resolve()
        elif os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 2 * num_bytes:
            self._folder = SHARED_MEMORY / self._cluster.folder.name
        else:
            self._folder = self._cluster.folder
            self._cluster.note(
                f"{SHARED_MEMORY} has no room for two versions of the weights ({2 * num_bytes / 1e9:.1f} "
                f"GB): they are written to {self._folder}"
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.drop_older()  # of a run that was killed
        return self._folder

    def drop_older(self) -> None:
        """Delete all versions but the newest one."""
        if self._folder is not None:
            newest = None if self.newest is None else Path(self.newest.path)
            for path in self._folder.glob("weights-*"):
                if path != newest:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all files; may be called twice. The cluster removes the folder."""
        self.newest = None
        self.drop_older()


def _changed(tensors: Mapping[str, Tensor], path: str) -> tuple[str, ...]:
    """Return the names of the tensors that differ from a file's in any bit."""
    with safe_open(path, "pt") as file:
        known = set(file.keys())
        return tuple(
            name
            for name, tensor in tensors.items()
            if name not in known or not torch.equal(_bits(file.get_tensor(name)), _bits(tensor))
        )


def _bits(tensor: Tensor) -> Tensor:
    # as numbers, -0 would equal 0
    return tensor.reshape(-1).view(torch.uint8)


def _unshared(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is a part of a larger storage, which safetensors would refuse."""
    return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()


@torch.no_grad()
def read(parcel: Parcel, into: Mapping[str, Tensor], *, version: int | None) -> int:
    """Copy a parcel into tensors by name, or only what has changed if their ``version`` is the one before;
    returns the number of bytes. Raises ClusterFault if the weights differ from those that were sent.
    """
    num_bytes = 0
    if version is not None and version == parcel.previous and not parcel.changed:
        return num_bytes
    try:
        if file_checksum(parcel.path) != parcel.checksum:
            raise ClusterFault(f"the weights of version {parcel.version} did not arrive as they were sent")
        with safe_open(parcel.path, "pt") as file:
            is_next = version is not None and version == parcel.previous
            for name in parcel.changed if is_next else file.keys():
                tensor = file.get_tensor(name)
                if name not in into or into[name].shape != tensor.shape:
                    raise ClusterFault(f"weights of another model were sent: {name} {tuple(tensor.shape)}")
                into[name].copy_(tensor)
                num_bytes += tensor.nbytes
    except OSError as error:
        raise ClusterFault(
            f"{parcel.path}: {error.strerror or error}; the run's folder has to be on storage that all "
            "machines share"
        ) from error
    return num_bytes


def engine_weights(learner: Learner, engine: EngineSettings) -> dict[str, Tensor]:
    """Return the weights for the engines.

    An engine that generates with the model that trains gets the trained parameters. Any other one gets all
    weights with adapters merged, because vLLM loads the projections of a layer together and leaves missing
    ones undefined; vLLM gets them by the names in the model's folder. Raises ConfigError for adapters that
    separate tied weights.
    """
    model = learner.language_model.model
    if not engine.is_exact:
        require_ties(model)
        weights = merge_adapters(model)
        return dict(to_folder_format(model, weights.items())) if engine.has_own_processes else weights
    return {
        name: parameter for name, parameter in model.named_parameters() if name in learner.trained_parameters
    }


def require_ties(model: nn.Module) -> None:
    """Raise ConfigError if an adapter separates tied weights, which an engine cannot represent."""
    if parted := broken_ties(model):
        raise ConfigError(
            f"model.lora.target_modules: {' and '.join(parted)} are one tied weight, and an adapter on one "
            "of them parts them: engines in processes of their own cannot have that, so leave it out"
        )


def pieces(sizes: Mapping[str, int], *, room: int) -> Iterator[list[str]]:
    """Split names into lists of at most ``room`` bytes; a larger tensor is a list of its own."""
    names: list[str] = []
    left = room
    for name, size in sizes.items():
        if names and size > left:
            yield names
            names, left = [], room
        names.append(name)
        left -= size
    if names:
        yield names


# --- Transfer from the GPUs of the trainer ranks to those of vLLM (``cluster.weights`` = ``nccl``), through
# the trainer's side of vLLM's weight transfer (0.32). All ranks gather tensor by tensor; rank 0 sends the
# tensors and calls the engines meanwhile. A broadcast of NCCL has no time limit; a rank that makes no
# progress is ended by ``cluster.stall_s``, and the run restarts from its newest checkpoint. Not yet run on a
# GPU. ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """Name, type and shape of a tensor to be sent, as vLLM requires them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """The weights of a sharded model with Hugging Face names and merged adapters in ``dtype``, then their
    sum.

    Every rank has to iterate over all of it, because each tensor is gathered. Raises ConfigError for adapters
    that separate tied weights.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        require_ties(model)
        self._model, self._dtype = model, dtype

    def metadata(self) -> list[TensorMetadata]:
        """Describe the tensors in order, without gathering."""
        tensors = [
            TensorMetadata(name=name, dtype=self._dtype, shape=tuple(tensor.shape))
            for name, tensor in self._empty()
        ]
        return [*tensors, TensorMetadata(name=NAME, dtype=torch.int64, shape=(1,))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        def whole(tensor: Tensor) -> Tensor:
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        gathered = to_folder_format(self._model, iter_merged(self._model, whole=whole, dtype=self._dtype))
        return append_sum((name, tensor.to(self._dtype).contiguous()) for name, tensor in gathered)

    def _empty(self) -> Iterator[tuple[str, Tensor]]:
        names = merged_names(self._model).items()
        return to_folder_format(
            self._model, ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in names)
        )

    @property
    def num_bytes(self) -> int:
        """Size of all tensors without the sum."""
        return self._dtype.itemsize * sum(tensor.numel() for _, tensor in self._empty())


class EngineClient:
    """Calls of vLLM's sender, forwarded to all engine processes concurrently.

    Engine ``e`` has the ranks from ``1 + e * tensor_parallel`` of the transfer. Raises ClusterFault for an
    engine that died.
    """

    def __init__(self, engines: Sequence[Process], *, tensor_parallel: int) -> None:
        self._engines = list(engines)
        self._tensor_parallel = tensor_parallel
        self.num_receivers = len(self._engines) * tensor_parallel
        self.version = 0  # of the next weights
        self.num_calls = 0  # of one engine, since the last send began

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._engines]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._tensor_parallel
        self._call_all("meet", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        self.num_calls = 0
        self._call_all("begin_update", [()] * len(self._engines))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._call_all("take", [(dict(update_info),)] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        versions = self._call_all("end_update", [(self.version,)] * len(self._engines))
        if wrong := [number for number, version in enumerate(versions) if version != self.version]:
            raise ClusterFault(f"engine {wrong[0]} has other weights than version {self.version}")

    def _call_all(self, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        self.num_calls += 1
        calls = [engine.call(method, *each) for engine, each in zip(self._engines, arguments, strict=True)]
        return [call.result() for call in calls]


class Sender:
    """A trainer rank's side, created and called on all ranks concurrently."""

    def __init__(self, source: Source, client: EngineClient, *, rank: int, address: str) -> None:
        """``address`` is ``host:port`` of rank 0 with a free port. Raises ModelError for another vLLM
        version.
        """
        self._source, self._client = source, client
        host, _, port = address.rpartition(":")
        require_interface()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            rank=rank, master_address=host, master_port=int(port), world_size=1 + client.num_receivers
        )
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def send(self, version: int) -> tuple[int, int]:
        """Send all weights to all engines; returns the bytes of one copy and the calls of one engine."""
        self._client.version = version
        self._engine.send_weights()
        return self._source.num_bytes, self._client.num_calls

    def close(self) -> None:
        self._engine.shutdown()
