"""``--smoke`` reduces ``[cluster]`` and reports what it replaces and leaves out."""

import tomllib
from pathlib import Path

import pytest

from outrider import api, cli, smoke

RECIPE = """
environment = { type = "factbook" }
algorithm = { type = "grpo" }
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "cluster = { num_trainers = 8, num_engines = 3, heartbeat_s = 9.0 }",
            "--smoke runs [cluster] with num_trainers = 2 (recipe: 8), num_engines = 1 (recipe: 3), "
            "num_rollout_workers = 2 (recipe: 1), heartbeat_s = 60.0 (recipe: 9.0)",
        ),
        (
            'engine = { type = "vllm" }\ncluster = { num_trainers = 4 }',
            "--smoke runs [cluster] with num_trainers = 2 (recipe: 4) and leaves out engine.type = vllm",
        ),
        ("cluster = { num_trainers = 2, num_rollout_workers = 2 }", None),
        ("", None),
    ],
)
def test_smoke_reports_its_replacements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, expected: str | None
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + more, encoding="utf-8")
    run = str(tmp_path / "run")
    assert cli.main(["train", str(recipe), "--run", run, "--smoke", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--smoke")]
    assert lines == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("section", "count"),
    [("cold_start = { num_examples = 8, ", "cold_start.num_examples"),
     ('algorithm = { type = "luffy", ', "algorithm.num_demonstrations")],
)  # fmt: skip
@pytest.mark.parametrize("exists", [False, True])
def test_missing_demonstrations_of_own_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, count: str, exists: bool
) -> None:
    """Stand-in questions have neither experts nor demonstrations, also where only the questions are lost."""
    demonstrations = tmp_path / "shown.jsonl"
    if exists:
        demonstrations.write_text('{"question": "q", "reward": 1.0, "messages": []}\n', encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    environment = '{ type = "tools", tools = ["python"], train = { path = "lost.jsonl" } }'
    lines = [f"environment = {environment}", f'{section}demonstrations = "{demonstrations}" }}']
    if not section.startswith("algorithm"):
        lines.append('algorithm = { type = "grpo" }')
    recipe.write_text("\n".join(lines), encoding="utf-8")
    command = ["train", str(recipe), "--run", str(tmp_path / "run"), "--smoke", "--dry-run"]
    assert cli.main(command) == 0, capsys.readouterr().err
    settings = tomllib.loads(capsys.readouterr().out)
    part, name = count.split(".")
    assert settings[part][name] == 0


def test_a_step_of_one_task_has_no_second_worker() -> None:
    """A worker plays whole groups."""
    cluster, train = {"num_trainers": 8, "num_engines": 4}, {"tasks_per_step": 1}
    settings = api.run_settings(tomllib.loads(RECIPE) | {"cluster": cluster, "train": train})
    expected = "--smoke runs [cluster] with num_trainers = 2 (recipe: 8), num_engines = 1 (recipe: 4)"
    assert smoke.describe_omissions(settings) == expected
