"""What chance and the planner solve of ALFWorld's games made offline."""

import re

import pytest

from benchmarks import alfworld_policies
from outrider.environments.alfworld.environment import AlfworldConfig, AlfworldEnvironment


def test_the_table_has_a_row_per_task_type_and_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    assert alfworld_policies.main(["--games", "8", "--samples", "2", "--max-moves", "5"]) == 0
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[1] for row in rows[2:]] == ["2", "2", "1", "1", "1", "1", "8"]
    plans = [re.match(r"([\d.]+) %", row[2]) for row in rows[2:]]
    assert [float(found[1]) for found in plans if found] == [100, 100, 0, 0, 0, 0, 50]


def test_random_play_depends_on_the_sample_number() -> None:
    def won(sample: int, max_moves: int = 500) -> bool:
        settings = AlfworldConfig(task_types=("look_at_obj_in_light",), num_test=1, max_moves=max_moves)
        return alfworld_policies.chance(settings, AlfworldEnvironment.tasks(settings, "test")[0], sample)

    assert [won(sample) for sample in (0, 3, 0, 3)] == [False, True, False, True]
    assert not won(3, max_moves=2)
