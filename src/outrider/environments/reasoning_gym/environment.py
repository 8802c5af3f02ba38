"""Generated tasks of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760)."""

import importlib.util
import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from outrider.config import Settings
from outrider.environments.base import SPLITS, Split, known_split, split_size
from outrider.environments.tool_qa.environment import (
    EpisodeConfig,
    ToolEnvironment,
    ToolName,
    ToolResources,
    load_tools,
    tool_tags,
    usages,
    validate_tools,
    waiting_s,
)
from outrider.environments.tool_qa.rewards import RewardConfig
from outrider.errors import ConfigError, DataError, ToolFault, ToolUnavailable
from outrider.tokens.call_formats import ProtocolName
from outrider.tools.base import SingleFlightCache
from outrider.tools.python.tool import SOURCE, PythonTool, PythonToolConfig
from outrider.types import Step, Task

# Item i of a data set with seed s has the seed s + i, so the splits begin far apart.
_SEEDS_PER_SPLIT: Final = 10_000_000
VERIFIER_SECONDS: Final = 5
"""Limit of processor time for a verdict; it does not depend on the load of the machine."""
_REFUSED: Final = {
    "codeio": "its items differ from process to process",
    "composite": "name the data sets themselves",
}
_GENERATOR_PROGRAM: Final = "outrider.environments.reasoning_gym.items"
_CACHE_SIZE: Final = 65_536
# The evaluated answer could print a score: only a line that begins with the secret mark counts. The first
# such line reports that the item was read; if the program ends after it, the answer is the cause.
_VERIFIER_PROGRAM: Final = """
import json, random, numpy, reasoning_gym
request = json.loads({request!r})
numbers = {{"seed": request["seed"], "size": request["size"]}}
dataset = reasoning_gym.create_dataset(request["dataset"], **numbers, **request["options"])
random.seed(request["seed"] + request["index"])
numpy.random.seed((request["seed"] + request["index"]) % 2**32)
entry = dataset[request["index"]]
answers = [] if entry["answer"] is None else [str(entry["answer"])]
if str(entry["question"]) != request["question"] or answers != request["answers"]:
    raise ValueError("its item here is not the task's")
print("\\n" + {mark!r}, flush=True)
try:
    score = float(dataset.score_answer(request["answer"], entry=entry))
except Exception:
    score = None
print("\\n" + {mark!r} + json.dumps(score))
"""


class Generator(Settings):
    """A data set of reasoning-gym by name, with the options of its own configuration."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the data set in reasoning-gym."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the data set's configuration."""


class ReasoningGymConfig(EpisodeConfig):
    """Tasks that reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760) generates and verifies."""

    is_closed_book: ClassVar[bool] = True
    has_verifier: ClassVar[bool] = True

    type: Literal["reasoning_gym"] = "reasoning_gym"
    datasets: tuple[
        Annotated[Generator, BeforeValidator(lambda name: {"name": name} if isinstance(name, str) else name)],
        ...,
    ] = Field((Generator(name="chain_sum"),), min_length=1)
    """Names of data sets, or tables such as ``{name = "countdown", options = {max_numbers = 4}}``. Their
    tasks alternate.
    """
    num_train: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Number of tasks of the split, all data sets together. No question occurs twice, within a split or in
    two.
    """
    num_valid: Annotated[int, Field(ge=0, le=1_000_000)] = 32
    num_test: Annotated[int, Field(ge=0, le=1_000_000)] = 64
    seed: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Seed of the tasks. If you increase the number of tasks, the first ones of ``train`` stay the same
    (except in ``acre``).
    """
    tools: tuple[ToolName, ...] = ()
    """Tools that may be called before the answer: ``["python"]``, or plug-ins. Without tools an episode is
    one turn.
    """
    protocol: ProtocolName = "tags"
    """How tools are called: by tags in one message, or natively (as with ``type = "tools"``)."""
    python: PythonToolConfig = PythonToolConfig()
    """Limits of the tool ``python``: time, memory, disk and output of a call
    (docs/tasks/tools_and_rewards.md).
    """
    reward: RewardConfig = RewardConfig(
        answer="verifier", format_penalty=0.0, require_think=False, require_boxed=False, multi_tool_bonus=0.0
    )
    system_prompt: str | None = None
    """System prompt; None explains the tags, an empty text means none."""
    unsafe_verifier: bool = False
    """Verify without a sandbox if the kernel does not support it. Some verifiers evaluate the answer as
    Python: the policy's text then runs with your permissions.
    """

    @model_validator(mode="after")
    def _validate_datasets(self) -> "ReasoningGymConfig":
        for dataset in self.datasets:
            if dataset.name in _REFUSED:
                raise ValueError(f"the data set {dataset.name} is not supported: {_REFUSED[dataset.name]}")
        validate_tools(self.tools, self.result_tag)
        if not self.tools and self.protocol != "tags":
            raise ValueError("a native protocol needs tools; without tools the answer is between tags")
        if self.reward.answer == "judge":
            raise ValueError("these tasks have a verifier of their own and no judge")
        return self

    @property
    def has_experts(self) -> bool:
        """The package's answers, which contain no thoughts."""
        return not self.reward.require_think

    @property
    def call_format(self) -> str | None:
        return None if self.protocol == "tags" else self.protocol

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools)

    def tool_names(self) -> tuple[str, ...]:
        return tool_tags(self.tools, self.result_tag)

    def waiting_s(self, num_concurrent: int) -> float:
        """Answers are verified one at a time."""
        return VERIFIER_SECONDS * num_concurrent + waiting_s(self.tools, self.python, num_concurrent)

    def first_seed(self, split: Split) -> int:
        """Seed of a split's first item."""
        return (self.seed * len(SPLITS) + SPLITS.index(split)) * _SEEDS_PER_SPLIT


def check_package() -> None:
    """Raises ToolUnavailable if reasoning-gym is missing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ToolUnavailable("reasoning-gym is not installed: pip install 'outrider[reasoning-gym]'")


def generate(config: ReasoningGymConfig) -> dict[str, tuple[Task, ...]]:
    """The tasks of all splits in their fixed order, made in a process of its own.

    Several data sets iterate over sets of strings, whose order differs from process to process. So the hash
    seed is fixed, as it is in the verifier's sandbox: every run has the same tasks, and the verifier has the
    same item.

    Raises ConfigError for an unknown data set or option, and DataError if a data set has too few different
    questions or raises.
    """
    request = {
        "datasets": [dataset.model_dump(mode="json") for dataset in config.datasets],
        "splits": {split: (split_size(config, split), config.first_seed(split)) for split in SPLITS},
    }
    return _run_generator(json.dumps(request))


@cache
def _run_generator(request: str) -> dict[str, tuple[Task, ...]]:
    paths = filter(None, (SOURCE, os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, "-P", "-X", "utf8", "-m", _GENERATOR_PROGRAM],
        input=request,
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise DataError(f"reasoning-gym: the items cannot be made: {last[:300]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "raised" in answer:
        raise (ConfigError if answer["raised"] == "ConfigError" else DataError)(answer["message"])
    package = f"reasoning-gym {version('reasoning-gym')}"
    return {
        split: tuple(
            Task(
                key=row["key"],
                question=row["question"],
                answers=tuple(row["answers"]),
                metadata={
                    **{name: row[name] for name in ("dataset", "options", "seed", "size", "index")},
                    "package": package,
                },
            )
            for row in rows
        )
        for split, rows in answer["rows"].items()
    }


class SandboxedVerifier:
    """Scores answers, each once, in the sandbox of the Python tool. Thread-safe.

    Some of reasoning-gym's verifiers evaluate the answer: a policy's text would run in the training process.
    """

    def __init__(self, *, allow_unsafe: bool = False) -> None:
        """Raises ToolUnavailable if the sandbox or the package is missing."""
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
        """Score in [0, 1]; None if the verifier raises or exceeds its limits. Raises ToolFault if it does not
        have the task's item.
        """
        return self._scores.get((task.key, answer), lambda: self._score(task, answer))

    def close(self) -> None:
        """Stop the sandbox; may be called twice."""
        self._python.close()

    def _score(self, task: Task, answer: str) -> float | None:
        mark = secrets.token_hex(16)
        item = {"question": task.question, "answers": list(task.answers)}
        request = json.dumps({**task.metadata, **item, "answer": answer})
        result = self._python.run(_VERIFIER_PROGRAM.format(request=request, mark=mark))
        lines = [line.removeprefix(mark) for line in result.output.splitlines() if line.startswith(mark)]
        if not lines:
            details = f"{result.status}, {result.output[-300:]}"
            raise ToolFault(f"the verifier of {task.metadata['dataset']} does not have the item: {details}")
        score = json.loads(lines[-1] or "null")
        return min(max(float(score), 0.0), 1.0) if score is not None and math.isfinite(score) else None


class ReasoningGymEnvironment(ToolEnvironment):
    """The generated tasks of a config."""

    Settings = ReasoningGymConfig
    name = "reasoning_gym"
    expert_needs_shared = False

    @classmethod
    def tasks(cls, settings: ReasoningGymConfig, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises ToolUnavailable without the package, and DataError if a data set has
        too few questions.
        """
        known = known_split(split, "reasoning_gym")
        check_package()
        return generate(settings)[known]

    @classmethod
    def open_shared(cls, settings: ReasoningGymConfig) -> ToolResources:
        """Start the tools and the verifier's sandbox. Raises ToolUnavailable or DataError."""
        check_package()
        verifier = SandboxedVerifier(allow_unsafe=settings.unsafe_verifier)
        try:
            tools = load_tools(settings.tools, settings)
        except BaseException:
            verifier.close()
            raise
        return ToolResources(
            tools=tools, settings=settings, system_prompt=system_prompt(settings), verifier=verifier
        )

    def expert(self) -> Sequence[Step] | None:
        """The package's own answer without reasoning, which teaches the format; None if there is no answer,
        or if the format requires thoughts.
        """
        if not self.task.answers or not self.settings.has_experts:
            return None
        answer = self.task.answers[0]
        box = "\\boxed{%s}" if self.settings.reward.require_boxed else "%s"
        is_native = self.settings.call_format is not None
        text = box % answer if is_native else f"<answer>{box % answer}</answer>"
        return (Step(text=text, observation="", is_terminal=True),)


def system_prompt(config: ReasoningGymConfig) -> str:
    """Instructions for the answer and for the tools."""
    if config.system_prompt is not None:
        return config.system_prompt
    box = r"\boxed{...}" if config.reward.require_boxed else "..."
    thinking = (
        "Think step by step between <think> and </think>" if config.reward.require_think else "Think first"
    )
    if config.call_format is not None:
        answer_form = f" as {box}" if config.reward.require_boxed else " alone"
        return (
            f"{thinking}. You have {config.max_calls} tool calls. Then write the final answer{answer_form}."
        )
    lines = [
        f"{thinking}, then give the final answer between tags: <answer>{box}</answer>.",
        *usages(config.tools),
    ]
    if config.tools:
        lines.append(
            f"What a tool returns appears between <{config.result_tag}> and </{config.result_tag}>; never "
            f"write that yourself. You have {config.max_calls} calls."
        )
    return "\n".join(lines)
