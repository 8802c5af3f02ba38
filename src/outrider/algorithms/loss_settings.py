"""Settings of the token losses and of the corrections for a trainer–sampler mismatch. Each kind has its own
keys, so that a key without effect is an error.

Sources: docs/algorithms/objectives.md.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from outrider.config import Settings


class ClipLoss(Settings):
    """The clipped surrogate (PPO, arXiv 1707.06347): the ratio is bounded at 1 - ``clip_low`` and 1 +
    ``clip_high``.

    ``dual_clip`` (None: off) bounds the loss of negative advantages. ``keep_clipped_gradient`` keeps the
    gradient of a token that the upper bound clips (AEPO, arXiv 2510.14545).
    """

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower bound of the ratio: 1 - ``clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """Upper bound of the ratio: 1 + ``clip_high``."""
    dual_clip: float | None = Field(None, gt=1)
    keep_clipped_gradient: bool = False


class GppoLoss(Settings):
    """GPPO (Klear-Reasoner, arXiv 2508.07629): the value of the clip, with the gradient at its bound."""

    type: Literal["gppo"] = "gppo"
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower bound of the ratio: 1 - ``clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """Upper bound of the ratio: 1 + ``clip_high``."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss of negative advantages (None: off)."""


class CispoLoss(Settings):
    """CISPO (MiniMax-M1, arXiv 2506.13585): every token keeps its gradient, times its ratio within
    [``ratio_floor``, ``ratio_cap``].
    """

    type: Literal["cispo"] = "cispo"
    ratio_cap: float = Field(gt=0)
    """Upper bound of the ratio that weights a token."""
    ratio_floor: float = Field(0.0, ge=0)
    """Lower bound of the ratio that weights a token."""

    @model_validator(mode="after")
    def _bounded(self) -> "CispoLoss":
        if self.ratio_floor >= self.ratio_cap:
            raise ValueError(f"ratio_floor {self.ratio_floor} is not below ratio_cap {self.ratio_cap}")
        return self


class GspoLoss(Settings):
    """GSPO (arXiv 2507.18071): one ratio per rollout, clipped; its bounds are the paper's.

    ``sequence_ratio``: differentiated per token, as a whole, or as a ``product`` without length
    normalisation.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, le=1)
    """Lower bound of the rollout's ratio: 1 - ``clip_low``."""
    clip_high: float = Field(4e-4, ge=0)
    """Upper bound of the rollout's ratio: 1 + ``clip_high``."""
    sequence_ratio: Literal["token", "sequence", "product"] = "token"


class ReinforceLoss(Settings):
    """REINFORCE: no ratio and no clip."""

    type: Literal["reinforce"] = "reinforce"


LossSettings: TypeAlias = Annotated[
    ClipLoss | GppoLoss | CispoLoss | GspoLoss | ReinforceLoss, Field(discriminator="type")
]


class SamplerCorrection(Settings):
    """Importance weights trainer / engine for an engine whose policy differs from the trainer's, within
    [``lower``, ``upper``] (:mod:`outrider.algorithms.sampler_correction`).

    ``level``: ratio of each token, the product over its rollout, or the n-th root of that product.
    ``outside``: truncate a weight beyond a bound to the bound, or set it to 0.
    """

    upper: float = Field(2.0, gt=0)
    lower: float | None = Field(None, ge=0)
    level: Literal["token", "sequence", "geometric"] = "token"
    outside: Literal["truncate", "zero"] = "truncate"

    @model_validator(mode="after")
    def _bounded(self) -> "SamplerCorrection":
        if (self.lower or 0.0) >= self.upper:
            raise ValueError(f"lower {self.lower} is not below upper {self.upper}")
        return self


class RejectionMask(Settings):
    """Masks tokens on which engine and trainer disagree (:mod:`outrider.algorithms.sampler_correction`).

    ``statistic`` of the log-ratio d = log trainer - log engine: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` =
    exp(d) - 1 - d. ``scope``: the value of each token, or the sum, mean or maximum over its rollout, which is
    then trained or masked as a whole. The bounds of k1 are ratios engine / trainer (``lower`` None: 1 /
    ``upper``); those of k2 and k3 are bounds on the value itself.
    """

    statistic: Literal["k1", "k2", "k3"] = "k1"
    scope: Literal["token", "sum", "mean", "max"] = "token"
    upper: float = Field(2.0, gt=0)
    lower: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _bounded(self) -> "RejectionMask":
        if self.statistic != "k1" and self.lower is not None:
            raise ValueError(f"{self.statistic} is never negative: remove lower")
        if self.statistic == "k1" and self.scope == "max":
            raise ValueError("k1 is signed, so its maximum over a rollout does not bound its minimum")
        if self.statistic == "k1" and (self.lower or 1.0 / self.upper) >= self.upper:
            raise ValueError(
                "the bounds of k1 are ratios with lower < upper; without lower, upper is above 1"
            )
        return self


# Migration of the flat keys of versions up to 0.2.
_MOVED: Final[Mapping[str, str]] = {
    **{
        key: f"loss.{key}"
        for key in (
            "clip_low",
            "clip_high",
            "dual_clip",
            "keep_clipped_gradient",
            "ratio_cap",
            "ratio_floor",
            "sequence_ratio",
        )
    },
    "sampler_level": "sampler_correction.level",
    "sampler_floor": "sampler_correction.lower",
    "sampler_outside": "sampler_correction.outside",
}


_KINDS: Final[Mapping[str, type[Settings]]] = {
    "clip": ClipLoss,
    "gppo": GppoLoss,
    "cispo": CispoLoss,
    "gspo": GspoLoss,
}


def require_new_fields(name: str, fields: Mapping[str, Any]) -> None:
    """Raise TypeError if the settings class ``name`` of a plug-in declares a flat key of an earlier version,
    because nothing would read it.
    """
    for key in fields:
        if key in _MOVED:
            section = _MOVED[key].partition(".")[0]
            raise TypeError(f"{name}.{key} is now {_MOVED[key]}: declare a default of {section} instead")
    for key in ("loss", "sampler_correction"):
        default = fields[key].default
        if isinstance(default, str | int | float):
            raise TypeError(
                f"{name}.{key} is a section now: set {key}.{'type' if key == 'loss' else 'upper'} = {default}"
            )


def require_new_spelling(table: Mapping[str, Any]) -> None:
    """Raise ValueError for a flat key of an earlier version; the message has its new name."""
    for key in table:
        if key in _MOVED:
            raise ValueError(f"the key {key} is now {_MOVED[key]}")
    if isinstance(table.get("loss"), str):
        raise ValueError(
            f"loss is a section now: loss.type = {table['loss']}"[:80] + ", whose clip is its own"
        )
    if isinstance(table.get("sampler_correction"), int | float):
        raise ValueError(
            f"sampler_correction is a section now: sampler_correction.upper = {table['sampler_correction']}"
        )


def migrate_algorithm_keys(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``[algorithm]`` table recorded by a run of an earlier version to today's keys.

    A record contains every key, so keys without effect on its loss are dropped. Other tables are returned
    unchanged, so that their old keys are errors instead of being lost.
    """
    if not {"loss", "clip_low", "clip_high"} <= recorded.keys() or not isinstance(recorded["loss"], str):
        return dict(recorded)
    kind = recorded["loss"]
    fields = _KINDS.get(kind, ReinforceLoss).model_fields
    table = {key: value for key, value in recorded.items() if key not in _MOVED}
    table["loss"] = {key: recorded[key] for key in fields if key in recorded} | {"type": kind}
    if isinstance(upper := recorded.get("sampler_correction"), int | float):
        names = {"sampler_level": "level", "sampler_floor": "lower", "sampler_outside": "outside"}
        table["sampler_correction"] = {"upper": upper} | {
            new: recorded[old] for old, new in names.items() if old in recorded
        }
    return table


def migrate_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recorded settings tree in which today's sections were single keys."""
    algorithm = tree.get("algorithm")
    return (
        {**tree, "algorithm": migrate_algorithm_keys(algorithm)}
        if isinstance(algorithm, Mapping)
        else dict(tree)
    )


def plain_clip(loss: LossSettings, *, method: str) -> ClipLoss:
    """Return the clip bounds for a method with its own token loss. Raises ValueError for any other loss or
    setting that the method does not support.
    """
    if loss.type != "clip" or loss.dual_clip is not None or loss.keep_clipped_gradient:
        raise ValueError(
            f"{method} has its own token loss: set loss.type = clip, without dual_clip and "
            "keep_clipped_gradient"
        )
    return loss
