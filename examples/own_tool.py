"""A tool of one's own: days of the week. In a recipe: ``tools = ["own_tool:Weekday"]``.

python examples/own_tool.py [MODEL]     # trains a few steps into runs/own-tool
"""

import json
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import outrider
from outrider.config import Settings
from outrider.runs import Run
from outrider.tools.base import ToolOutput


class WeekdaySettings(Settings):
    """Keys of the tool's table in ``environment.tools``; a key that is not here is refused."""

    short: bool = False


class Weekday:
    """Tells which day of the week a date is."""

    Settings = WeekdaySettings
    name = "weekday"  # the tag that the policy writes
    usage = "Write <weekday>2024-02-29</weekday> to learn which day of the week a date is."

    def __init__(self, settings: WeekdaySettings) -> None:
        self.settings = settings

    def run_text(self, text: str) -> ToolOutput:
        """One call, perhaps from several threads at once. Bad input is answered in words, never by an
        exception; outrider.errors.ToolFault is for what is not the caller's fault."""
        try:
            day = date.fromisoformat(text.strip())
        except ValueError:
            return ToolOutput(text="Write a date as 2024-02-29.", failed=True)
        return ToolOutput(text=day.strftime("%a" if self.settings.short else "%A"))

    def close(self) -> None:
        """Nothing is held."""


def write_questions(file: Path, *, first: date, num: int) -> str:
    """One question a line; the path as a recipe has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    days = [first + timedelta(days=37 * i) for i in range(num)]
    rows = [{"question": f"Which day of the week is {day}?", "answer": f"{day:%A}"} for day in days]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file.absolute())


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-tool", overrides: Sequence[str] = ()
) -> Run:
    """Train with GRPO on questions that the tool answers."""
    folder = Path(run).parent
    recipe = {
        "model": {"name": model},
        "environment": {
            "type": "tools",
            "tools": [{"type": "own_tool:Weekday", "short": False}],
            "train": {"path": write_questions(folder / "days-train.jsonl", first=date(2024, 1, 1), num=16)},
            "test": {"path": write_questions(folder / "days-test.jsonl", first=date(2031, 1, 1), num=4)},
            "prompt": "short",
        },
        "algorithm": {"type": "grpo", "group_size": 4},
        "rollout": {"max_turns": 3, "max_turn_tokens": 32, "max_response_tokens": 128},
        "train": {"num_steps": 4, "tasks_per_step": 2},
        "evaluation": {"num_tasks": 4},
    }
    return outrider.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
