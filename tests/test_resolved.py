"""What ``--dry-run`` shows: what applies, who set it, and nothing that would be lost on reading it back."""

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


def shown(found: list[Leaf]) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in found if leaf.source != "default"}


PROGRAMS = {  # which keep the conversation, so no steps can be put into it
    "agent": ["environment.function=my_agent:run", "environment.is_repeatable=true"],
    "verifiers": ["environment.id=my_taskset", "environment.is_repeatable=true"],
}


def needs(environment: str, algorithm: str) -> list[str]:
    """What the pair cannot do without."""
    data = [f'environment.{split}={{path = "{split}.jsonl"}}' for split in ("train", "test")]
    given = [*data, "environment.corpus=pages.jsonl"] if environment == "tools" else []
    given += ["environment.server_url=http://127.0.0.1:8000"] if environment == "openenv" else []
    given += PROGRAMS.get(environment, [])
    # which come without experts
    if algorithm == "luffy" and environment in ("tools", "gym", "openenv", *PROGRAMS):
        given.append("algorithm.demonstrations=shown.jsonl")
    return given


def presets(algorithm: str) -> list[str | None]:
    field = load_settings_class("algorithms", algorithm).model_fields.get("preset")
    return [None] if field is None else list(get_args(field.annotation))


PAIRS = [
    (one, other)
    for one in BUILT_IN["environments"]
    for other in BUILT_IN["algorithms"]
    if one not in PROGRAMS or other not in ("rapo", "combined")
]


@pytest.mark.parametrize(("environment", "algorithm"), PAIRS)
def test_the_settings_of_any_pair_read_back(environment: str, algorithm: str) -> None:
    for preset in presets(algorithm):
        chosen = [f"environment.type={environment}", f"algorithm.type={algorithm}"]
        chosen += [f"algorithm.preset={preset}"] if preset else []
        settings, found = resolved(None, *chosen, *needs(environment, algorithm))
        assert RunSettings.model_validate(tomllib.loads(format_toml(found))) == settings


@pytest.mark.parametrize("environment", [one for one in BUILT_IN["environments"] if one not in PROGRAMS])
def test_also_with_three_methods_in_one_run(environment: str) -> None:
    sections = ("retrieval.num_hybrid=4", "branch.first_wave=4", "tips.memory_probability=0.5")
    chosen = [f"environment.type={environment}", "algorithm.type=combined"]
    chosen += [f"algorithm.{one}" for one in sections]
    settings, found = resolved(None, *chosen, *needs(environment, "combined"))
    assert RunSettings.model_validate(tomllib.loads(format_toml(found))) == settings


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_what_a_recipe_sets_is_shown_as_its_own_and_the_rest_reads_back(recipe: Path) -> None:
    settings, found = resolved(recipe, "seed=7")
    assert RunSettings.model_validate(tomllib.loads(format_toml(found))) == settings
    assert shown(found)["seed"].source == "command"
    given = {key for key, by in key_sources(recipe, []).items() if by == "recipe"} - {"seed"}
    assert {key for key, leaf in shown(found).items() if leaf.source == "recipe"} == given


@pytest.mark.parametrize(
    ("override", "key", "by"),
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
def test_who_set_it(override: str, key: str, by: str) -> None:
    _, found = resolved(None, "environment.type=factbook", "algorithm.type=grpo", override)
    assert {leaf.key: leaf.source for leaf in found}[key] == by


def test_defaults_are_comments_by_section() -> None:
    _, found = resolved(None, "environment.type=factbook", "algorithm.type=grpo", "optimizer.beta1=0.8")
    text = format_toml(found)
    set_lines, _, defaults = text.partition("# at the default:")
    assert "beta1 = 0.8  # command" in set_lines and "beta1" not in defaults
    assert "# optimizer: " in defaults and "beta2 = " in defaults and "beta2" not in set_lines


def test_every_setting_is_shown_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(RECIPES[0].with_name("demo.toml")), "--dry-run"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    settings, found = resolved(RECIPES[0].with_name("demo.toml"))
    assert printed.startswith(format_toml(found) + "\n")
    every: dict[str, Any] = settings.model_dump(mode="json")
    assert len(found) == sum(1 for _ in flat(every))
    for leaf in found:
        assert f"{leaf.key.rpartition('.')[2]} = " in printed


def flat(tree: dict[str, Any]) -> Any:
    for value in tree.values():
        if isinstance(value, dict) and value:
            yield from flat(value)
        else:
            yield value


def test_a_text_with_any_line_break_and_a_key_with_a_dot_read_back() -> None:
    awkward = "a\u2028b\x0bc\x85d # e"
    settings, found = resolved(
        None,
        "environment.type=factbook",
        "algorithm.type=grpo",
        f"environment.system_prompt={json.dumps(awkward)}",
    )
    assert RunSettings.model_validate(tomllib.loads(format_toml(found))) == settings


class Rates(Settings):
    rates: dict[str, float] = Field(default_factory=dict)


def test_a_table_of_any_keys_is_one_value() -> None:
    settings = Rates(rates={"learning": 2.0, "learning.rate": 1.0})
    text = format_toml(leaves(settings, sources={"rates": "recipe"}))
    assert Rates.model_validate(tomllib.loads(text)) == settings
