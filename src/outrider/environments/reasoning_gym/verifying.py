"""Verdicts of reasoning-gym's verifiers, from within the sandbox of the Python tool.

Several of them give an answer to ``eval``, or to a parser that does: a policy's text would run in the process
that trains.
"""

import json
import math
import secrets
from typing import Final

from outrider.environments.reasoning_gym.settings import VERIFIER_SECONDS
from outrider.errors import ToolFault
from outrider.tools.once import SingleFlightCache
from outrider.tools.python import PythonTool, PythonToolConfig
from outrider.types import Task

_CACHE_SIZE: Final = 65_536
# What is evaluated could print a score: only a line that begins with the call's own mark counts. The first
# one says that the item is there: whatever ends the program from then on is the answer's doing.
_PROGRAM: Final = """
import json, random, numpy, reasoning_gym
asked = json.loads({asked!r})
numbers = {{"seed": asked["seed"], "size": asked["size"]}}
dataset = reasoning_gym.create_dataset(asked["dataset"], **numbers, **asked["options"])
random.seed(asked["seed"] + asked["index"])
numpy.random.seed((asked["seed"] + asked["index"]) % 2**32)
entry = dataset[asked["index"]]
answers = [] if entry["answer"] is None else [str(entry["answer"])]
if str(entry["question"]) != asked["question"] or answers != asked["answers"]:
    raise ValueError("its item here is not the task's")
print("\\n" + {mark!r}, flush=True)
try:
    score = float(dataset.score_answer(asked["answer"], entry=entry))
except Exception:
    score = None
print("\\n" + {mark!r} + json.dumps(score))
"""


class SandboxedVerifier:
    """Scores answers, each once; safe to call from several threads."""

    def __init__(self, *, allow_unsafe: bool = False) -> None:
        """Raises ToolUnavailable where the sandbox or the package is missing."""
        limits = PythonToolConfig(
            wall_seconds=120.0,
            cpu_seconds=VERIFIER_SECONDS,
            memory_bytes=1 << 30,
            packages=("reasoning_gym",),
            allow_unsafe=allow_unsafe,
        )
        self._python = PythonTool(limits)
        self._scores: SingleFlightCache[float | None] = SingleFlightCache(_CACHE_SIZE)

    def __call__(self, task: Task, answer: str) -> float | None:
        """Score in [0, 1]; None where the verifier raised, or did not end within its limits. Raises ToolFault
        where it does not have the task's item.
        """
        return self._scores.get((task.key, answer), lambda: self._score(task, answer))

    def close(self) -> None:
        """Stop the sandbox; may be called twice."""
        self._python.close()

    def _score(self, task: Task, answer: str) -> float | None:
        mark = secrets.token_hex(16)
        item = {"question": task.question, "answers": list(task.answers)}
        request = json.dumps({**task.metadata, **item, "answer": answer})
        result = self._python.run(_PROGRAM.format(asked=request, mark=mark))
        lines = [line.removeprefix(mark) for line in result.output.splitlines() if line.startswith(mark)]
        if not lines:
            details = f"{result.status}, {result.output[-300:]}"
            raise ToolFault(f"the verifier of {task.metadata['dataset']} does not have the item: {details}")
        score = json.loads(lines[-1] or "null")
        return min(max(float(score), 0.0), 1.0) if score is not None and math.isfinite(score) else None
