"""Which ScienceWorld episodes are played, by which rules, and on how many simulators."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings
from outrider.environments.scienceworld import tasks as scienceworld_tasks


class ScienceWorldConfig(EnvironmentSettings):
    """Which episodes are played, by which rules, and on how many simulators."""

    starts_quickly: ClassVar[bool] = False

    type: Literal["scienceworld"] = "scienceworld"
    task_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("find-animal",)
    """Names as in the simulator; the order fixes the order of the task list."""
    num_train_variations: Annotated[int, Field(ge=1)] | None = 5
    """First variations of the simulator's train split per task (fewer where it has fewer); None for all."""
    num_valid_variations: Annotated[int, Field(ge=1)] | None = 5
    num_test_variations: Annotated[int, Field(ge=1)] | None = 20
    max_moves: Annotated[int, Field(ge=1)] = 100
    """Simulator moves after which an episode is cut. ``wait`` costs more than one, an unreadable command
    none.
    """
    simplification: str = ""
    """Comma-separated names out of the simulator's list, or ``easy``."""
    show_valid_actions: bool = False
    """Append the list of understood commands to every observation (20-80 ms and thousands of characters per
    step).
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 200
    correct_actions: bool = False
    """Replace a command by the most similar valid one, as EMPO²'s released wrapper does; it can trigger a
    fatal focus.
    """
    clip_negative: bool = False
    """Count a negative score as 0 in reward and return; the raw score stays in the metrics."""
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Reward and return are score times this; 0.01 gives returns up to 1."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Java processes; more than one per core gains nothing."""
    heap: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "512m"
    deterministic: bool = True
    """Fix the order of objects, so that equal actions give equal episodes; the published simulator does
    not.
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    load_limit_s: Annotated[float, Field(gt=0)] = 120.0
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    borrow_limit_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _known(self) -> "ScienceWorldConfig":
        unknown = [name for name in self.task_names if name not in scienceworld_tasks.NUM_VARIATIONS]
        if unknown:
            raise ValueError(
                f"unknown ScienceWorld tasks {unknown}; known: {list(scienceworld_tasks.NUM_VARIATIONS)}"
            )
        if len(set(self.task_names)) < len(self.task_names):
            raise ValueError("task_names holds a name twice")
        parts = [part for part in self.simplification.split(",") if part]
        unknown = [part for part in parts if part not in scienceworld_tasks.SIMPLIFICATIONS]
        if unknown:
            raise ValueError(
                f"unknown simplifications {unknown}; known: {list(scienceworld_tasks.SIMPLIFICATIONS)}"
            )
        electrical = [name for name in self.task_names if scienceworld_tasks.is_electrical(name)]
        if "noElectricalAction" in parts and electrical:
            raise ValueError(f"noElectricalAction makes {electrical} impossible")
        return self

    @property
    def max_concurrent(self) -> int:
        """As many as there are simulators: an episode that waits for one would hold the batch."""
        return self.num_workers

    def replayed_differently(self) -> list[str]:
        """Tasks whose objects move by themselves."""
        return [
            name
            for name in self.task_names
            if not scienceworld_tasks.replays_exactly(name, deterministic=self.deterministic)
        ]
