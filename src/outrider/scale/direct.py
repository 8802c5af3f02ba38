"""Weights from the GPUs of the trainer ranks straight into those of vLLM (``cluster.weights`` = ``nccl`` or
``ipc``), through the trainer's side of vLLM's weight transfer (0.32). The process that was started sees none.

All ranks gather tensor by tensor; rank 0 sends them, and calls the engines meanwhile. A broadcast of NCCL has
no limit of its own: the call of the ranks has one, and ends them, and the run begins anew from its newest
checkpoint then. None of this has run on a GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from outrider.engines.vllm_requests import require_vllm
from outrider.engines.weight_sum import NAME, append_sum
from outrider.errors import ClusterFault, ConfigError
from outrider.scale.waiting import results
from outrider.scale.weights import require_ties
from outrider.train.update.adapters import iter_merged, merged_names, to_folder_format


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """A tensor that will come: its name, type and shape, as vLLM asks for them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """The weights of a model in shards by Hugging Face names, adapters merged, in ``dtype``; behind them the
    sum of them all. Every rank has to go through all of it: each tensor is gathered. Raises ConfigError for
    adapters that part tied weights.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        require_ties(model)
        self._model, self._dtype = model, dtype

    def metadata(self) -> list[TensorMetadata]:
        """What comes, in its order; nothing is gathered."""
        tensors = [
            TensorMetadata(name=name, dtype=self._dtype, shape=tuple(tensor.shape))
            for name, tensor in self._empty()
        ]
        return [*tensors, TensorMetadata(name=NAME, dtype=torch.int64, shape=(1,))]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        gathered = to_folder_format(self._model, iter_merged(self._model, whole=_whole))
        return append_sum((name, tensor.to(self._dtype).contiguous()) for name, tensor in gathered)

    def _empty(self) -> Iterator[tuple[str, Tensor]]:
        names = merged_names(self._model).items()
        return to_folder_format(
            self._model, ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in names)
        )

    @property
    def num_bytes(self) -> int:
        """Of all tensors but the sum."""
        return self._dtype.itemsize * sum(tensor.numel() for _, tensor in self._empty())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class EngineClient:
    """The calls that vLLM's sender makes of the receiving side, to all engine processes at a time. Engine
    ``e`` has the ranks from ``1 + e * tensor_parallel`` of the transfer. Raises ClusterFault for an engine
    that does not answer in time.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], *, tensor_parallel: int, limit_s: float) -> None:
        self._ray, self._actors = ray, list(actors)
        self._tensor_parallel, self._limit_s = tensor_parallel, limit_s
        self.num_receivers = len(self._actors) * tensor_parallel
        self.version = 0  # of the weights that are sent next
        self.num_calls = 0  # of one engine, since the last send began

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Meet the sender."""
        infos = [dict(init_info) for _ in self._actors]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._tensor_parallel
        self._call_all("meet", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        """No engine serves anybody from now on."""
        self.num_calls = 0
        self._call_all("begin_update", [()] * len(self._actors))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive what is being sent."""
        self._call_all("take", [(dict(update_info),)] * len(self._actors))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve again. Raises ClusterFault where an engine says another version."""
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
    """A trainer rank's side; made and asked on all ranks at once."""

    def __init__(self, source: Source, client: EngineClient, *, kind: str, rank: int, address: str) -> None:
        """``address`` is rank 0's, ``host:port`` with a free port. Raises ModelError without the version of
        vLLM that this is for.
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
        """All weights to all engines; bytes of one copy, and calls of one engine."""
        self._client.version = version
        self._engine.send_weights()
        return self._source.num_bytes, self._client.num_calls

    def close(self) -> None:
        """Leave the other side."""
        self._engine.shutdown()
