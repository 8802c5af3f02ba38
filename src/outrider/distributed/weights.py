"""Transfer of new weights to the engines: in pieces, with a version, and checked on arrival.

A piece is safetensors in memory. A carrier (Ray's object store, or files in a shared folder) is a small
class; packing, checks and the order of calls are the same for all of them.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from outrider.distributed.ray_session import results
from outrider.engines.base import EngineSettings
from outrider.engines.vllm.engine import require_vllm
from outrider.engines.vllm.weight_sum import NAME, append_sum
from outrider.errors import ClusterFault, ConfigError
from outrider.training.adapters import (
    broken_ties,
    iter_merged,
    merge_adapters,
    merged_names,
    to_folder_format,
)
from outrider.training.learner import Learner

PIECE_BYTES: Final = 128 * 2**20


class Carrier(Protocol):
    """Transfers bytes to other processes; handles can be pickled."""

    def put(self, piece: bytes) -> Any:
        """Store a piece and return its handle."""
        ...

    def get(self, handle: Any) -> bytes:
        """Return the piece, in any process."""
        ...

    def drop(self, handle: Any) -> None:
        """Delete a piece."""
        ...


class ObjectStore:
    """``store``: Ray's object store, with one copy in shared memory per machine."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def put(self, piece: bytes) -> Any:
        return self._ray.put(piece)

    def get(self, handle: Any) -> bytes:
        return bytes(self._ray.get(handle))

    def drop(self, handle: Any) -> None:
        """Do nothing: Ray counts references to the handle."""


class Folder:
    """``disk``: files in a folder that all machines share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_put = 0
        for stale in path.glob("weights-*.safetensors"):  # of a run that was killed
            stale.unlink(missing_ok=True)

    def put(self, piece: bytes) -> str:
        target = self._path / f"weights-{self._num_put}.safetensors"
        self._num_put += 1
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            target.write_bytes(piece)
        except OSError as error:
            raise ClusterFault(f"cluster.weights = disk: {target}: {error.strerror}") from error
        return str(target)

    def get(self, handle: str) -> bytes:
        try:
            return Path(handle).read_bytes()
        except OSError as error:
            raise ClusterFault(
                f"cluster.weights = disk: {handle}: {error.strerror}; the run's folder has to be on storage "
                "that all machines share"
            ) from error

    def drop(self, handle: str) -> None:
        Path(handle).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Packed weights: ``names`` are all parameters, ``checksum`` is the CRC-32 of all pieces."""

    version: int
    names: tuple[str, ...]
    pieces: tuple[Any, ...]
    num_bytes: int
    checksum: int


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


def pack(tensors: Mapping[str, Tensor], *, version: int, carrier: Carrier) -> Parcel:
    """Pass all tensors to the carrier, piece by piece."""
    handles: list[Any] = []
    checksum = num_bytes = 0
    try:
        for names in pieces({name: tensor.nbytes for name, tensor in tensors.items()}):
            # cloned, because a tensor may be a view or shared
            piece = save({name: tensors[name].detach().cpu().clone().contiguous() for name in names})
            checksum, num_bytes = zlib.crc32(piece, checksum), num_bytes + len(piece)
            handles.append(carrier.put(piece))
    except BaseException:
        drop(handles, carrier)
        raise
    return Parcel(
        version=version, names=tuple(tensors), pieces=tuple(handles), num_bytes=num_bytes, checksum=checksum
    )


@torch.no_grad()
def unpack(parcel: Parcel, into: Mapping[str, Tensor], *, carrier: Carrier) -> int:
    """Copy a parcel into tensors by name; returns the checksum. Raises ClusterFault if the weights differ
    from those that were sent.
    """
    checksum, seen = 0, set()
    for handle in parcel.pieces:
        piece = carrier.get(handle)
        checksum = zlib.crc32(piece, checksum)
        for name, tensor in load(piece).items():
            if name not in into or into[name].shape != tensor.shape:
                raise ClusterFault(f"weights of another model were sent: {name} {tuple(tensor.shape)}")
            into[name].copy_(tensor)
            seen.add(name)
    if checksum != parcel.checksum or seen != set(parcel.names):
        raise ClusterFault(f"the weights of version {parcel.version} did not arrive as they were sent")
    return checksum


def drop(handles: Sequence[Any], carrier: Carrier) -> None:
    """Delete pieces."""
    for handle in handles:
        carrier.drop(handle)


def pieces(sizes: Mapping[str, int], *, room: int = PIECE_BYTES) -> Iterator[list[str]]:
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


# --- Direct transfer from the GPUs of the trainer ranks to those of vLLM (``cluster.weights`` = ``nccl`` or
# ``ipc``), through the trainer's side of vLLM's weight transfer (0.32). All ranks gather tensor by tensor;
# rank 0 sends the tensors and calls the engines meanwhile. A broadcast of NCCL has no time limit, but the
# call of the ranks has one: it ends them, and the run restarts from its newest checkpoint. Not yet run on a
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

        gathered = to_folder_format(self._model, iter_merged(self._model, whole=whole))
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
    engine that does not respond in time.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], *, tensor_parallel: int, limit_s: float) -> None:
        self._ray, self._actors = ray, list(actors)
        self._tensor_parallel, self._limit_s = tensor_parallel, limit_s
        self.num_receivers = len(self._actors) * tensor_parallel
        self.version = 0  # of the next weights
        self.num_calls = 0  # of one engine, since the last send began

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        infos = [dict(init_info) for _ in self._actors]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._tensor_parallel
        self._call_all("meet", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        self.num_calls = 0
        self._call_all("begin_update", [()] * len(self._actors))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._call_all("take", [(dict(update_info),)] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        versions = self._call_all("end_update", [(self.version,)] * len(self._actors))
        if wrong := [number for number, version in enumerate(versions) if version != self.version]:
            raise ClusterFault(f"engine {wrong[0]} has other weights than version {self.version}")

    def _call_all(self, method: str, argument_lists: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.num_calls += 1
        calls = {
            f"engine {number}": getattr(actor, method).remote(*arguments)
            for number, (actor, arguments) in enumerate(zip(self._actors, argument_lists, strict=True))
        }
        return results(
            self._ray, calls, action=method, limit_s=self._limit_s, setting="cluster.update_timeout_s"
        )


class Sender:
    """A trainer rank's side, created and called on all ranks concurrently."""

    def __init__(self, source: Source, client: EngineClient, *, kind: str, rank: int, address: str) -> None:
        """``address`` is ``host:port`` of rank 0 with a free port. Raises ModelError for another vLLM
        version.
        """
        self._source, self._client = source, client
        host, _, port = address.rpartition(":")
        require_vllm()
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise ConfigError(f"cluster.weights = {kind}: vLLM has no such interface ({error})") from error
        info = (
            IPCTrainerInitInfo(rank=rank, packed=True)
            if kind == "ipc"
            else NCCLTrainerInitInfo(
                rank=rank, master_address=host, master_port=int(port), world_size=1 + client.num_receivers
            )
        )
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def send(self, version: int) -> tuple[int, int]:
        """Send all weights to all engines; returns the bytes of one copy and the calls of one engine."""
        self._client.version = version
        self._engine.send_weights()
        return self._source.num_bytes, self._client.num_calls

    def close(self) -> None:
        self._engine.shutdown()
