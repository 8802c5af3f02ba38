"""The configuration of ``outrider eval --tasks``: what is played, by whom, and how it is scored."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.engines.endpoint import EndpointSettings
from outrider.environments.families import EnvironmentConfig
from outrider.environments.scienceworld import ScienceWorldConfig
from outrider.environments.tools import ToolsConfig
from outrider.evals.extraction import Scorer
from outrider.evals.judge import JudgeSettings
from outrider.rollout.episode import Limits
from outrider.train.settings import ModelSettings

ENVIRONMENTS: Final = ("factbook", "scienceworld", "webshop", "textworld", "house")
"""Environments with tasks of their own, by the names that ``tasks`` takes."""
_WITHOUT_TOOLS: Final = ("factbook",)  # its tasks are questions with answers, so they can be asked with the book closed


class PanelLimits(Limits):
    """The rollout loop's limits, with room for long answers and long games. A question without tools has one turn."""

    max_turns: int = Field(30, ge=1)
    max_turn_tokens: int = Field(1024, ge=1)
    max_response_tokens: int = Field(4096, ge=1)


class PanelSettings(Settings):
    """One evaluation on one panel, by a model here or one behind an endpoint."""

    tasks: str
    """A task set (``gsm8k``), one with a file of yours (``gsm8k=FILE``), a file of questions, or an environment."""
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
    """``default``: off for questions, on for environments."""
    num_samples: int = Field(1, ge=1)
    """k of pass@k and avg@k."""
    temperature: float = Field(0.0, ge=0)
    instruction: Literal["system", "user"] = "system"
    """Without tools: the message that tells how to answer; a chat template without system messages has it in
    the user's anyway."""
    rollout: PanelLimits = PanelLimits()
    rules: Literal["default", "arpo-train", "arpo-eval", "squad"] = "default"
    """Extraction and normalisation of answers (``evals.extraction``)."""
    metric: Scorer | None = None
    """What scores questions; None is the judge where one is given, else the task set's own."""
    judge: JudgeSettings | None = None
    batch_size: int = Field(32, ge=1)
    """Episodes that a model plays together: their results go to disk, and count, when all of them have ended. Of an endpoint,
    requests at a time."""
    max_retries: int = Field(2, ge=0)
    """Fresh tries of an episode after a fault of a tool or an environment."""
    max_faults_in_a_row: int = Field(8, ge=1)
    """Of the endpoint or of the judge, after which the evaluation stops: a dead server must not cost every sample's back-off."""
    num_threads: int = Field(2, ge=1)
    watchdog_s: float = Field(300.0, ge=0)
    """After so many seconds without progress a line says where the evaluation waits (0: never)."""
    seed: int = 0

    @property
    def num_concurrent(self) -> int:
        """Episodes at a time: never more than there are simulators."""
        if isinstance(self.environment, ScienceWorldConfig):
            return min(self.batch_size, self.environment.num_workers)
        return self.batch_size

    @property
    def is_played(self) -> bool:
        """Whether an environment's own record is the score, and not the graded answer to a question."""
        return self.tasks in ENVIRONMENTS and self.tools != "off"

    @model_validator(mode="before")
    @classmethod
    def _named_environment(cls, values: Any) -> Any:
        """``tasks = "webshop"`` is ``environment.type = "webshop"``, and ``tools = "on"`` is ``environment.type = "tools"``."""
        if not isinstance(values, dict):
            return values
        given = values.get("environment") or {}
        name = str(values.get("tasks")).lower()
        if name in ENVIRONMENTS:
            return {**values, "tasks": name, "environment": {"type": name, **given} if isinstance(given, dict) else given}
        if values.get("tools") == "on" and isinstance(given, dict):
            names = ["search", "python"] if "corpus" in given else ["python"]
            return {**values, "environment": {"type": "tools", "tools": names, **given}}
        if given and isinstance(given, dict) and "type" not in given:
            raise ValueError("questions have environment settings, such as a corpus, only with tools = on")
        return values

    @model_validator(mode="after")
    def _possible(self) -> "PanelSettings":
        if (self.model is None) == (self.endpoint is None):
            raise ValueError("give exactly one of a model and an endpoint")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("at temperature 0 all samples of a task are one: num_samples > 1 needs a temperature")
        if self.tasks in ENVIRONMENTS:
            if self.environment is not None and self.environment.type != self.tasks:
                raise ValueError(f"tasks = {self.tasks} and environment.type = {self.environment.type} contradict")
            if self.tools == "off" and self.tasks not in _WITHOUT_TOOLS:
                raise ValueError(f"{self.tasks} cannot be played without its environment (tools = off)")
        elif (self.tools == "on") != isinstance(self.environment, ToolsConfig):
            raise ValueError("questions have environment settings exactly with tools = on, and those of the tools")
        if self.is_played and (self.judge is not None or self.metric is not None):
            raise ValueError(f"{self.tasks} scores itself: metric and judge are for questions")
        if self.metric == "judge" and self.judge is None:
            raise ValueError("metric = judge needs a judge")
        if self.judge is not None and self.metric not in (None, "judge"):
            raise ValueError(f"metric = {self.metric} asks no judge")
        return self
