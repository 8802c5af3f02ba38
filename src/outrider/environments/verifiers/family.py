"""Environments of the package verifiers: ``environment.type = "verifiers"``."""

import threading
from collections.abc import Sequence
from typing import Literal

from outrider.environments.agent.factory import ProgramFactory
from outrider.environments.verifiers.episodes import Episodes, launch
from outrider.environments.verifiers.settings import SPLITS, VerifiersConfig
from outrider.errors import DataError
from outrider.types import Step, Task


class VerifiersTaskSet:
    """The rows of a taskset, which verifiers' agents work on."""

    Settings = VerifiersConfig
    name = "verifiers"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: VerifiersConfig) -> None:
        """Start nothing."""
        self.config = config
        self.stop: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._rows: tuple[Task, ...] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split, in the taskset's order. They name the versions of verifiers and of the
        taskset, which decide what they are. Raises ToolUnavailable where these cannot be loaded, DataError
        for two rows with one key.
        """
        if split not in SPLITS:
            raise DataError(f"verifiers: unknown split {split!r}, expected one of {', '.join(SPLITS)}")
        with self._lock:
            if self._rows is None:
                self._rows = _listed(self.config)
        rows = self.config.split_rows(split)
        return self._rows[rows.start : rows.stop]

    def make(self) -> ProgramFactory:
        """Start the process that plays, and the server that agents ask. Raises ToolUnavailable."""
        return ProgramFactory(self.config, lambda: Episodes(self.config))

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: nobody knows what an agent would have to be told."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def _listed(config: VerifiersConfig) -> tuple[Task, ...]:
    process = launch(config, lists=True)
    process.close()
    versions = process.ready_message["versions"]
    tasks = tuple(
        Task(key=row["key"], question=row["question"], metadata={"versions": versions, "row": number})
        for number, row in enumerate(process.ready_message["rows"])
    )
    keys: set[str] = set()
    for task in tasks:
        if task.key in keys:
            raise DataError(f"{config.id}: two rows have the key {task.key!r}")
        keys.add(task.key)
    return tasks
