"""``--smoke`` reduces ``[cluster]`` and reports what it replaces and leaves out."""

from pathlib import Path

import pytest

from outrider import api, cli, smoke

RECIPE = """
environment = { type = "factbook" }
algorithm = { type = "grpo" }
"""
CLUSTER = {"num_trainers": 8, "num_engines": 4, "num_rollout_workers": 3, "heartbeat_s": 9.0}


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


def smoke_cluster(**train: int) -> dict[str, str]:
    """The overrides of ``[cluster]``, and the reported line."""
    settings = api.run_settings(
        {
            "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": CLUSTER,
            "train": train,
        }
    )  # fmt: skip
    overrides = smoke.smoke_overrides(settings, smoke.smoke_assets(), server=smoke.NO_SERVER)
    values = dict(override.split("=", 1) for override in overrides if override.startswith("cluster."))
    return values | {"line": smoke.describe_omissions(settings)}


@pytest.mark.parametrize(
    ("modules", "tasks_per_step", "expected", "line"),
    [
        ({"ray"}, 8, {"num_trainers": "2", "num_engines": "1", "num_rollout_workers": "2"}, "runs [cluster]"),
        ({"ray"}, 1, {"num_trainers": "2", "num_engines": "1", "num_rollout_workers": "1"}, "runs [cluster]"),
        (
            set(), 8, {"num_trainers": "1", "num_engines": "1", "num_rollout_workers": "1"},
            "leaves out [cluster] (num_trainers = 8, num_engines = 4, num_rollout_workers = 3, heartbeat_s = "
            "9.0), which needs Ray (pip install 'outrider[cluster]')",
        ),
    ],
)  # fmt: skip
def test_smoke_shrinks_a_cluster_to_what_this_machine_can_start(
    monkeypatch: pytest.MonkeyPatch,
    modules: set[str],
    tasks_per_step: int,
    expected: dict[str, str],
    line: str,
) -> None:
    """A worker plays whole groups, so there is one of them for one task; without Ray there is no cluster."""
    monkeypatch.setattr(smoke, "find_spec", lambda name: name if name in modules else None)
    monkeypatch.setitem(CLUSTER, "num_rollout_workers", min(3, tasks_per_step))
    found = smoke_cluster(tasks_per_step=tasks_per_step)
    assert found.pop("line").startswith(f"--smoke {line}")
    assert {f"cluster.{key}": value for key, value in expected.items()}.items() <= {
        "cluster.num_rollout_workers": "1",
        **found,
    }.items()
