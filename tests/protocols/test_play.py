"""Every protocol that a recipe can name: its settings load, its prompts contain no answer, and it trains."""

import json
from pathlib import Path

import pytest

from outrider.api import run_settings
from outrider.cli import main
from outrider.environments.base import ExternalEpisode, make_task_set, open_episode, split_tasks
from outrider.protocols import Status, compare_settings, find_protocol, protocol_names
from outrider.runs import Run
from outrider.training.settings import RunSettings

RUNNABLE = [name for name in protocol_names() if not find_protocol(name).needed]
YOURS = {"release", "train_tasks", "models"}
"""Points of the data and the model, which a recipe chooses."""


def write_recipe(folder: Path, name: str) -> Path:
    """A recipe that names the protocol, and the files that it needs."""
    lines = [f'protocol = "{name}"']
    if find_protocol(name).points["tasks"] == "tools":
        for split in ("train", "test"):
            rows = [
                {"question": f"Who wrote book {n} of {split}?", "answer": f"author-{split}-{n}"}
                for n in range(20)
            ]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        passages = [{"id": str(n), "title": f"book {n}", "text": "a book about rivers"} for n in range(9)]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
        lines += ["[environment]", 'corpus = "corpus.jsonl"']
        lines += ['train = { path = "train.jsonl" }', 'test = { path = "test.jsonl" }']
    if find_protocol(name).points["tasks"] == "alfworld" and not name.startswith("outrider-"):
        lines += ["[environment]", 'data = "json_2.1.1"']
    (folder / "recipe.toml").write_text("\n".join(lines) + "\n")
    return folder / "recipe.toml"


def offline(recipe: Path, name: str) -> RunSettings:
    """The settings with games made offline in place of published ones."""
    is_alfworld = find_protocol(name).points["tasks"] == "alfworld"
    sizes = [f"environment.num_{split}=20" for split in ("train", "valid", "test")]
    return run_settings(recipe, overrides=["environment.data=none", *sizes] if is_alfworld else [])


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_recipe_of_one_line_has_the_points_of_the_protocol(name: str, tmp_path: Path) -> None:
    settings = run_settings(write_recipe(tmp_path, name))
    assert settings.protocol_sha256 == find_protocol(name).sha256
    difference = compare_settings("recipe", settings.model_dump(mode="json"), find_protocol(name))
    assert {row.point for row in difference.with_status(Status.DIFFERS)} <= YOURS
    if name.startswith("outrider-"):
        assert difference.with_status(Status.DIFFERS) == []
        assert difference.with_status(Status.CANNOT) == []
        assert difference.exit_status == 4  # our protocols choose neither the model nor the data


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("verl-agent-webshop", 'evaluation.panels=[{name = "first", split = "valid", num_tasks = 9}]'),
        ("verl-agent-webshop", "update.num_mini_batches=4"),
        ("verl-agent-webshop", "environment.context=chat"),
        ("verl-agent-webshop", "algorithm.type=gigpo"),
        ("verl-agent-webshop", "algorithm.preset=dapo-paper"),
        ("verl-agent-webshop", "algorithm.type=dr-grpo"),
        ("outrider-alfworld-fair", "evaluation.num_tasks=20"),
        ("agent-lightning-scienceworld", "update.mini_batch_samples=64"),
        ("agentgym-rl-scienceworld", "rollout.max_turns=[5, 10]"),
    ],
)
def test_a_key_of_the_recipe_replaces_what_contradicts_it(name: str, change: str, tmp_path: Path) -> None:
    settings = run_settings(write_recipe(tmp_path, name), overrides=[change])
    assert settings.protocol == name


@pytest.mark.parametrize("name", [name for name in RUNNABLE if "scienceworld" not in name])
def test_no_answer_is_in_a_prompt(name: str, tmp_path: Path) -> None:
    settings = offline(write_recipe(tmp_path, name), name)
    task_set = make_task_set(settings.environment)
    tasks = split_tasks(task_set, settings.evaluation.sets[0].split)[:20]
    factory = task_set.make()
    assert tasks
    for task in tasks:
        answers = [*task.answers, *([str(task.metadata["product"])] if "product" in task.metadata else [])]
        if steps := [] if answers else task_set.expert(task, 0):
            answers = ["\n".join(step.text for step in steps), steps[0].text + steps[-1].text]
        assert answers
        episode = open_episode(factory(task))
        prompts = [message.content for message in episode.start(0)]
        for reply in ("<think>a</think><action>look</action>", "<think>a</think><search>rivers</search>"):
            result = episode.act(reply)
            if result.done:
                break
            external = isinstance(episode, ExternalEpisode)
            prompts += [m.content for m in (episode.request.messages if external else result.observations)]
        assert not [text for text in prompts for answer in answers if answer in text]
        episode.environment.close()
    factory.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.java] * ("scienceworld" in name)) for name in RUNNABLE]
)
def test_one_step_and_one_evaluation_of_every_protocol(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_recipe(tmp_path, name), tmp_path / "run"
    assert main(["train", str(recipe), "--smoke", "--run", str(run)]) == 0
    opened = Run.from_path(run)
    assert opened.config["protocol"] == name
    assert opened.metrics("train").num_rows == 1
    assert opened.evaluations().num_rows >= 1
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert f"this run and {name}: " in capsys.readouterr().out
