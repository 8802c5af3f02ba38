"""Tool calls until a reward: counted by hand on made runs."""

import json
from pathlib import Path

import pytest
from benchmarks.calls_to_reward import calls_to, main, read_calls, table


def make_run(folder: Path, name: str, rewards: list[float], calls: list[int]) -> None:
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text("seed = 0\n")
    lines = [
        {"step": step, "kind": "train", "reward/mean": reward, "rollout/num_tool_calls": executed}
        for step, (reward, executed) in enumerate(zip(rewards, calls, strict=True), start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_level_is_reached_by_the_mean_of_three_steps() -> None:
    rewards, calls = [0.9, 0.0, 0.0, 0.3, 0.6, 0.6], [10, 20, 30, 40, 50, 60]
    assert calls_to(rewards, calls, 0.3) == 60  # the first three steps have 0.3 on average
    assert calls_to(rewards, calls, 0.31) == 210  # 0.0, 0.3 and 0.6 have 0.3, the last three 0.5
    assert calls_to(rewards, calls, 0.6) == -210
    assert calls_to([1.0, 1.0], [5, 5], 0.1) == -10  # too few steps to tell


def test_the_table_counts_seeds_and_uses_the_first_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", "grpo-0", [0.0, 0.3, 0.6], [1, 2, 3])
    make_run(tmp_path / "a", "grpo-1", [0.0, 0.0, 0.0], [1, 1, 1])
    make_run(tmp_path / "b", "grpo-0", [1.0, 1.0, 1.0], [9, 9, 9])
    make_run(tmp_path / "b", "arpo-threshold-0", [0.3, 0.3, 0.3], [4, 4, 4])
    make_run(tmp_path / "b", "grpo-compare", [1.0, 1.0, 1.0], [1, 1, 1])
    found = read_calls([tmp_path / "a", tmp_path / "b"], ("grpo", "arpo-threshold"), (0.3,))
    assert table(found, (0.3,)).splitlines()[2:] == [
        "| 0.3 | grpo | 1 of 2 | 6, > 3 | not reached |",
        "| 0.3 | arpo-threshold | 1 of 1 | 12 | 12 |",
    ]
    assert main([str(tmp_path / "a"), "--levels", "0.2"]) == 0 and "| 0.2 | grpo |" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1 and "no run METHOD-SEED" in capsys.readouterr().err
