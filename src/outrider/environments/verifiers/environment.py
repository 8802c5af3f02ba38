"""Environments of the package verifiers: ``environment.type = "verifiers"``."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.agent.environment import ProgramConfig, ProgramFactory
from outrider.environments.agent.programs import ONE_THREAD, ProgramRunner, WorkerProcess, recipe_folders
from outrider.environments.base import SPLITS, Split, known_split, require_tasks, split_size
from outrider.errors import DataError, ToolUnavailable
from outrider.types import Step, Task

# A process of its own plays the episodes, and is restarted if it dies.
_PLAYER: Final = Path(__file__).with_name("player.py")


class VerifiersConfig(ProgramConfig):
    """A taskset of the package verifiers (and the Environments Hub) with its agents and rewards. Its agents
    call the policy like any other endpoint.
    """

    starts_quickly: ClassVar[bool] = False
    input_paths: ClassVar[frozenset[str]] = frozenset({"python"})

    type: Literal["verifiers"] = "verifiers"
    id: Annotated[str, Field(min_length=1)]
    """The taskset: a package that is installed together with verifiers, or a module next to the recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The environment's config, as in ``[env]`` of a verifiers file: ``taskset``, ``id``, agents by name."""
    python: Path | None = None
    """The interpreter with verifiers and the taskset; None: the interpreter of Outrider."""
    num_train: Annotated[int, Field(ge=0)] = 64
    """Number of rows of ``train``: the first ones of the taskset."""
    num_valid: Annotated[int, Field(ge=0)] = 16
    """Number of rows of ``valid``: the next ones."""
    num_test: Annotated[int, Field(ge=0)] = 32
    """Number of rows of ``test``: the next ones."""
    first_row: Annotated[int, Field(ge=0)] = 0
    """Number of rows that are skipped at the start."""
    shuffle_seed: int | None = None
    """Seed with which verifiers shuffles the taskset before it is split. None: its own order."""
    start_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit in seconds for the import and the taskset's data."""

    @model_validator(mode="after")
    def _validate(self) -> "VerifiersConfig":
        require_tasks(self)
        taskset = self.options.get("taskset", {})
        if not isinstance(taskset, dict) or "id" in taskset:
            raise ValueError("options.taskset is a table without an id; set environment.id instead")
        return self

    def first_row_after(self, split: Split) -> int:
        """Number of the first row after a split."""
        begin = self.first_row
        for name in SPLITS[: SPLITS.index(split) + 1]:
            begin += split_size(self, name) or 0
        return begin


def launch(config: VerifiersConfig, *, lists: bool) -> WorkerProcess:
    """Start the process; with ``lists`` its first line contains the rows. Raises ToolUnavailable."""
    # -P: modules in the program's folder must not hide others with the same name.
    command = [os.path.expanduser(config.python or sys.executable), "-P", str(_PLAYER)]
    request = {
        "id": config.id,
        "options": config.options,
        "num_rows": config.first_row_after("test"),
        "shuffle_seed": config.shuffle_seed,
        "path": recipe_folders(),
        "lists": lists,
    }
    try:
        return WorkerProcess(
            command,
            os.environ | ONE_THREAD,
            description=f"the verifiers environment {config.id}",
            start_s=config.start_limit_s,
            first=request,
            is_quiet=True,
        )
    except ToolUnavailable as error:
        if "No module named 'verifiers'" not in str(error):
            raise
        raise ToolUnavailable(
            f"{command[0]} has no verifiers: install it in an environment of its own (its version pins are "
            "not compatible with others) and set environment.python to the interpreter of it"
        ) from error


def run_episodes(config: VerifiersConfig) -> ProgramRunner:
    """Play episodes in one process. Raises ToolUnavailable if the environment cannot be loaded."""
    return ProgramRunner(
        lambda: launch(config, lists=False),
        lambda task, environment: {
            "key": task.key,
            "versions": task.metadata["versions"],
            "base_url": environment["OPENAI_BASE_URL"],
            "api_key": environment["OPENAI_API_KEY"],
        },
    )


class VerifiersTaskSet:
    """The rows of a taskset."""

    Settings = VerifiersConfig
    name = "verifiers"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: VerifiersConfig) -> None:
        self.config = config
        self.stop: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._rows: tuple[Task, ...] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split, in the taskset's order. The metadata name the versions of verifiers and of the
        taskset, which determine the rows. Raises ToolUnavailable if these cannot be loaded, and DataError for
        two rows with the same key.
        """
        known = known_split(split, "verifiers")
        with self._lock:
            if self._rows is None:
                self._rows = _listed(self.config)
        end = self.config.first_row_after(known)
        return self._rows[end - (split_size(self.config, known) or 0) : end]

    def make(self) -> ProgramFactory:
        """Start the process that plays, and the server that agents call. Raises ToolUnavailable."""
        return ProgramFactory(self.config, lambda: run_episodes(self.config))

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: a taskset has no turns of an expert."""
        return None

    def close(self) -> None:
        """Nothing to release."""


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
