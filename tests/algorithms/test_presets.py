"""Presets: the page of objectives shows what the code does, and a preset fills only what is not given."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from outrider.algorithms.gigpo import GigpoSettings
from outrider.algorithms.grpo import (
    GroupSettings,
    Grpo,
    GrpoSettings,
    ReinforcePlusPlus,
    ReinforcePlusPlusSettings,
)
from outrider.algorithms.presets import (
    GIGPO_PRESETS,
    GRPO_PRESETS,
    REINFORCE_PLUS_PLUS_PRESETS,
    GigpoPreset,
    GrpoPreset,
    ReinforcePlusPlusPreset,
)
from outrider.config import to_toml, validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "objectives.md"
SHORT = {
    "token_mean": "token mean",
    "sequence_mean_token_mean": "mean of token means",
    "sequence_mean_token_sum": "mean of token sums",
    "constant_length": "sum / constant length",
}


def chosen(name: str) -> GroupSettings:
    if name in GRPO_PRESETS:
        return validate(GrpoSettings, {"preset": name})
    return validate(ReinforcePlusPlusSettings, {"preset": name})


def row_of(name: str) -> str:
    """One row of the table in the documentation, from the settings."""
    s = chosen(name)
    if isinstance(s, ReinforcePlusPlusSettings):
        credit = f"{'group_baseline, ' if s.group_baseline else ''}whitened, {s.variance}"
    else:
        assert isinstance(s, GrpoSettings)
        credit = s.advantage + (f", {s.advantage_std}" if s.advantage == "group_normalized" else "")
    form = getattr(s.loss, "sequence_ratio", "token")
    loss = s.loss.type if form == "token" else f"{s.loss.type}, {form}"
    if s.loss.type == "cispo":
        clip = f"cap {s.loss.ratio_cap:g}, floor {s.loss.ratio_floor:g}"
    elif s.loss.type == "reinforce":
        clip = "none"
    else:
        dual = f"{c:g}" if (c := getattr(s.loss, "dual_clip", None)) is not None else "none"
        clip = f"{s.loss.clip_low:g} / {s.loss.clip_high:g} / {dual}"
    length = f" {s.max_length}" if s.max_length else ""
    kl = (
        f"loss {s.kl_estimator} {s.kl_weight:g}"
        if s.kl_weight
        else f"reward k1 {s.reward_kl_weight:g}"
        if s.reward_kl_weight
        else "none"
    )
    if s.sampler_correction is None:
        engine = "none"
    else:
        floor = "" if s.sampler_correction.lower is None else f"{s.sampler_correction.lower:g} to "
        weight = s.sampler_correction
        engine = f"{weight.level} {floor}{weight.upper:g}, {weight.outside}"
    more = [f"group_size {s.group_size}"] if s.group_size != 8 else []
    more += [f"overlong, {s.overlong.counted} tokens"] if s.overlong else []
    more += [f"dynamic sampling on {s.dynamic_sampling.metric}"] if s.dynamic_sampling else []
    more += [f"NLL {s.positive_nll:g}"] if s.positive_nll else []
    cells = [
        f"`{name}`",
        credit,
        loss,
        clip,
        SHORT[s.aggregation] + length,
        kl,
        engine,
        "; ".join(more) or "none",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_the_documentation_is_that_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("<!-- presets -->")[1].splitlines()
    rows = [line for line in table if line.startswith("| `")]
    assert rows == [row_of(name) for name in (*GRPO_PRESETS, *REINFORCE_PLUS_PLUS_PRESETS)]


def test_every_name_that_the_settings_allow_is_a_preset() -> None:
    assert get_args(GrpoPreset) == tuple(GRPO_PRESETS)
    assert get_args(ReinforcePlusPlusPreset) == tuple(REINFORCE_PLUS_PLUS_PRESETS)
    with pytest.raises(ConfigError, match="preset"):
        validate(GrpoSettings, {"preset": "reinforce++"})


EVERY = [("grpo", name) for name in GRPO_PRESETS] + [
    ("reinforce++", name) for name in REINFORCE_PLUS_PLUS_PRESETS
]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda value: value)
def test_a_preset_sets_missing_keys_and_survives_the_run_directory(kind: str, name: str) -> None:
    presets: Mapping[str, Any] = GRPO_PRESETS if kind == "grpo" else REINFORCE_PLUS_PLUS_PRESETS
    settings = chosen(name)
    assert settings.preset == name  # type: ignore[attr-defined]
    filled = settings.model_dump()
    for key, value in presets[name].items():
        if isinstance(value, Mapping):
            assert filled[key] | value == filled[key]
        else:
            assert filled[key] == value
    assert type(settings).model_validate(tomllib.loads(to_toml(filled))) == settings
    given = validate(
        type(settings), {"preset": name, "positive_nll": 0.111, "sampler_correction": {"upper": 1.5}}
    )
    assert (given.positive_nll, given.sampler_correction.upper) == (0.111, 1.5)
    # the type of the preset itself changes nothing
    same = validate(type(settings), {"preset": name, "loss": {"type": settings.loss.type}})
    assert same == settings
    without = validate(type(settings), {"preset": name, "overlong": "none", "dynamic_sampling": "none"})
    assert without.overlong is None and without.dynamic_sampling is None
    run = validate(
        RunSettings, {"environment": {"type": "factbook"}, "algorithm": {"type": kind, "preset": name}}
    )
    assert run.algorithm == settings


def test_a_table_that_both_name_is_merged() -> None:
    settings = validate(GrpoSettings, {"preset": "dapo-official", "overlong": {"max_tokens": 300}})
    assert settings.overlong is not None
    assert (settings.overlong.counted, settings.overlong.max_tokens) == ("all", 300)
    plain = validate(GrpoSettings, {"overlong": {"max_tokens": 300}})
    assert plain.overlong is not None and plain.overlong.counted == "policy"


def test_a_length_penalty_that_no_rollout_can_reach_is_an_error() -> None:
    tree: dict[str, Any] = {
        "environment": {"type": "factbook"},
        "rollout": {"max_response_tokens": 400, "max_turn_tokens": 40},
    }
    algorithm: dict[str, Any] = {"type": "grpo", "preset": "dapo-paper"}
    assert validate(RunSettings, tree | {"algorithm": algorithm}).algorithm.type == "grpo"
    far = algorithm | {"overlong": {"max_tokens": 20480, "buffer": 4096}}
    with pytest.raises(ConfigError, match="begins after 16384 tokens"):
        validate(RunSettings, tree | {"algorithm": far})


def test_no_preset_needs_more_than_its_settings() -> None:
    for name in GRPO_PRESETS:
        assert Grpo(validate(GrpoSettings, {"preset": name})).hooks == ()
    for name in REINFORCE_PLUS_PLUS_PRESETS:
        settings = validate(ReinforcePlusPlusSettings, {"preset": name})
        assert ReinforcePlusPlus(settings).objective.needs_reference == (
            settings.kl_weight > 0 or settings.reward_kl_weight > 0
        )


def test_gigpo_as_published_and_as_released() -> None:
    own, paper, official = (validate(GigpoSettings, {"preset": name}) for name in get_args(GigpoPreset))
    assert tuple(GIGPO_PRESETS) == get_args(GigpoPreset) and own == GigpoSettings()
    assert (own.kl_weight, own.loss.dual_clip, own.sampler_correction.upper) == (0.0, None, 2.0)
    assert (paper.statistics, paper.invalid_penalty, paper.loss.dual_clip) == ("rollouts", 0.0, None)
    assert (official.statistics, official.invalid_penalty, official.loss.dual_clip) == ("samples", 0.1, 3.0)
    assert official.sampler_correction is None
    for chosen in (paper, official):
        assert (chosen.kl_weight, chosen.kl_estimator, chosen.advantage) == (0.01, "k3", "group_centered")
        assert (chosen.loss.clip_low, chosen.loss.clip_high, chosen.aggregation) == (0.2, 0.2, "token_mean")
    std = validate(
        GigpoSettings, {"preset": "gigpo-official", "normalization": "std", "invalid_penalty": 0.01}
    )
    assert (std.advantage, std.invalid_penalty, std.statistics) == ("group_normalized", 0.01, "samples")
