"""Which environment of verifiers is played, under which Python, and how its rows are split."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.agent.environment import ProgramConfig, ProgramFactory
from outrider.environments.agent.programs import (
    ONE_THREAD,
    OnEnd,
    RestartingProcess,
    WorkerProcess,
    recipe_folders,
)
from outrider.errors import DataError, ToolUnavailable
from outrider.types import Step, Task

SPLITS: Final = ("train", "valid", "test")


class VerifiersConfig(ProgramConfig):
    """A taskset of the package verifiers (the Environments Hub's) with its agents and rewards. Its agents ask
    the policy as they would ask any endpoint.
    """

    starts_quickly: ClassVar[bool] = False
    input_paths: ClassVar[frozenset[str]] = frozenset({"python"})

    type: Literal["verifiers"] = "verifiers"
    id: Annotated[str, Field(min_length=1)]
    """The taskset: a package that is installed where verifiers is, or a module beside the recipe."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The environment's config, as in ``[env]`` of a verifiers file: ``taskset``, ``id``, agents by name."""
    python: Path | None = None
    """The interpreter that has verifiers and the taskset; None: the one that runs Outrider."""
    num_train: Annotated[int, Field(ge=0)] = 64
    """Rows of ``train``: the first ones of the taskset."""
    num_valid: Annotated[int, Field(ge=0)] = 16
    """The rows behind those."""
    num_test: Annotated[int, Field(ge=0)] = 32
    """And the rows behind those."""
    first_row: Annotated[int, Field(ge=0)] = 0
    """Rows in front of the first one that is used."""
    shuffle_seed: int | None = None
    """Shuffle the taskset (verifiers' own order of this seed) before it is split. None: its own order."""
    start_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that the import and the taskset's data may take."""

    @model_validator(mode="after")
    def _validate(self) -> "VerifiersConfig":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        taskset = self.options.get("taskset", {})
        if not isinstance(taskset, dict) or "id" in taskset:
            raise ValueError("options.taskset is a table without an id: the taskset is environment.id")
        return self

    @property
    def num_rows(self) -> int:
        """Rows that are read, the first ones that are left out among them."""
        return self.first_row + self.num_train + self.num_valid + self.num_test

    def split_rows(self, split: str) -> range:
        """The rows of a split."""
        numbers = dict(zip(SPLITS, (self.num_train, self.num_valid, self.num_test), strict=True))
        begin = self.first_row
        for name in SPLITS[: SPLITS.index(split)]:
            begin += numbers[name]
        return range(begin, begin + numbers[split])


# The trainer's end of the process that plays episodes of verifiers, which is started again when it dies.


_PLAYER: Final = Path(__file__).with_name("player") / "__main__.py"


def launch(config: VerifiersConfig, *, lists: bool) -> WorkerProcess:
    """Start the process; with ``lists`` its first line holds the rows. Raises ToolUnavailable."""
    # -P: the folder of the program holds modules of ours, which would hide others' of the same names
    command = [os.path.expanduser(config.python or sys.executable), "-P", str(_PLAYER)]
    request = {
        "id": config.id,
        "options": config.options,
        "num_rows": config.num_rows,
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
            f"{command[0]} has no verifiers: install it in an environment of its own (its pins exclude "
            "those of others) and name the interpreter of that one in environment.python"
        ) from error


class Episodes(RestartingProcess):
    """Plays them in one process. Called from several threads."""

    def __init__(self, config: VerifiersConfig) -> None:
        """Start the process. Raises ToolUnavailable where the environment cannot be loaded."""
        super().__init__(lambda: launch(config, lists=False))

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        request = {
            "key": task.key,
            "versions": task.metadata["versions"],
            "base_url": environment["OPENAI_BASE_URL"],
            "api_key": environment["OPENAI_API_KEY"],
        }
        return self.begin(request, on_end)


# Environments of the package verifiers: ``environment.type = "verifiers"``.


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
