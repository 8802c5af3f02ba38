"""A tool of your own: days of the week. In a recipe: ``tools = ["own_tool:weekday"]``.

python examples/own_tool.py [MODEL]     # trains a few steps into runs/own-tool
"""

import json
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import outrider as o


@o.tool
def weekday(day: str) -> str:
    """Return the day of the week of a date.

    Args:
        day: the date as 2024-02-29
    """
    # The policy reads what is returned, and one line about an exception such as a ValueError.
    return f"{date.fromisoformat(day.strip()):%A}"


def write_questions(file: Path, *, first: date, num: int) -> str:
    """Write one question per line; return the path for the recipe."""
    file.parent.mkdir(parents=True, exist_ok=True)
    days = [first + timedelta(days=37 * i) for i in range(num)]
    rows = [{"question": f"Which day of the week is {day}?", "answer": f"{day:%A}"} for day in days]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file.absolute())


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-tool", overrides: Sequence[str] = ()
) -> o.Run:
    """Train with GRPO on questions that the tool answers."""
    folder = Path(run).parent
    recipe = {
        "model": {"name": model},
        "environment": {
            "type": "tools",
            "tools": ["own_tool:weekday"],
            "train": {"path": write_questions(folder / "days-train.jsonl", first=date(2024, 1, 1), num=16)},
            "test": {"path": write_questions(folder / "days-test.jsonl", first=date(2031, 1, 1), num=4)},
            "prompt": "short",
        },
        "algorithm": {"type": "grpo", "group_size": 4},
        "rollout": {"max_turns": 3, "max_turn_tokens": 32, "max_response_tokens": 128},
        "train": {"num_steps": 4, "tasks_per_step": 2},
        "evaluation": {"num_tasks": 4},
    }
    return o.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
