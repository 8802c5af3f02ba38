"""The configuration of ``outrider eval --tasks``: what is played, by whom, and how it is scored."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.atomic_io import replace_file
from outrider.config import Settings, to_toml
from outrider.engines.chat.engine import EndpointSettings
from outrider.environments.families import EnvironmentConfig, is_inline
from outrider.environments.tool_qa.judge import JudgeSettings
from outrider.evals.benchmark.extraction import Scorer
from outrider.evals.benchmark.store import SETTINGS
from outrider.evals.benchmark.task_sets import BENCHMARKS
from outrider.evals.benchmark.trained import with_run_settings
from outrider.plugins.names import is_import_path, is_known, known_names
from outrider.plugins.record import write_origins
from outrider.rollout.limits import Limits
from outrider.train.settings import ModelSettings

_QUESTIONS: Final = "tools"  # the environment of questions that come from elsewhere


def environment_names() -> list[str]:
    """Environments with tasks of their own, by the names that ``tasks`` takes; an import path is one, too."""
    return [name for name in known_names("environments") if name != _QUESTIONS]


def is_environment(tasks: str) -> bool:
    """Whether ``tasks`` names an environment; installed packages are asked only where a task set does not
    have the name.
    """
    if tasks in BENCHMARKS or tasks == _QUESTIONS:
        return False
    return is_known("environments", tasks)


class EvalTasksLimits(Limits):
    """The rollout loop's limits, with room for long answers and long games. A question without tools has one
    turn.
    """

    max_turns: int = Field(30, ge=1)
    max_turn_tokens: int = Field(1024, ge=1)
    max_response_tokens: int = Field(4096, ge=1)


class EvalTasksSettings(Settings):
    """One evaluation on one panel, by a model here or one behind an endpoint."""

    tasks: str
    """A task set (``gsm8k``), one with a file of yours (``gsm8k=FILE``), a file of questions, or an
    environment.
    """
    limit: int | None = Field(None, ge=1)
    """Only the first tasks."""
    panel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The panel's hash: other tasks, such as those of a data set that changed on the hub, are refused."""
    split: str = "test"
    """Of an environment; task sets have one."""
    model: ModelSettings | None = None
    """``name`` may also be a run directory (its newest checkpoint) or a checkpoint in one."""
    endpoint: EndpointSettings | None = None
    environment: EnvironmentConfig | None = None
    """The environment's settings, or with ``tools = "on"`` those of the tools (``environment.corpus``)."""
    tools: Literal["default", "on", "off"] = "default"
    """``default``: off for questions, on for environments. ``on`` takes tools, prompt and limits of a model
    that is a run from that run, but for what is set here.
    """
    num_samples: int = Field(1, ge=1)
    """k of pass@k and avg@k."""
    temperature: float = Field(0.0, ge=0)
    instruction: Literal["system", "user"] = "system"
    """Without tools: the message that tells how to answer; a chat template without system messages has it in
    the user's anyway."""
    rollout: EvalTasksLimits = EvalTasksLimits()
    rules: Literal["default", "arpo-train", "arpo-eval", "squad"] = "default"
    """Extraction and normalisation of answers (``evals.extraction``)."""
    metric: Scorer | None = None
    """Scorer of questions; None is the judge where one is given, else the task set's own."""
    judge: JudgeSettings | None = None
    batch_size: int = Field(32, ge=1)
    """Episodes that a model plays together: their results go to disk, and count, when all of them have ended.
    Of an endpoint, requests at a time.
    """
    max_retries: int = Field(2, ge=0)
    """Fresh tries of an episode after a fault of a tool or an environment."""
    max_faults_in_a_row: int = Field(8, ge=1)
    """Of the endpoint or of the judge, after which the evaluation stops: a dead server must not cost every
    sample's back-off.
    """
    num_threads: int = Field(2, ge=1)
    watchdog_s: float = Field(300.0, ge=0)
    """After so many seconds without progress a line says where the evaluation waits (0: never)."""
    seed: int = 0

    @property
    def num_concurrent(self) -> int:
        """Episodes at a time: never more than there are simulators."""
        room = None if self.environment is None else self.environment.max_concurrent
        return self.batch_size if room is None else min(self.batch_size, room)

    @property
    def is_played(self) -> bool:
        """Whether an environment's own record is the score, and not the graded answer to a question."""
        return is_environment(self.tasks) and self.tools != "off"

    @model_validator(mode="before")
    @classmethod
    def _expand_environment(cls, values: Any) -> Any:
        """``tasks = "webshop"`` is ``environment.type = "webshop"``, and ``tools = "on"`` is
        ``environment.type = "tools"``, with the settings of the run if the model is one.
        """
        if not isinstance(values, dict):
            return values
        environment = values.get("environment") or {}
        name = str(values.get("tasks"))
        name = name if is_import_path(name) else name.lower()
        if is_environment(name):
            return {
                **values,
                "tasks": name,
                "environment": {"type": name, **environment}
                if isinstance(environment, dict)
                else environment,
            }
        if values.get("tools") == "on" and isinstance(environment, dict):
            values = with_run_settings(values)
            environment = values.get("environment") or {}
            names = ["search", "python"] if "corpus" in environment else ["python"]
            return {**values, "environment": {"type": "tools", "tools": names, **environment}}
        if environment and isinstance(environment, dict) and "type" not in environment:
            raise ValueError("questions have environment settings, such as a corpus, only with tools = on")
        return values

    @model_validator(mode="after")
    def _validate(self) -> "EvalTasksSettings":
        if (self.model is None) == (self.endpoint is None):
            raise ValueError("give exactly one of a model and an endpoint")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                "at temperature 0 all samples of a task are one: num_samples > 1 needs a temperature"
            )
        if is_environment(self.tasks):
            if self.environment is not None and self.environment.type != self.tasks:
                raise ValueError(
                    f"tasks = {self.tasks} and environment.type = {self.environment.type} contradict"
                )
            if self.tools == "off" and self.environment is not None and not self.environment.is_closed_book:
                raise ValueError(f"{self.tasks} cannot be played without its environment (tools = off)")
        elif (self.tools == "on") != (self.environment is not None and self.environment.type == _QUESTIONS):
            raise ValueError(
                "questions have environment settings exactly with tools = on, and those of the tools"
            )
        strips = self.model is not None and self.model.history_thinking == "strip"
        if strips and self.tools != "off" and self.environment is not None and is_inline(self.environment):
            raise ValueError(
                "model.history_thinking = strip needs turns that are messages of their own: "
                "these episodes are one message (environment.protocol)"
            )
        if self.is_played and (self.judge is not None or self.metric is not None):
            raise ValueError(f"{self.tasks} scores itself: metric and judge are for questions")
        if self.metric == "judge" and self.judge is None:
            raise ValueError("metric = judge needs a judge")
        if self.judge is not None and self.metric not in (None, "judge"):
            raise ValueError(f"metric = {self.metric} asks no judge")
        return self


def write_settings(settings: EvalTasksSettings, folder: Path) -> None:
    """Write :data:`~outrider.evals.benchmark.store.SETTINGS`, with which replies are graded again. Raises
    OSError.
    """
    write_origins(settings, folder)
    # a judge may be named later
    values = {key: value for key, value in settings.model_dump(mode="json").items() if value is not None}
    replace_file(folder / SETTINGS, (to_toml(_without_secrets(values)) + "\n").encode())


def _without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """Addresses without a user, a password and a query."""
    return {
        key: _strip_credentials(key, _without_secrets(value) if isinstance(value, dict) else value)
        for key, value in tree.items()
    }


def _strip_credentials(key: str, value: Any) -> Any:
    if key != "base_url" or not isinstance(value, str):
        return value
    parts = urlsplit(value)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
