"""What a critic is trained with, and how it is asked while a policy plays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.algorithms.common.group_settings import with_preset
from outrider.config import Settings
from outrider.engines.base import LocalSettings
from outrider.plugins.fields import EmbedderName

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "scienceworld": {"num_candidates": 6, "decay": 0.97, "floor": 0.6},
    "webshop": {"num_candidates": 4, "decay": 0.9, "floor": 0.5},
}


class CriticSettings(Settings):
    """Implicit Q-learning (Kostrikov et al., arXiv 2110.06169) as Retrospex runs it.

    V is the ``expectile`` of Q over the recorded actions; ``discount`` a turn; the target network moves by
    ``target_rate`` an update. ``num_updates`` of Adam with ``learning_rate`` on batches of ``batch_size``
    turns. Texts are vectors of ``embedder``; networks have two layers of ``hidden`` units.
    """

    embedder: EmbedderName = "minilm"
    hidden: int = Field(128, ge=1)
    expectile: float = Field(0.7, gt=0, lt=1)
    discount: float = Field(0.99, ge=0, le=1)
    target_rate: float = Field(0.005, gt=0, le=1)
    learning_rate: float = Field(1e-4, gt=0)
    batch_size: int = Field(128, ge=1)
    num_updates: int = Field(200_000, ge=1)
    seed: int = 0


class RetrospexSettings(LocalSettings):
    """The local engine, which draws ``num_candidates`` turns a request and gives the one that the critic of
    the file ``critic`` and the policy together like best.

    In turn t (from 0) the policy's word counts with the weight max(``floor``, ``decay`` to the power of t). A
    ``preset`` fills what is not given, with the values of the released scripts. ``allow_training``: train on
    such turns all the same, though they are not drawn as their log-probs say.
    """

    reads_contexts: ClassVar[bool] = True
    input_paths: ClassVar[frozenset[str]] = frozenset({"critic"})

    type: Literal["retrospex"] = "retrospex"  # type: ignore[assignment]
    critic: Path
    preset: Literal["scienceworld", "webshop"] = "scienceworld"
    num_candidates: int = Field(6, ge=1)
    decay: float = Field(0.97, ge=0, le=1)
    floor: float = Field(0.6, ge=0, le=1)
    allow_training: bool = False

    def no_training(self) -> str:
        """See :class:`~outrider.engines.base.EngineSettings`."""
        if self.allow_training:
            return ""
        return (
            "engine.type = retrospex is for evaluations: what a critic chooses is not drawn as its log-probs "
            "say, and training on it is biased; engine.allow_training = true trains all the same"
        )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(PRESETS, data, default="scienceworld")
