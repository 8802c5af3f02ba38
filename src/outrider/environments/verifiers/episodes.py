"""The trainer's end of the process that plays episodes of verifiers, which is started again when it dies."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outrider.environments.agent.launched import OnEnd, RestartingProcess, WorkerProcess
from outrider.environments.agent.programs import ONE_THREAD, recipe_folders
from outrider.environments.verifiers.settings import VerifiersConfig
from outrider.errors import ToolUnavailable
from outrider.types import Task

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
        """See :class:`~outrider.environments.agent.launched.ProgramRunner`."""
        request = {
            "key": task.key,
            "versions": task.metadata["versions"],
            "base_url": environment["OPENAI_BASE_URL"],
            "api_key": environment["OPENAI_API_KEY"],
        }
        return self.begin(request, on_end)
