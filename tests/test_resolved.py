"""The settings that ``--dry-run`` prints: their values, their sources, and that they can be read back."""

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import Field

from outrider.cli import main
from outrider.config import Settings, load_settings
from outrider.plugins.registry import BUILT_IN, load_settings_class
from outrider.resolved import Leaf, format_toml, key_sources, leaves
from outrider.training.settings import RunSettings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def resolved(file: Path | None, *overrides: str) -> tuple[RunSettings, list[Leaf]]:
    settings = load_settings(RunSettings, file=file, overrides=overrides)
    return settings, leaves(settings, sources=key_sources(file, overrides))


def changed(printed: list[Leaf]) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in printed if leaf.source != "default"}


PROGRAMS = {  # agents that manage the conversation
    "agent": ["environment.function=my_agent:run", "environment.is_repeatable=true"],
    "verifiers": ["environment.id=my_taskset", "environment.is_repeatable=true"],
}


def required_settings(environment: str, algorithm: str) -> list[str]:
    """Required settings of the pair."""
    data = [f'environment.{split}={{path = "{split}.jsonl"}}' for split in ("train", "test")]
    overrides = [*data, "environment.corpus=pages.jsonl"] if environment == "tools" else []
    overrides += ["environment.server_url=http://127.0.0.1:8000"] if environment == "openenv" else []
    overrides += PROGRAMS.get(environment, [])
    # environments without experts
    if algorithm == "luffy" and environment in ("tools", "gym", "openenv", *PROGRAMS):
        overrides.append("algorithm.demonstrations=shown.jsonl")
    return overrides


def presets(algorithm: str) -> list[str | None]:
    field = load_settings_class("algorithms", algorithm).model_fields.get("preset")
    return [None] if field is None else list(get_args(field.annotation))


# Every environment with one algorithm, and every algorithm with one environment.
PAIRS = [(environment, "grpo") for environment in BUILT_IN["environments"]]
PAIRS += [("webshop", algorithm) for algorithm in BUILT_IN["algorithms"] if algorithm != "grpo"]
PAIRS += [("tools", "luffy"), ("agent", "arpo")]


@pytest.mark.parametrize(("environment", "algorithm"), PAIRS)
def test_printed_settings_are_read_back(environment: str, algorithm: str) -> None:
    for preset in presets(algorithm):
        chosen = [f"environment.type={environment}", f"algorithm.type={algorithm}"]
        chosen += [f"algorithm.preset={preset}"] if preset else []
        settings, printed = resolved(None, *chosen, *required_settings(environment, algorithm))
        assert RunSettings.model_validate(tomllib.loads(format_toml(printed))) == settings


@pytest.mark.parametrize("environment", ["factbook", "webshop"])
def test_printed_settings_of_a_combination_are_read_back(environment: str) -> None:
    sections = ("retrieval.num_hybrid=4", "branch.first_wave=4", "tips.memory_probability=0.5")
    chosen = [f"environment.type={environment}", "algorithm.type=combined"]
    chosen += [f"algorithm.{one}" for one in sections]
    settings, printed = resolved(None, *chosen, *required_settings(environment, "combined"))
    assert RunSettings.model_validate(tomllib.loads(format_toml(printed))) == settings


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_sources_of_the_settings_of_recipes(recipe: Path) -> None:
    settings, printed = resolved(recipe, "seed=7")
    assert RunSettings.model_validate(tomllib.loads(format_toml(printed))) == settings
    assert changed(printed)["seed"].source == "command"
    expected = {key for key, source in key_sources(recipe, []).items() if source == "recipe"} - {"seed"}
    assert {key for key, leaf in changed(printed).items() if leaf.source == "recipe"} == expected


@pytest.mark.parametrize(
    ("override", "key", "source"),
    [
        ("algorithm.preset=dapo-official", "algorithm.loss.clip_high", "preset dapo-official"),
        ("algorithm.preset=dapo-official", "algorithm.sampler_correction", "preset dapo-official"),
        ("algorithm.preset=dapo-official", "algorithm.overlong.counted", "preset dapo-official"),
        ("algorithm.loss.clip_high=0.2", "algorithm.loss.clip_high", "command"),
        ("algorithm={type = 'grpo', loss = {clip_low = 0.1}}", "algorithm.loss.clip_low", "command"),
        ("seed=0", "algorithm.loss.clip_low", "default"),
        ("train.watchdog_s=300.0", "train.watchdog_s", "command"),
        ("model.lora.rank=4", "model.lora.rank", "command"),
        ("model.lora.rank=4", "model.lora.alpha", "default"),
    ],
)
def test_the_source_of_a_setting(override: str, key: str, source: str) -> None:
    _, printed = resolved(None, "environment.type=factbook", "algorithm.type=grpo", override)
    assert {leaf.key: leaf.source for leaf in printed}[key] == source


def test_defaults_are_comments_by_section() -> None:
    _, printed = resolved(None, "environment.type=factbook", "algorithm.type=grpo", "optimizer.beta1=0.8")
    text = format_toml(printed)
    set_lines, _, defaults = text.partition("# at the default:")
    assert "beta1 = 0.8  # command" in set_lines and "beta1" not in defaults
    assert "# optimizer: " in defaults and "beta2 = " in defaults and "beta2" not in set_lines


def test_a_dry_run_prints_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES[0].with_name("house-empo2.toml")
    assert main(["train", str(recipe), "--dry-run"]) == 0
    output = capsys.readouterr().out
    settings, printed = resolved(recipe)
    assert output.startswith(format_toml(printed) + "\n")
    every: dict[str, Any] = settings.model_dump(mode="json")
    assert len(printed) == sum(1 for _ in flat(every))
    for leaf in printed:
        assert f"{leaf.key.rpartition('.')[2]} = " in output


def flat(tree: dict[str, Any]) -> Any:
    for value in tree.values():
        if isinstance(value, dict) and value:
            yield from flat(value)
        else:
            yield value


def test_texts_with_line_breaks_are_read_back() -> None:
    awkward = "a\u2028b\x0bc\x85d # e"
    settings, printed = resolved(
        None,
        "environment.type=factbook",
        "algorithm.type=grpo",
        f"environment.system_prompt={json.dumps(awkward)}",
    )
    assert RunSettings.model_validate(tomllib.loads(format_toml(printed))) == settings


class Rates(Settings):
    rates: dict[str, float] = Field(default_factory=dict)


def test_a_table_with_any_keys_is_one_value() -> None:
    settings = Rates(rates={"learning": 2.0, "learning.rate": 1.0})
    text = format_toml(leaves(settings, sources={"rates": "recipe"}))
    assert Rates.model_validate(tomllib.loads(text)) == settings


def test_settings_of_a_protocol_are_printed_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('protocol = "outrider-webshop-fair"\n[algorithm]\ngroup_size = 4\n')
    settings, printed = resolved(file, "rollout.max_turns=9")
    sources = {leaf.key: leaf.source for leaf in printed}
    assert sources["environment.window.parse"] == "protocol outrider-webshop-fair"
    assert sources["algorithm.advantage"] == "protocol outrider-webshop-fair"  # also at its default
    assert (sources["algorithm.group_size"], sources["rollout.max_turns"]) == ("recipe", "command")
    assert sources["seed"] == "default"
    copy = tmp_path / "copy.toml"
    copy.write_text(format_toml(printed))
    assert load_settings(RunSettings, file=copy) == settings
