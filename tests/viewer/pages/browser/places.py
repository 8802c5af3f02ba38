"""Addresses of rollouts in the recorded run that have what a test is about."""

import time
from typing import Any

from tests.viewer.pages.serving import Served


def row_with(served: Served, **given: str) -> dict[str, Any]:
    """The first rollout of training that a filter leaves."""
    found: dict[str, Any] = served.data("rollouts", training="1", **given)["rows"][0]
    return found


def place(row: dict[str, Any]) -> str:
    return f"{row['where']}/{row['trace_id'].rpartition('/')[2]}"


VIEWS = (
    "overview",
    "curves",
    "step",
    "all",
    "group",
    "rollout",
    "beside",
    "counter",
    "memory",
    "task",
)


def views(served: Served) -> dict[str, str]:
    """An address of every view of a run, by its name."""
    row = row_with(served, kind="hybrid")
    here, rollout = place(row), row["rollout"]
    return {
        "overview": "",
        "curves": "curves",
        "step": f"step/{row['where']}",
        "all": "all",
        "group": f"group/{here}",
        "rollout": f"rollout/{here}/{rollout}",
        "beside": f"beside/{here}/{(rollout + 1) % 4}/{rollout}",
        "counter": f"counter/{here}/{rollout}",
        "memory": "memory/2",
        "task": f"task/{row['task_key']}",
    }


def until(page: Any, condition: str, *, timeout_s: float = 60.0) -> None:
    """Playwright's own wait would have the page evaluate a string, which its policy forbids."""
    ends = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < ends, f"never came true: {condition}"
        page.wait_for_timeout(20)
