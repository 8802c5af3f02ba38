"""Defaults and bounds of the settings of formulas: a changed default would silently change runs."""

import math
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective
from outrider.algorithms.entropy_branching import BranchSettings
from outrider.algorithms.exploration import ArpoSettings, CombinedSettings, Empo2Settings, RapoSettings
from outrider.algorithms.grpo import DynamicSamplingSettings, GroupSettings, GrpoSettings, OverlongSettings
from outrider.algorithms.loss_settings import (
    CispoLoss,
    ClipLoss,
    GppoLoss,
    GspoLoss,
    ReinforceLoss,
    RejectionMask,
    SamplerCorrection,
    migrate_algorithm_keys,
)
from outrider.algorithms.prefix import PrefixSettings
from outrider.algorithms.retrieval import RetrievalSettings
from outrider.cli import main
from outrider.config import Settings, validate
from outrider.errors import ConfigError
from outrider.training.settings import UpdateSettings

CLIP: dict[str, Any] = {
    "type": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "keep_clipped_gradient": False,
}  # fmt: skip
CORRECTION: dict[str, Any] = {"upper": 2.0, "lower": None, "level": "token", "outside": "truncate"}
OBJECTIVE: dict[str, Any] = {
    "group_size": 8, "advantage": "group_normalized", "loss": CLIP, "aggregation": "token_mean",
    "max_length": None, "pass_k": None,
    "sampler_correction": CORRECTION, "sampler_rejection": None, "positive_nll": 0.0, "entropy_bonus": 0.0,
    "observation_nll": 0.0,
    "kl_weight": 0.0, "kl_estimator": "k2", "distill": None,
}  # fmt: skip
RETRIEVAL: dict[str, Any] = {
    "probability": 0.5, "final_probability": None, "schedule": "constant", "schedule_steps": None,
    "scope": "all", "include_terminal": False, "noise": 0.0, "mode": "context", "level": "step",
    "form": "tags", "min_similarity": None,
}  # fmt: skip
DEFAULTS: dict[type[Settings], dict[str, Any]] = {
    ClipLoss: CLIP,
    GppoLoss: {"type": "gppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    GspoLoss: {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "sequence_ratio": "token"},
    ReinforceLoss: {"type": "reinforce"},
    SamplerCorrection: CORRECTION,
    RejectionMask: {"statistic": "k1", "scope": "token", "upper": 2.0, "lower": None},
    ObjectiveSettings: OBJECTIVE,
    OffPolicyObjective: OBJECTIVE | {
        "old_context": "acting", "student_mask": "token", "min_probability": math.exp(-5.0)},
    BranchSettings: {
        "first_wave": None, "num_children": 1, "window": 20, "base_probability": 0.5, "entropy_weight": 0.2,
        "decision": "bernoulli", "threshold": 0.5, "source": "after_result", "reduce": "mean",
        "normalizer": "log_vocabulary", "attribution": "soft", "pre_monitor": False, "branch_penalty": 0.0,
        "penalty_scope": "lineage",
    },
    RetrievalSettings: RETRIEVAL,
    RapoSettings: OBJECTIVE | {
        "type": "rapo", "loss": CLIP | {"clip_low": 0.28, "clip_high": 0.28},
        "aggregation": "sequence_mean_token_mean", "num_hybrid": 4,
        "advantage_weight": 0.2, "ratio_weight": 0.05, "quality": True, "timing": "entropy",
        "sign": "decrease",
        "retrieval": RETRIEVAL, "branch": None, "invalid_penalty": 0.0, "statistics": "rollouts",
    },
    OverlongSettings: {"max_tokens": None, "buffer": None, "factor": 1.0, "counted": "policy"},
    DynamicSamplingSettings: {"metric": "return", "max_extra_batches": 9},
    GroupSettings: OBJECTIVE | {
        "overlong": None, "dynamic_sampling": None, "prefix": None, "reward_kl_weight": 0.0,
        "invalid_penalty": 0.0, "statistics": "rollouts",
    },
    PrefixSettings: {"share": 0.5, "start": 0.0, "low": 0.25, "high": 0.5},
    UpdateSettings: {
        "num_mini_batches": 1, "mini_batch_samples": None, "num_epochs": 1, "max_tokens": 4096,
        "max_logprob_gap": 0.1, "checkpoint_activations": False, "attention": "auto",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults(kind: type[Settings]) -> None:
    assert kind().model_dump() == DEFAULTS[kind]


SMALL = 2.0**-20
CISPO = {"ratio_cap": 2.0}
# Class, setting, smallest and largest value, and other settings that it needs.
CLOSED: list[tuple[type[Settings], str, float | None, float | None, dict[str, Any]]] = [
    (ObjectiveSettings, "group_size", 2, None, {}),
    (ClipLoss, "clip_low", 0.0, 1.0, {}),
    (ClipLoss, "clip_high", 0.0, None, {}),
    (CispoLoss, "ratio_floor", 0.0, None, CISPO),
    (ObjectiveSettings, "max_length", 1, None, {"aggregation": "constant_length"}),
    (SamplerCorrection, "lower", 0.0, None, {}),
    (ObjectiveSettings, "positive_nll", 0.0, None, {}),
    (ObjectiveSettings, "observation_nll", 0.0, None, {}),
    (ObjectiveSettings, "kl_weight", 0.0, None, {}),
    (OffPolicyObjective, "min_probability", 0.0, None, {}),
    (GppoLoss, "clip_low", 0.0, 1.0, {}),
    (GppoLoss, "clip_high", 0.0, None, {}),
    (GspoLoss, "clip_low", 0.0, 1.0, {}),
    (GspoLoss, "clip_high", 0.0, None, {}),
    (RapoSettings, "num_hybrid", 0, 8, {}),
    (RapoSettings, "advantage_weight", 0.0, None, {}),
    (RapoSettings, "ratio_weight", 0.0, None, {}),
    (BranchSettings, "first_wave", 1, None, {}),
    (BranchSettings, "num_children", 1, None, {}),
    (BranchSettings, "window", 1, None, {}),
    (BranchSettings, "base_probability", 0.0, 1.0, {}),
    (BranchSettings, "entropy_weight", 0.0, None, {}),
    (BranchSettings, "threshold", 0.0, 1.0, {}),
    (BranchSettings, "branch_penalty", 0.0, 1.0, {}),
    (RetrievalSettings, "probability", 0.0, 1.0, {}),
    (RetrievalSettings, "final_probability", 0.0, 1.0, {"schedule": "linear"}),
    (RetrievalSettings, "noise", 0.0, 1.0, {}),
    (RetrievalSettings, "min_similarity", -1.0, 1.0, {}),
    (OverlongSettings, "max_tokens", 1, None, {}),
    (OverlongSettings, "buffer", 1, None, {}),
    (DynamicSamplingSettings, "max_extra_batches", 0, None, {}),
    (GroupSettings, "reward_kl_weight", 0.0, None, {}),
    (GroupSettings, "invalid_penalty", 0.0, None, {}),
    (UpdateSettings, "num_mini_batches", 1, None, {}),
    (UpdateSettings, "mini_batch_samples", 1, None, {}),
    (UpdateSettings, "num_epochs", 1, None, {}),
    (UpdateSettings, "max_tokens", 1, None, {}),
]
OPEN: list[tuple[type[Settings], str, float | None, float | None, dict[str, Any]]] = [
    (RejectionMask, "upper", 0.0, None, {"statistic": "k2"}),
    (RejectionMask, "lower", 0.0, 2.0, {}),
    (ClipLoss, "dual_clip", 1.0, None, {}),
    (GppoLoss, "dual_clip", 1.0, None, {}),
    (CispoLoss, "ratio_cap", 0.0, None, {}),
    (CispoLoss, "ratio_floor", None, 2.0, CISPO),
    (SamplerCorrection, "upper", 0.0, None, {}),
    (SamplerCorrection, "lower", None, 2.0, {}),
    (OffPolicyObjective, "min_probability", None, 1.0, {}),
    (OverlongSettings, "factor", 0.0, None, {}),
    (UpdateSettings, "max_logprob_gap", 0.0, None, {}),
]


def accepts(kind: type[Settings], options: dict[str, Any]) -> bool:
    try:
        validate(kind, options)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("is_closed", "bounds"),
    [*((True, bounds) for bounds in CLOSED), *((False, bounds) for bounds in OPEN)],
    ids=lambda one: f"{one[0].__name__}.{one[1]}" if isinstance(one, tuple) else "",
)
def test_bounds(is_closed: bool, bounds: tuple[type[Settings], str, float | None, float | None, Any]) -> None:
    kind, name, least, most, rest = bounds
    for bound, sign in ((least, -1), (most, 1)):
        if bound is not None:
            step = 1 if isinstance(bound, int) else SMALL
            assert accepts(kind, rest | {name: bound}) is is_closed
            assert accepts(kind, rest | {name: bound - sign * step})
            assert not accepts(kind, rest | {name: bound + sign * step})


@pytest.mark.parametrize(
    "wrong",
    [
        {"scope": "max"},
        {"upper": 1.0},
        {"lower": 2.0},
        {"statistic": "k2", "lower": 0.5},
        {"statistic": "k3", "lower": 0.5},
    ],
    ids=str,
)
def test_rejections_without_meaning_are_errors(wrong: dict[str, Any]) -> None:
    assert not accepts(RejectionMask, wrong)
    assert accepts(RejectionMask, {"statistic": "k2", "scope": "max", "upper": 0.5})
    # both bounds given: the upper one may be below 1
    assert accepts(RejectionMask, {"lower": 0.5, "upper": 0.75})


def test_the_buffer_of_the_overlong_penalty_is_a_fifth_in_whole_tokens() -> None:
    assert [OverlongSettings().bounds(limit) for limit in (4, 5, 9, 20480)] == [
        (4, 1),
        (5, 1),
        (9, 1),
        (20480, 4096),
    ]
    assert OverlongSettings(max_tokens=12, buffer=12).bounds(20) == (12, 12)
    with pytest.raises(ValueError, match="begins after 8 tokens, and a response has at most 8"):
        OverlongSettings(max_tokens=10).bounds(8)


@pytest.mark.parametrize(
    "loss", [{"loss": "gppo"}, {"clip_low": 0.1}, {"ratio_cap": 2.0}, {"sampler_level": "token"}]
)
def test_a_flat_key_of_earlier_versions_is_an_error_with_its_new_name(loss: dict[str, Any]) -> None:
    new_names = {
        "loss": "loss.type = gppo",
        "clip_low": "loss.clip_low",
        "ratio_cap": "loss.ratio_cap",
        "sampler_level": "sampler_correction.level",
    }
    with pytest.raises(ConfigError, match=new_names[next(iter(loss))]):
        validate(ObjectiveSettings, loss)


def test_a_section_with_one_key_has_the_defaults_of_the_method_for_the_others() -> None:
    found = validate(RapoSettings, {"loss": {"clip_high": 0.4}}).loss
    assert found == ClipLoss(clip_low=0.28, clip_high=0.4)
    assert validate(RapoSettings, {"loss": {"type": "gspo"}, "ratio_weight": 0.0}).loss == GspoLoss()
    corrected = validate(ObjectiveSettings, {"sampler_correction": {"lower": 0.5}}).sampler_correction
    assert corrected == SamplerCorrection(upper=2.0, lower=0.5)
    assert validate(ObjectiveSettings, {"sampler_correction": "none"}).sampler_correction is None


def test_the_loss_of_a_preset_is_merged_with_one_of_its_type_and_replaced_by_another() -> None:
    one = validate(GrpoSettings, {"preset": "gppo-official", "loss": {"clip_low": 0.1}}).loss
    assert one == GppoLoss(clip_low=0.1, clip_high=0.28, dual_clip=10.0)
    other = validate(GrpoSettings, {"preset": "gppo-official", "loss": {"type": "reinforce"}}).loss
    assert other == ReinforceLoss()


def test_a_recorded_table_is_read_in_the_new_spelling() -> None:
    """As versions up to 0.2 wrote it: every key, also of losses that the run had not."""
    flat = {
        "loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "keep_clipped_gradient": False, "dual_clip": None,
        "ratio_cap": None, "ratio_floor": 0.0, "sequence_ratio": "product", "sampler_correction": 3.0,
        "sampler_level": "token", "sampler_floor": 0.5, "sampler_outside": "zero", "kl_weight": 0.1,
    }  # fmt: skip
    found = validate(ObjectiveSettings, migrate_algorithm_keys(flat))
    assert found.loss == GspoLoss(clip_low=0.1, clip_high=0.2, sequence_ratio="product")
    assert found.sampler_correction == SamplerCorrection(upper=3.0, lower=0.5, outside="zero")
    assert found.kl_weight == 0.1
    off = validate(
        ObjectiveSettings, migrate_algorithm_keys(flat | {"sampler_correction": "none", "loss": "clip"})
    )
    assert off.sampler_correction is None and off.loss == ClipLoss(clip_low=0.1)


@pytest.mark.parametrize(
    "kind", [ArpoSettings, CombinedSettings, Empo2Settings, RapoSettings], ids=lambda kind: kind.__name__
)
def test_no_part_of_an_algorithm_shares_a_key_with_the_objective(kind: type[ObjectiveSettings]) -> None:
    """For example, branching has the key ``entropy_weight``: a term of the loss of that name would get the
    default of the branches.
    """
    parts = [base for base in kind.__mro__ if issubclass(base, Settings) and base is not Settings]
    shared = {
        (base.__name__, key)
        for base in parts
        if not issubclass(base, ObjectiveSettings)
        for key in base.model_fields
        if key in ObjectiveSettings.model_fields
    }
    assert shared == set()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"clip_high": 0.28}, "Mine.clip_high is now loss.clip_high"),
        ({"sampler_level": "token"}, "Mine.sampler_level is now sampler_correction.level"),
        ({"loss": "gppo"}, "set loss.type = gppo"),
        ({"sampler_correction": 2.0}, "set sampler_correction.upper = 2.0"),
    ],
)
def test_a_settings_class_of_a_plug_in_with_a_flat_key_is_an_error(body: dict[str, Any], words: str) -> None:
    """Nothing would read the key."""
    types = {key: type(value) for key, value in body.items()}
    with pytest.raises(TypeError, match=words):
        type("Mine", (ObjectiveSettings,), {"__annotations__": types, "__module__": __name__, **body})


def test_a_recipe_that_names_such_a_plug_in_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat_plug_in.py").write_text(
        "import outrider as o\nclass Mine(o.Algorithm):\n    class Settings(o.ObjectiveSettings):\n"
        "        clip_high: float = 0.3\n"
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[environment]\ntype = "house"\n[algorithm]\ntype = "flat_plug_in:Mine"\n')
    assert main(["train", str(recipe), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "algorithm.type" in line and "Settings.clip_high is now loss.clip_high" in line
