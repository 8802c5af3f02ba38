"""Published configurations of the group methods as settings, also listed in docs/algorithms/objectives.md.

``-paper`` follows the paper. ``-official`` follows the released script or the code base that runs it (verl
unless another is named; by default verl applies no sampler correction and uses a dual clip). Presets contain
only settings of the objective; batch sizes, learning rates and the number of mini-batches are settings of the
run.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

GrpoPreset = Literal[
    "grpo",
    "grpo-paper",
    "grpo-official",
    "dr-grpo",
    "dapo-paper",
    "dapo-official",
    "gppo-paper",
    "gppo-official",
    "gspo",
    "cispo-paper",
    "cispo-official",
    "rloo-paper",
    "rloo-official",
    "rloo-trl",
]
ReinforcePlusPlusPreset = Literal[
    "reinforce++",
    "reinforce++-official",
    "reinforce++-verl",
    "reinforce++-baseline",
    "reinforce++-baseline-official",
]

GigpoPreset = Literal["gigpo", "gigpo-paper", "gigpo-official"]

_UNCORRECTED: Mapping[str, Any] = {"sampler_correction": None}
_DUAL: Mapping[str, Any] = {"loss": {"dual_clip": 3.0}}  # verl's default, if the script does not set it
_SEQUENCES: Mapping[str, Any] = {"aggregation": "sequence_mean_token_mean"}
_DAPO: Mapping[str, Any] = {
    "group_size": 16,
    "loss": {"clip_high": 0.28},
    "overlong": {"counted": "all"},
    "dynamic_sampling": {"metric": "success", "max_extra_batches": 9},
}
_GPPO: Mapping[str, Any] = {"loss": {"type": "gppo", "clip_high": 0.28}, "positive_nll": 0.1}

GRPO_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "grpo-paper": {**_SEQUENCES, "kl_weight": 0.04, "kl_estimator": "k3"},
    "grpo-official": {**_UNCORRECTED, **_DUAL, "kl_weight": 0.001, "kl_estimator": "k3"},
    "dr-grpo": {"advantage": "group_centered", "aggregation": "constant_length", "max_length": 3000},
    "dapo-paper": _DAPO,
    "dapo-official": {**_DAPO, **_UNCORRECTED, "loss": {"clip_high": 0.28, "dual_clip": 10.0}},
    "gppo-paper": {**_GPPO, "advantage_std": "population"},
    "gppo-official": {
        **_GPPO,
        **_UNCORRECTED,
        "loss": {"type": "gppo", "clip_high": 0.28, "dual_clip": 10.0},
        "dynamic_sampling": {"metric": "success"},
    },
    "gspo": {**_SEQUENCES, "loss": {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}},
    "cispo-paper": {"loss": {"type": "cispo", "ratio_cap": 5.0}},
    "cispo-official": {
        **_UNCORRECTED,
        "loss": {"type": "cispo", "ratio_cap": 1.2},
        "kl_weight": 0.001,
        "kl_estimator": "k3",
    },
    "rloo-paper": {
        "advantage": "leave_one_out",
        "loss": {"type": "reinforce"},
        "aggregation": "sequence_mean_token_sum",
        "reward_kl_weight": 0.05,
    },
    "rloo-official": {**_UNCORRECTED, **_DUAL, "advantage": "leave_one_out", "reward_kl_weight": 0.001},
    "rloo-trl": {
        **_UNCORRECTED,
        **_SEQUENCES,
        "group_size": 2,
        "advantage": "leave_one_out",
        "loss": {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2, "sequence_ratio": "product"},
        "reward_kl_weight": 0.05,
    },
}

REINFORCE_PLUS_PLUS_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "reinforce++": {},
    "reinforce++-official": {**_UNCORRECTED, "variance": "population", "reward_kl_weight": 0.01},
    "reinforce++-verl": {**_UNCORRECTED, **_DUAL, "reward_kl_weight": 0.001},
    "reinforce++-baseline": {"group_baseline": True},
    "reinforce++-baseline-official": {
        "group_baseline": True,
        "variance": "population",
        "kl_weight": 1e-5,
        "kl_estimator": "k2",
        "sampler_correction": {"upper": 5.0, "lower": 0.5, "outside": "zero"},
        "dynamic_sampling": {"metric": "return"},
    },
}

GIGPO_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gigpo": {},
    "gigpo-paper": {"kl_weight": 0.01, "kl_estimator": "k3"},
    "gigpo-official": {
        **_UNCORRECTED,
        **_DUAL,
        "statistics": "samples",
        "invalid_penalty": 0.1,
        "kl_weight": 0.01,
        "kl_estimator": "k3",
    },
}


_DEFAULT_TYPES: Final = {"loss": "clip"}
"""Types of tables of presets that leave them out."""


def with_preset(presets: Mapping[str, Mapping[str, Any]], data: Any, *, default: str) -> Any:
    """Return the settings ``data``, with the values of their preset for keys that ``data`` does not set.

    A table that both set is merged, unless its ``type`` differs (for example ``loss.type``): the keys of the
    preset do not apply to another type.
    """
    if not isinstance(data, Mapping):
        return data
    preset = presets.get(str(data.get("preset", default)), {})
    merged = {**preset, **data}
    for name, table in preset.items():
        own = data.get(name)
        if isinstance(table, Mapping) and isinstance(own, Mapping):
            of_preset = table.get("type", _DEFAULT_TYPES.get(name))
            merged[name] = {**table, **own} if own.get("type", of_preset) == of_preset else own
    return merged
