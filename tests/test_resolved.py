"""What ``--dry-run`` shows: what applies, who set it, and nothing that would be lost on reading it back."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from outrider.cli import main
from outrider.config import Settings, load_settings
from outrider.plugins.registry import BUILT_IN
from outrider.resolved import Leaf, format_toml, key_sources, leaves
from outrider.training.run_dir import UNSEEN
from outrider.training.settings import RunSettings

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
MOST = 60  # what a person reads


def resolved(file: Path | None, *overrides: str) -> tuple[RunSettings, list[Leaf]]:
    settings = load_settings(RunSettings, file=file, overrides=overrides)
    return settings, leaves(settings, sources=key_sources(file, overrides), unseen=UNSEEN)


def shown(found: list[Leaf]) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in found if leaf.left_out is None}


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


@pytest.mark.parametrize("environment", [one for one in BUILT_IN["environments"] if one not in PROGRAMS])
def test_also_with_three_methods_in_one_run(environment: str) -> None:
    """Each has a section of its own, and what is not shown of it is told with its value."""
    sections = ("retrieval.num_hybrid=4", "branch.first_wave=4", "tips.memory_probability=0.5")
    chosen = [f"environment.type={environment}", "algorithm.type=combined"]
    chosen += [f"algorithm.{one}" for one in sections]
    settings, found = resolved(None, *chosen, *needs(environment, "combined"))
    text = format_toml(found)
    assert len(shown(found)) <= MOST
    assert RunSettings.model_validate(tomllib.loads(text)) == settings
    assert {"algorithm.branch.base_probability", "algorithm.tips.memory.num_shown"} <= shown(found).keys()
    for told in ("branch.window = 20", "tips.memory.min_similarity = 0.5", "student_mask = token"):
        assert f"algorithm.{told}" in " ".join(text.replace("\n#", "").split())
    _, found = resolved(None, *chosen, *needs(environment, "combined"), "algorithm.tips.memory.writer=policy")
    assert shown(found)["algorithm.tips.memory.writer"].source == "command"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_what_a_recipe_sets_is_shown_as_its_own_and_the_rest_reads_back(recipe: Path) -> None:
    settings, found = resolved(recipe, "seed=7")
    assert RunSettings.model_validate(tomllib.loads(format_toml(found))) == settings
    assert shown(found)["seed"].source == "command" and shown(found)["model.name"].source in (
        "recipe",
        "default",
    )
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
    assert shown(found)[key].source == by


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        ([], "buffer.keep_best", "without effect"),
        (["algorithm.type=rapo"], "buffer.keep_best", None),
        (
            ["algorithm.type=rapo", "algorithm.num_hybrid=0"],
            "algorithm.retrieval.probability",
            "without effect",
        ),
        ([], "algorithm.kl_estimator", "without effect"),
        (["algorithm.kl_weight=0.1"], "algorithm.kl_estimator", None),
        ([], "train.watchdog_s", "moves no number"),
        ([], "num_threads", "rounding"),
        ([], "algorithm.positive_nll", "off"),
        ([], "seed", None),
        ([], "evaluation.temperature", None),
        ([], "optimizer.beta1", "details"),
        (["optimizer.beta1=0.8"], "optimizer.beta1", None),
        (
            ["algorithm.type=empo2", "algorithm.intrinsic_coefficient=0"],
            "algorithm.novelty_threshold",
            "without effect",
        ),
    ],
)
def test_only_defaults_that_say_nothing_are_left_out(overrides: list[str], key: str, why: str | None) -> None:
    _, found = resolved(None, "environment.type=factbook", "algorithm.type=grpo", *overrides)
    left_out = {leaf.key: leaf.left_out for leaf in found}[key]
    assert left_out is None if why is None else why in str(left_out)


def test_every_setting_is_shown_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(RECIPES[0].with_name("demo.toml")), "--dry-run"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    settings, found = resolved(RECIPES[0].with_name("demo.toml"))
    assert printed.startswith(format_toml(found) + "\n")
    every: dict[str, Any] = settings.model_dump(mode="json")
    assert len(found) == sum(1 for _ in flat(every))
    for leaf in found:
        assert leaf.key in printed if leaf.left_out else f"{leaf.key.rpartition('.')[2]} = " in printed


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
