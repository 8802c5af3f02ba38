"""What the processes of a run ask Ray for: processors, and on GPUs a GPU a rank, ``tensor_parallel`` an
engine. Where both are in one place (``colocate``), a rank and its engine have half of one GPU each: Ray gives
them the same one, and vLLM sleeps while the rank works.
"""

from dataclasses import dataclass
from typing import Any

from outrider.train.settings import RunSettings

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
        """See :attr:`rank`."""
        return self._actor(0.5 if self.colocates else self.tensor_parallel)

    def _with_gpus(self, num: float) -> Bundle:
        return {"CPU": 1} | ({} if self.device == "cpu" else {"GPU": num})

    def _actor(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": 1} | ({} if self.device == "cpu" else {"num_gpus": num_gpus})
