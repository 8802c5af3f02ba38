"""The equations of the group page give the recorded advantages, or are left out."""

import math
from pathlib import Path
from typing import Any

import pytest

from outrider.config import load_settings
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.types import Origin
from outrider.viewer.advantages import explain_advantages
from outrider.viewer.answers import group_view
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file
from tests.training.tool_run import write_tool_run
from tests.viewer.made_up_runs import rollout, write_rollouts

FORMULAS = {
    "grpo": "A = (R − mean) / std",
    "centered": "A = (R − mean)",
    "rapo": "A = (R − mean) / std × factor",
    "arpo": "A = (R − mean) / std",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("explained"))


def value_of(side: str) -> float:
    return float(eval(side.replace("−", "-").replace("×", "*")))


@pytest.mark.parametrize("name", FORMULAS)
def test_equations_of_a_recorded_run_give_its_advantages(recipe: Path, name: str) -> None:
    text = recipe.read_text()
    if name != "rapo":
        text = text.replace("num_hybrid = 2\n", "").replace(
            '"rapo"', '"arpo"' if name == "arpo" else '"grpo"'
        )
        text = text.split("[buffer]")[0] + "[rollout]" + text.split("[rollout]")[1]
    own = recipe.with_name(f"{name}.toml")
    own.write_text(text)
    overrides = ["train.num_steps=1", "evaluation.every=0", "evaluation.at_start=false"]
    overrides += ["algorithm.advantage=group_centered"] * (name == "centered")
    settings = load_settings(RunSettings, file=own, overrides=overrides)
    directory = RunDirectory.create(recipe.parent / name, settings)
    run_training((directory, settings), progress="none", on_start=lambda stop: None)
    num_equations = 0
    for number in range(2):
        group = group_view(recipe.parent / name, "step-000001", f"1/{number}")
        explained = group["advantages"]
        assert not [note for note in explained["notes"] if "do not follow" in note]
        for row in group["rollouts"]:
            if not (equation := explained["rollouts"][str(row["rollout"])]["equation"]):
                continue
            assert explained["formula"] == FORMULAS[name]
            left, right = equation.split(" = ")
            assert value_of(left) == pytest.approx(row["advantage"], rel=1e-3)
            assert value_of(right) == pytest.approx(row["advantage"], rel=1e-3)
            num_equations += 1
    assert num_equations >= 4


def group(advantages: list[float], *returns: float, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"rollout": i, "node_id": -1, "episode_return": own, "advantage": advantage, "intrinsic": 0.0}
        | {"forked_from": i} | fields
        for i, (own, advantage) in enumerate(zip(returns, advantages, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "advantages", "equation"),
    [
        ("leave_one_out", [0.75, -0.75, 0.0], "(1 − 0.25) = +0.75"),
        ("mean_normalized", [1.0, -1.0, 0.0], "(1 − 0.5) / 0.5 = +1"),
    ],
)
def test_other_baselines_have_equations_of_their_own(
    kind: str, advantages: list[float], equation: str
) -> None:
    explained = explain_advantages({"advantage": kind}, group(advantages, 1.0, 0.0, 0.5), [])
    assert explained is not None and explained["rollouts"][0]["equation"] == equation


def test_close_returns_are_printed_with_digits_that_give_the_advantage() -> None:
    returns = [0.98761, 0.98762, 0.98763]
    std = 1e-5 + 1e-6
    rows = group([-1e-5 / std, 0.0, 1e-5 / std], *returns)
    explained = explain_advantages({}, rows, [])
    assert explained is not None
    for row in rows:
        left, right = explained["rollouts"][row["rollout"]]["equation"].split(" = ")
        assert math.isclose(value_of(left), value_of(right), rel_tol=1e-3, abs_tol=1e-6)


def test_advantages_that_do_not_follow_from_returns_have_no_equation() -> None:
    algorithm = {"type": "reinforce++", "advantage": "group_centered"}
    explained = explain_advantages(algorithm, group([0.31, -0.27], 1.0, 0.0), [])
    assert explained is not None and explained["formula"] == ""
    assert (explained["mean"], explained["rollouts"][0]["equation"]) == (0.5, "")
    assert "normalized over the step" in explained["notes"][0]


def test_a_group_with_a_mean_of_zero_has_no_explanation(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[algorithm]\nadvantage = "mean_normalized"\n', encoding="utf-8")
    write_rollouts(
        tmp_path, [rollout(1, 0, i, value, advantage=value) for i, value in enumerate((-1.0, 1.0))]
    )
    node = TraceRow(
        step=1, task_key="task-0", trace_id="1/0", node_id=0, parent_id=-1, rollout=0,
        origin=Origin.PROMPT, text="x",
    )  # fmt: skip
    StepFiles(tmp_path / "traces").write_rows(step_file(1), [node], SCHEMA)
    assert group_view(tmp_path, "step-000001", "1/0")["advantages"] is None


def test_equal_returns_and_faults_have_no_equation() -> None:
    explained = explain_advantages({}, group([0.0, 0.0], 1.0, 1.0), [])
    assert explained is not None and explained["notes"] == ["All returns are equal, so every advantage is 0."]
    assert explain_advantages({}, group([0.0], 1.0, advantage=None), []) is None


def test_tokens_that_the_clip_loss_bounds_are_counted() -> None:
    node = {"node_id": 0, "parent_id": -1, "rollout": 0, "origin": "policy"}
    node |= {"ratios": [1.0, 1.3, 0.5, math.nan], "advantages": [1.0, 1.0, 1.0, 1.0]}
    loss = {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": "none"}
    rows = group([0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)], 1.0, 0.0, node_id=0)
    explained = explain_advantages({"loss": loss}, rows, [node])
    assert explained is not None
    assert [row["clipped"] for row in explained["rollouts"].values()] == [[1, 3], None]
