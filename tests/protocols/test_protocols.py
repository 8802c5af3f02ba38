"""Published protocols as data: their files, their settings in both directions, and their differences."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.errors import ConfigError
from outrider.protocols import (
    Status,
    all_points,
    compare_protocols,
    compare_settings,
    differing_points,
    find_protocol,
    flat_settings,
    nested_settings,
    points_from_settings,
    protocol_names,
    with_protocol,
)
from outrider.training.settings import RunSettings

RECIPES = Path(__file__).parents[2] / "recipes"
RUNNABLE = [name for name in protocol_names() if not find_protocol(name).needed]
WITHOUT_SETTINGS = {"release", "train_tasks", "models", "hardware"}
"""Points that a recipe has to fill in (the data, the model), or that no setting can fill."""


@pytest.mark.parametrize("name", protocol_names())
def test_file_names_known_points_with_evidence(name: str) -> None:
    protocol = find_protocol(name)
    assert protocol.points.keys() <= all_points().keys()
    assert protocol.evidence.keys() <= protocol.points.keys()
    assert protocol.cannot.keys() <= protocol.points.keys()
    assert set(protocol.needed) <= protocol.cannot.keys()
    if not name.startswith("outrider-"):
        assert protocol.evidence
        assert all(re.match(r"[\w-]+/[\w-]+@[0-9a-f]{7} \S", text) for text in protocol.evidence.values())


@pytest.mark.parametrize("name", all_points())
def test_values_of_a_choice_are_read_back_from_its_settings(name: str) -> None:
    for value, settings in all_points()[name].choices:
        assert points_from_settings(nested_settings(settings))[name] == value


@pytest.mark.parametrize("name", RUNNABLE)
def test_points_of_a_protocol_are_read_back_from_its_settings(name: str) -> None:
    protocol = find_protocol(name)
    difference = compare_settings("recipe", nested_settings(protocol.settings()), protocol)
    assert difference.with_status(Status.DIFFERS) == []
    unknown = {row.point for row in difference.with_status(Status.UNKNOWN) if row.right is not None}
    assert unknown <= WITHOUT_SETTINGS


@pytest.mark.parametrize("name", protocol_names())
def test_protocol_does_not_differ_from_itself(name: str) -> None:
    difference = compare_protocols(find_protocol(name), find_protocol(name))
    assert difference.exit_status == 0
    assert len(difference.with_status(Status.SAME)) == len(find_protocol(name).points)


def test_difference_of_two_protocols() -> None:
    difference = compare_protocols(find_protocol("opid-alfworld"), find_protocol("verl-agent-alfworld"))
    rows = {row.point: (row.left, row.right) for row in difference.with_status(Status.DIFFERS)}
    assert rows == {
        "history_steps": (5, 2),
        "max_turns": (30, 50),
        "prompt_overflow": ("left", "error"),
        "advantage": ("group_centered", "group_normalized"),
        "steps": (160, 150),
    }
    assert difference.exit_status == 3


def test_evidence_of_a_base_does_not_follow_another_value() -> None:
    assert find_protocol("opid-alfworld").evidence["kl_weight"].startswith("ZJU-REAL/SDAR@")
    assert find_protocol("opid-alfworld").evidence["history_steps"].startswith("jinyangwu/OPID@")
    assert "mini_batch" not in find_protocol("skillrl-alfworld").evidence


def test_status_of_points_of_a_recipe() -> None:
    tree = nested_settings(find_protocol("verl-agent-alfworld").settings())
    tree["rollout"]["max_turns"] = 30
    difference = compare_settings("recipe", tree, find_protocol("verl-agent-alfworld"))
    statuses = {row.point: row for row in difference.rows}
    assert statuses["max_turns"].status is Status.DIFFERS
    assert "run_alfworld.sh:66" in statuses["max_turns"].note
    assert statuses["eval_choice"].status is Status.CANNOT
    assert "same number of times" in statuses["eval_choice"].note
    assert statuses["hardware"].status is Status.UNKNOWN
    assert statuses["kl_weight"].status is Status.SAME
    assert [row.point for row in difference.with_status(Status.DIFFERS)] == ["max_turns"]


def test_growing_limits_are_one_point() -> None:
    protocol = find_protocol("agentgym-rl-scienceworld")
    assert flat_settings(protocol.settings())["rollout.max_turns"] == [10, 20, 30]
    recorded = {"rollout": {"max_turns": 30, "earlier_max_turns": [10, 20]}}
    assert points_from_settings(recorded)["max_turns"] == [10, 20, 30]


def test_recipe_keys_win_over_the_protocol() -> None:
    tree = with_protocol(
        {
            "protocol": "verl-agent-alfworld",
            "rollout": {"max_turns": 30},
            "algorithm": {"loss": {"clip_high": 0.28}},
            "environment": {"window": {"steps": 5}},
        }
    )
    assert tree["rollout"] == {"max_turns": 30, "max_turn_tokens": 512}
    assert tree["algorithm"]["loss"] == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert tree["environment"]["window"]["steps"] == 5
    assert tree["environment"]["window"]["parse"] == "verl-agent-30"
    assert tree["environment"]["type"] == "alfworld"
    assert tree["protocol_sha256"] == find_protocol("verl-agent-alfworld").sha256


@pytest.mark.parametrize(
    ("protocol", "own", "dropped"),
    [
        ("verl-agent-alfworld", {"environment": {"context": "chat"}}, "environment.window"),
        ("agent-lightning-scienceworld", {"environment": {"context": "window"}}, "environment.actions"),
        ("verl-agent-alfworld", {"update": {"num_mini_batches": 2}}, "update.mini_batch_samples"),
        ("agentgym-rl-scienceworld", {"update": {"mini_batch_samples": 64}}, "update.num_mini_batches"),
        ("outrider-alfworld-fair", {"evaluation": {"num_tasks": 20}}, "evaluation.panels"),
        ("verl-agent-alfworld", {"evaluation": {"panels": [{"name": "a"}]}}, "evaluation.num_tasks"),
    ],
)
def test_settings_that_contradict_the_recipe_are_left_out(
    protocol: str, own: dict[str, Any], dropped: str
) -> None:
    section, _, key = dropped.partition(".")
    data = {"data": "/games"} if protocol.endswith("alfworld") else {}
    tree = with_protocol({"protocol": protocol, **own})
    assert key not in tree[section] and key in with_protocol({"protocol": protocol})[section]
    own["environment"] = data | own.get("environment", {})
    RunSettings.model_validate({"protocol": protocol, **own})


def test_keys_of_another_meaning_are_not_filled() -> None:
    """LUFFY has the key statistics with values of its own."""
    tree = with_protocol({"protocol": "verl-agent-alfworld", "algorithm": {"type": "luffy"}})
    assert "statistics" not in tree["algorithm"] and tree["algorithm"]["kl_weight"] == 0.01


def test_points_of_evaluation_sets() -> None:
    """The default split and number of tasks are not in use, and a pinned hash changes no point."""
    name = "outrider-alfworld-fair"
    tree = deepcopy(nested_settings(find_protocol(name).settings()))
    tree["evaluation"] |= {"split": "test", "num_tasks": 200}
    for entry in tree["evaluation"]["panels"]:
        entry["sha256"] = "0" * 64
    assert not compare_settings("run", tree, find_protocol(name)).with_status(Status.DIFFERS)
    tree["evaluation"]["panels"][0]["num_tasks"] = 20
    points = points_from_settings(tree)
    assert (points["eval_split"], points["eval_tasks"]) == (["valid", "test"], [20, 134])
    del tree["evaluation"]["panels"][1]
    points = points_from_settings(tree)
    assert (points["eval_split"], points["eval_tasks"]) == ("valid_seen", 20)


def test_another_algorithm_gets_the_shared_settings() -> None:
    tree = with_protocol({"protocol": "verl-agent-alfworld", "algorithm": {"type": "gigpo", "group_size": 4}})
    assert tree["algorithm"]["type"] == "gigpo"
    assert tree["algorithm"]["group_size"] == 4
    assert tree["algorithm"]["kl_weight"] == 0.01
    assert "advantage" not in tree["algorithm"]
    short = with_protocol({"protocol": "verl-agent-alfworld", "algorithm": {"type": "dapo"}})
    assert short["algorithm"]["type"] == "dapo"
    assert "loss" not in short["algorithm"] and "group_size" not in short["algorithm"]
    assert short["algorithm"]["invalid_penalty"] == 0.1
    preset = with_protocol({"protocol": "verl-agent-alfworld", "algorithm": {"preset": "grpo-paper"}})
    assert preset["algorithm"]["type"] == "grpo"
    assert "kl_weight" not in preset["algorithm"]


def test_record_of_a_run_is_not_filled() -> None:
    record: dict[str, Any] = {"protocol": "of another version", "protocol_sha256": "0" * 64, "seed": 1}
    assert with_protocol(record) is record
    assert with_protocol({"seed": 1}) == {"seed": 1}
    assert with_protocol({"protocol": "none"}) == {"protocol": "none"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"protocol": "lamer-alfworld"}, "lamer-alfworld cannot be run (trials: "),
        ({"protocol": "verl-agent-alfwold"}, "did you mean verl-agent-alfworld?"),
        (
            {"protocol": "verl-agent-alfworld", "environment": {"type": "webshop"}},
            "is for environment.type = alfworld, not webshop",
        ),
    ],
)
def test_refused_protocols(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_protocol(tree)


def test_points_in_which_runs_differ() -> None:
    short, long = ({"environment": {"context": "window", "window": {"steps": k}}} for k in (2, 5))
    assert differing_points({"a": short, "b": long}) == {"history_steps": ("2", "5")}
    assert differing_points({"a": short, "b": short}) == {}


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protocol", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in protocol_names())
    assert "not run: trials" in listed
    assert main(["protocol", "show", "verl-agent-alfworld"]) == 0
    shown = capsys.readouterr().out
    assert "history_steps = 2" in shown
    assert "ZJU-REAL/SDAR@8b85c23 verl/trainer/config/ppo_trainer.yaml:296" in shown
    assert "NOT COPIED: Outrider trains on every sample once" in shown
    assert 'parse = "verl-agent-30"' in shown
    assert main(["protocol", "show", "lamer-alfworld"]) == 0
    assert "settings that protocol" not in capsys.readouterr().out


def test_diff_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["protocol", "diff", "opid-alfworld", "verl-agent-alfworld", "--json"]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert {row["point"] for row in printed["rows"] if row["status"] == "differs"} == {
        "history_steps", "max_turns", "prompt_overflow", "advantage", "steps",
    }  # fmt: skip
    assert main(["protocol", "diff", "search-r1", "search-r1"]) == 0
    assert "0 differ" in capsys.readouterr().out
    assert main(["protocol", "diff", str(RECIPES / "alfworld-gigpo.toml"), "verl-agent-alfworld"]) == 3
    assert "context: differs" in capsys.readouterr().out
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('seed = 0\n[environment]\ntype = "alfworld"\n')
    assert main(["protocol", "diff", str(run), "verl-agent-alfworld"]) == 3
    assert main(["protocol", "diff", "opid-alfwrld", "verl-agent-alfworld"]) == 2
    assert "did you mean opid-alfworld?" in capsys.readouterr().err
