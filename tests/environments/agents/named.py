"""One program for many tests: it runs the one that its task names, so that tests can share a launcher."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.types import Task
from tests.environments.agents import erring, programs

NAMED = f"{__name__}:run"


def run(task: Any) -> Any:
    module = {"programs": programs, "erring": erring}[str(task.metadata["module"])]
    return getattr(module, str(task.metadata["program"]))(task)


def with_program(tasks: Sequence[Task], module: str, program: str) -> list[Task]:
    return [replace(task, metadata={**task.metadata, "module": module, "program": program}) for task in tasks]
