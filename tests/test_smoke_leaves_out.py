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
    pytest.importorskip("ray")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + more, encoding="utf-8")
    run = str(tmp_path / "run")
    assert cli.main(["train", str(recipe), "--run", run, "--smoke", "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--smoke")]
    assert lines == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("has_ray", "tasks_per_step", "expected"),
    [
        (True, 1, "runs [cluster] with num_trainers = 2 (recipe: 8), num_engines = 1 (recipe: 4)"),
        (
            False,
            8,
            "leaves out [cluster] (num_trainers = 8, num_engines = 4), which needs Ray (pip install '",
        ),
    ],
)
def test_smoke_starts_only_processes_that_are_possible(
    monkeypatch: pytest.MonkeyPatch, has_ray: bool, tasks_per_step: int, expected: str
) -> None:
    """A worker plays whole groups, so a step of one task has no second worker; without Ray there is none."""
    monkeypatch.setattr(smoke, "find_spec", lambda name: name if has_ray else None)
    cluster, train = {"num_trainers": 8, "num_engines": 4}, {"tasks_per_step": tasks_per_step}
    settings = api.run_settings(tomllib.loads(RECIPE) | {"cluster": cluster, "train": train})
    assert smoke.describe_omissions(settings).startswith(f"--smoke {expected}")
