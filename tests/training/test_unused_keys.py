"""Settings without an effect are reported with the reason, and no others."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import Field
from transformers import AutoTokenizer

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.exploration import ArpoSettings, RapoSettings
from outrider.algorithms.grpo import GrpoSettings
from outrider.cli import main
from outrider.config import load_settings
from outrider.environments.base import EnvironmentSettings
from outrider.errors import ModelError
from outrider.training.settings import RunSettings
from outrider.training.setup import make_checked_renderer
from outrider.training.unused_keys import unused_keys
from tests.training.short_runs import train
from tests.training.tool_run import write_tool_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))
TOOLS = '{type="tools",tools=["python"],train={path="tasks.jsonl"}}'


def lines(*overrides: str, environment: str = '{type="house"}', algorithm: str = "grpo") -> list[str]:
    given = [f"environment={environment}", f"algorithm.type={algorithm}", *overrides]
    return unused_keys(load_settings(RunSettings, file=None, overrides=given))


HOUSE = '{type="house"}'
DISTILL = "algorithm.distill."
CASES: Sequence[tuple[str, str, tuple[str, ...], str]] = (
    ("grpo", HOUSE, ("cold_start.batch_size=2",), "cold_start.num_examples is 0"),
    ("grpo", HOUSE, ("buffer.min_reward=0.5",), "nothing is retrieved"),
    ("grpo", HOUSE, ("tracking.project=mine",), "trackers is empty"),
    ("grpo", HOUSE, ("cluster.ray_address=auto",), "the run has one process: num_trainers"),
    ("grpo", HOUSE, ("evaluation.num_samples=3",), "evaluation.temperature is 0"),
    ("grpo", HOUSE, ("rollout.max_splice_tokens=9",), "nothing is retrieved"),
    ("grpo", HOUSE, ("algorithm.kl_estimator=k3",), "algorithm.kl_weight is 0"),
    ("grpo", HOUSE, ("algorithm.loss.clip_high=0.3",), "with one optimizer step"),
    ("grpo", HOUSE, ("algorithm.distill.help=feedback", "algorithm.distill.gate_beta=2"), "gate is none"),
    ("luffy", HOUSE, ("algorithm.loss.clip_high=0.3", "algorithm.clip_own=false"), "with one optimizer step"),
    ("grpo", HOUSE, ("algorithm.loss.clip_high=0.3", "algorithm.preset=gspo"), "with one optimizer step"),
    ("gigpo", HOUSE, ("algorithm.similarity=0.9", "algorithm.step_weight=0"), "step_weight is 0"),
    ("rollout_replay", HOUSE, ("algorithm.buffer_size=9", "train.tasks_per_step=1"), "no step replays"),
    ("rollout_replay", HOUSE, ("algorithm.buffer_size=9", "train.num_steps=1"), "no step replays"),
    ("grpo", HOUSE, (f"{DISTILL}exclude_own_group=false", f"{DISTILL}help=feedback"), "no teacher"),
    ("empo2", HOUSE, (f"{DISTILL}max_help_tokens=9", f"{DISTILL}plays=helped"), "rollouts are"),
    ("rapo", HOUSE, ("algorithm.retrieval.noise=0.5", "algorithm.num_hybrid=0"), "nothing is retrieved"),
    ("rapo", HOUSE, ("algorithm.timing=none", "algorithm.advantage_weight=0"), "advantage_weight is 0"),
    ("arpo", HOUSE, ("algorithm.threshold=0.3",), "decision is not threshold"),
    ("arpo", HOUSE, ("algorithm.window=3", "algorithm.first_wave=8", "algorithm.group_size=8"), "first_wave"),
    ("arpo", HOUSE, ("algorithm.first_wave=3", "algorithm.pre_monitor=true"), "pre_monitor decides"),
    ("empo2", HOUSE, ("algorithm.novelty_threshold=0.7", "algorithm.intrinsic_coefficient=0"), "intrinsic"),
    ("empo2", HOUSE, ("algorithm.min_probability=0.5", "algorithm.student_mask=none"), "algorithm"),
    ("grpo", TOOLS, ("environment.search.top_k=3",), "tools has no search"),
    ("grpo", TOOLS, ("environment.train.hub_split=test",), "environment.train.path is a file"),
    ("grpo", '{type="alfworld"}', ("environment.num_shown_actions=3",), "no list of actions is shown"),
)  # fmt: skip


@pytest.mark.parametrize(("algorithm", "environment", "overrides", "reason"), CASES, ids=str)
def test_a_key_without_effect_is_named(
    algorithm: str, environment: str, overrides: tuple[str, ...], reason: str
) -> None:
    key = overrides[0].partition("=")[0]
    if "gate_beta" in overrides[-1]:
        key = "algorithm.distill.gate_beta"
    found = lines(*overrides, algorithm=algorithm, environment=environment)
    assert [line for line in found if line.startswith(f"No effect: {key}: {reason}")] == found, found
    assert len(found) == 1


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("grpo", ("cold_start.batch_size=2", "cold_start.num_examples=4")),
        ("grpo", ("cluster.ray_address=auto", "cluster.num_engines=2")),
        ("grpo", ("evaluation.num_samples=3", "evaluation.temperature=1.0")),
        ("grpo", ("algorithm.kl_estimator=k3", "algorithm.kl_weight=0.1")),
        ("grpo", ("algorithm.loss.clip_high=0.3", "update.num_mini_batches=2")),
        ("rapo", ("algorithm.retrieval.noise=0.5", "buffer.min_reward=0.5", "algorithm.loss.dual_clip=3")),
        ("arpo", ("algorithm.threshold=0.3", "algorithm.decision=threshold")),
        ("empo2", ("algorithm.novelty_threshold=0.7", "algorithm.min_probability=0.5")),
        ("empo2", ("algorithm.distill.exclude_own_group=false", "algorithm.distill.max_help_tokens=9")),
        ("gigpo", ("algorithm.similarity=0.9",)),
        ("rollout_replay", ("algorithm.buffer_size=9", "train.tasks_per_step=2")),
    ],
    ids=str,
)
def test_keys_with_an_effect_are_not(algorithm: str, overrides: tuple[str, ...]) -> None:
    assert lines(*overrides, algorithm=algorithm) == []


HELP = ("algorithm.distill.help=file", "algorithm.distill.path=a.jsonl", "algorithm.distill.plays=helped")


def test_rollouts_that_are_trained_in_another_context_have_ratios() -> None:
    """With help or tips at sampling, the denominator is not the log-prob of the update."""
    assert lines("algorithm.loss.clip_high=0.3", *HELP) == []
    assert (
        lines("algorithm.loss.clip_high=0.3", "algorithm.student_mask=turn", *HELP, algorithm="combined")
        == []
    )
    tips = ("algorithm.memory_probability=0", "algorithm.memory.writer=environment")
    shown = ("cold_start.num_examples=4", "cold_start.tip_share=0.5")
    assert lines(*tips, algorithm="empo2") == [
        "No effect: algorithm.memory.writer: memory_probability is 0, so no rollout is shown a tip"
    ]
    assert lines(*tips, *shown, algorithm="empo2") == []


class MySettings(ObjectiveSettings):
    """A plug-in with keys of the same names and a default that depends on another field."""

    type: str = "mine"
    selection: str = "all"
    target: float = 0.0
    tools: bool = True
    computed: int = Field(default_factory=lambda data: 3)


class MyEnvironment(EnvironmentSettings):
    type: str = "mine"
    tools: bool = True
    search: ObjectiveSettings | None = None


def test_sections_of_plug_ins_are_left_out() -> None:
    settings = load_settings(
        RunSettings, file=None, overrides=["environment.type=house", "algorithm.type=grpo"]
    )
    mine = settings.model_copy(
        update={"algorithm": MySettings(target=0.5), "environment": MyEnvironment(), "trackers": ()}
    )
    assert unused_keys(mine) == []


@pytest.mark.parametrize("kind", [GrpoSettings, RapoSettings, ArpoSettings])
def test_defaults_and_presets_are_not(kind: Any) -> None:
    field = kind.model_fields.get("preset")
    names = [None] if field is None else get_args(field.annotation)
    for name in names:
        preset = () if name is None else (f"algorithm.preset={name}",)
        options = ("algorithm.pass_k=2",) if name and "pass" in name else ()
        assert lines(*preset, *options, algorithm=kind.model_fields["type"].default) == [], name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_has_one(recipe: Path) -> None:
    assert unused_keys(load_settings(RunSettings, file=recipe)) == []


def test_a_variable_that_the_chat_template_lacks_is_named(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    settings = load_settings(RunSettings, file=recipe)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.name)
    for kwargs, lines in (({"enable_thinkng": False}, 1), ({"messages": 1}, 0), ({}, 0)):
        notes: list[str] = []
        model = settings.model.model_copy(update={"template_kwargs": kwargs})
        with suppress(ModelError):  # of a template whose messages are a number
            make_checked_renderer(tokenizer, model, settings.environment, note=notes.append)
        found = [note for note in notes if note.startswith("No effect")]
        assert (
            found
            == ["No effect: model.template_kwargs.enable_thinkng: the chat template does not contain it"][
                :lines
            ]
        )


def test_a_dry_run_and_a_run_report_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_tool_run(tmp_path / "data")
    line = "No effect: algorithm.kl_estimator: algorithm.kl_weight is 0"
    assert main(["train", str(recipe), "--dry-run", "algorithm.kl_estimator=k3"]) == 0
    assert f"# {line}" in capsys.readouterr().out
    run = train(recipe, tmp_path / "run", "algorithm.kl_estimator=k3", "train.num_steps=1")
    assert line in (run / "notes.jsonl").read_text()
