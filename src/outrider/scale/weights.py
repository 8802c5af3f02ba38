"""How new weights travel to the engines: in pieces, with a version, and checked where they arrive.

A piece is safetensors in memory. What carries it (Ray's object store, files in a folder that all see) is one
small class with three methods; packing, checks and the order of calls are the same for all of them.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from outrider.engines.base import EngineSettings
from outrider.errors import ClusterFault, ConfigError
from outrider.train.learner import Learner
from outrider.train.update.adapters import broken_ties, merge_adapters, to_folder_format

PIECE_BYTES: Final = 128 * 2**20


class Carrier(Protocol):
    """Brings bytes to other processes. A handle is what :meth:`put` gave; it can be pickled."""

    def put(self, piece: bytes) -> Any:
        """Take a piece; its handle."""
        ...

    def get(self, handle: Any) -> bytes:
        """The piece, in any process."""
        ...

    def drop(self, handle: Any) -> None:
        """Nobody asks for it any more."""
        ...


class ObjectStore:
    """``store``: Ray's object store, a copy in shared memory a machine."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def put(self, piece: bytes) -> Any:
        """See :class:`Carrier`."""
        return self._ray.put(piece)

    def get(self, handle: Any) -> bytes:
        """See :class:`Carrier`."""
        return bytes(self._ray.get(handle))

    def drop(self, handle: Any) -> None:
        """Ray counts who holds the handle: nothing to do."""


class Folder:
    """``disk``: files in a folder that every machine sees, removed once no engine may need them any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_put = 0
        for stale in path.glob("weights-*.safetensors"):  # of a run that was killed
            stale.unlink(missing_ok=True)

    def put(self, piece: bytes) -> str:
        """See :class:`Carrier`. Raises ClusterFault where the folder takes no file."""
        target = self._path / f"weights-{self._num_put}.safetensors"
        self._num_put += 1
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            target.write_bytes(piece)
        except OSError as error:
            raise ClusterFault(f"cluster.weights = disk: {target}: {error.strerror}") from error
        return str(target)

    def get(self, handle: str) -> bytes:
        """See :class:`Carrier`. Raises ClusterFault where this process does not see the file."""
        try:
            return Path(handle).read_bytes()
        except OSError as error:
            raise ClusterFault(
                f"cluster.weights = disk: {handle}: {error.strerror}; the run's folder has to be on storage "
                "that all machines share"
            ) from error

    def drop(self, handle: str) -> None:
        """Remove the file."""
        Path(handle).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Weights on their way. ``names`` are all parameters in it; ``checksum`` is the CRC-32 of all pieces."""

    version: int
    names: tuple[str, ...]
    pieces: tuple[Any, ...]
    num_bytes: int
    checksum: int


def engine_weights(learner: Learner, engine: EngineSettings) -> dict[str, Tensor]:
    """What engines have to get. One that generates with the model that trains: what trains, adapters by their
    own names. Any other one: all weights, adapters merged, since vLLM loads the projections of a layer
    together and leaves those that it did not get undefined; vLLM gets them by the names of the model's
    folder. Raises ConfigError for adapters that part tied weights.
    """
    model = learner.language_model.model
    if not engine.is_exact:
        require_ties(model)
        weights = merge_adapters(model)
        return dict(to_folder_format(model, weights.items())) if engine.has_own_processes else weights
    return {name: parameter for name, parameter in model.named_parameters() if name in learner.trained}


def require_ties(model: nn.Module) -> None:
    """Raises ConfigError where an engine that loads the model's folder could not hold what is sent to it."""
    if parted := broken_ties(model):
        raise ConfigError(
            f"model.lora.target_modules: {' and '.join(parted)} are one tied weight, and an adapter on one "
            "of them parts them: engines in processes of their own cannot have that, so leave it out"
        )


def pack(tensors: Mapping[str, Tensor], *, version: int, carrier: Carrier) -> Parcel:
    """Hand everything to the carrier, a piece at a time."""
    handles: list[Any] = []
    checksum = num_bytes = 0
    try:
        for names in pieces({name: tensor.nbytes for name, tensor in tensors.items()}):
            # a tensor may be a view into a larger one, or shared: each is written on its own
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
    """Copy a parcel into the tensors of these names; the checksum of what was read. Raises ClusterFault for
    other weights than those that were sent.
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


def drop(handles: list[Any] | tuple[Any, ...], carrier: Carrier) -> None:
    """Let go of pieces."""
    for handle in handles:
        carrier.drop(handle)


def pieces(sizes: Mapping[str, int], *, room: int = PIECE_BYTES) -> Iterator[list[str]]:
    """Names in order, in lists of at most ``room`` bytes; a larger tensor is one of its own."""
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
