"""The trainer's end of the launcher: starts programs, hears how they ended, kills them."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from outrider.environments.agent.launched import OnEnd, RestartingProcess, WorkerProcess
from outrider.plugins.imports import search_folders
from outrider.types import Task

_START_S: Final = 120.0  # a cold disk and a large framework
_BOOT: Final = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[2])
from outrider.environments.agent.launcher import main
main(sys.argv[1])
os._exit(0)  # without waiting for threads that the agent has started
"""
# One thread: programs must not disturb the trainer's OpenMP team.
ONE_THREAD: Final = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_HIDDEN: Final = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


class Programs(RestartingProcess):
    """Starts programs by a launcher, and another launcher where one is gone. Called from several threads."""

    def __init__(self, *, function: str | None, command: Sequence[str], reward: str | None) -> None:
        """Start the launcher, which imports the agent. Raises ToolUnavailable where that fails."""
        settings_json = json.dumps({"function": function, "command": list(command), "reward": reward})
        super().__init__(lambda: _launch(settings_json))

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        """See :class:`~outrider.environments.agent.launched.ProgramRunner`."""
        return self.begin({"task": asdict(task), "environment": dict(environment)}, on_end)


def _launch(settings_json: str) -> WorkerProcess:
    path = [entry or os.getcwd() for entry in sys.path]
    path += [folder for folder in recipe_folders() if folder not in path]
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    return WorkerProcess(
        [sys.executable, "-c", _BOOT, settings_json, json.dumps(path)],
        environment | ONE_THREAD,
        description="the agent program",
        start_s=_START_S,
    )


def recipe_folders() -> list[str]:
    """Where a recipe's own modules may lie: beside it, and in the current folder."""
    return [str(folder) for folder in (*search_folders(), Path.cwd())]
