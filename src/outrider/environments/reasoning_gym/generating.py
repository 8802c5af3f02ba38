"""Reasoning-gym's items as tasks, made in a process of their own.

Several data sets go through sets of strings, whose order differs from process to process. There the hash
seed is fixed, as it is in the verifier's sandbox: every run has the same tasks, and an answer is held against
the item that was asked.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from outrider.environments.reasoning_gym.settings import SPLITS, ReasoningGymConfig
from outrider.errors import ConfigError, DataError
from outrider.types import Task

_PROGRAM: Final = "outrider.environments.reasoning_gym.items"
_SOURCE: Final = str(Path(__file__).resolve().parents[3])  # this tree, whatever else is installed


def generate(config: ReasoningGymConfig) -> dict[str, tuple[Task, ...]]:
    """All splits, in their fixed order. Raises ConfigError for a data set or an option that there is not,
    DataError where a data set has too few different questions, or raises.
    """
    sizes = (config.num_train, config.num_valid, config.num_test)
    rows = _make_rows(
        {
            "datasets": [dataset.model_dump(mode="json") for dataset in config.datasets],
            "splits": {
                split: (size, config.first_seed(split)) for split, size in zip(SPLITS, sizes, strict=True)
            },
        }
    )
    package = f"reasoning-gym {version('reasoning-gym')}"
    return {split: tuple(_task(row, package) for row in split_rows) for split, split_rows in rows.items()}


def _make_rows(request: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    searched = filter(None, (_SOURCE, os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(searched)}
    done = subprocess.run(
        [sys.executable, "-P", "-X", "utf8", "-m", _PROGRAM],
        input=json.dumps(request),
        capture_output=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise DataError(f"reasoning-gym: the items cannot be made: {last[:300]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "raised" in answer:
        raise (ConfigError if answer["raised"] == "ConfigError" else DataError)(answer["told"])
    rows: dict[str, list[dict[str, Any]]] = answer["rows"]
    return rows


def _task(row: dict[str, Any], package: str) -> Task:
    item = {name: row[name] for name in ("dataset", "options", "seed", "size", "index")}
    return Task(
        key=row["key"],
        question=row["question"],
        answers=tuple(row["answers"]),
        metadata=item | {"package": package},
    )
