"""Agents that break in odd ways, and rewards in odd forms; run in processes of their own."""

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.environments.agents.programs import chat


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def beside_others(task: Any) -> Any:
    """Breaks in the way that the task names, or waits until everybody else has; its pipes are in a folder."""
    folder, kind = task.question, task.answers[0]
    chat([{"role": "user", "content": kind}])
    if kind != "fine":
        os.open(f"{folder}/{kind}", os.O_WRONLY)
        return BREAKS[kind]()
    for other in BREAKS:
        with open(f"{folder}/{other}") as held:  # at its end when the one that holds it is gone
            held.read()
    chat([{"role": "user", "content": "still here"}])
    return 1.0


def _deep() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def _silenced() -> float:
    sys.stderr.close()
    raise ValueError("unheard")


def _wordless() -> float:
    raise Wordless


def _status() -> float:
    raise SystemExit(1 << 40 | 3)


BREAKS: dict[str, Callable[[], Any]] = {
    "deep": _deep, "silenced": _silenced, "wordless": _wordless, "status": _status
}  # fmt: skip


def early(task: Any) -> float:
    raise RuntimeError("no config")


def scalar(task: Any) -> Any:
    """The reward as the object that the question says."""
    import numpy as np

    chat([{"role": "user", "content": "a"}])
    return eval(task.question, {"np": np})


def overwriting(task: Any) -> Any:
    chat([{"role": "user", "content": "a"}])
    return {"reward": 1, "metrics": {task.question: 99}}
