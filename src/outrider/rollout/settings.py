"""Settings of rollouts: the budgets of one rollout, and evaluations."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.engines.base import sampling_truncation


class Limits(Settings):
    """Budgets of one rollout, which are never exceeded. Observations and retrieved steps count as response
    tokens.

    Observations and retrieved steps over their limit lose their middle. If an observation leaves the policy
    no room for a token, it is not appended and the rollout ends as truncated. A splice that leaves no room
    for a whole turn is dropped, and the rollout continues without it.

    There are no settings of sampling: training draws from the policy's own distribution (temperature 1,
    without top-p, top-k and min-p), whose log-probs the update needs. ``evaluation.temperature`` is that of
    evaluations.
    """

    max_turns: int = Field(8, ge=1)
    """Most turns of the policy in a rollout."""
    max_turn_tokens: int = Field(256, ge=1)
    """Most tokens of one turn."""
    max_response_tokens: int = Field(2048, ge=1)
    """Most tokens of a rollout after the prompt, observations and retrieved steps included."""
    max_observation_tokens: int = Field(1024, ge=1)
    """Most tokens of one observation."""
    max_splice_tokens: int = Field(512, ge=1)
    """Most tokens of one retrieved step. A longer one is cut; as a turn in mode execute, it is left out."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one step of the environment, tool calls included."""

    def at_step(self, step: int) -> "Limits":
        """The limits of the training step ``step``, counted from 0."""
        return self


class RolloutSettings(Limits):
    """Budgets of one rollout in training. ``max_turns`` may be a list of growing limits: each applies to
    ``steps_per_limit`` training steps, the last one to all later steps and to evaluations (ScalingInter-RL,
    arXiv 2509.08755).
    """

    max_turns: int = Field(8, ge=1)
    """Most turns of the policy in a rollout: a number, or growing numbers with ``steps_per_limit``."""
    earlier_max_turns: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The limits before the last one; set ``max_turns`` to a list instead."""
    steps_per_limit: int | None = Field(None, ge=1)
    """Training steps of each limit, if ``max_turns`` is a list."""

    @model_validator(mode="before")
    @classmethod
    def _split_list(cls, data: Any) -> Any:
        """A list is stored as its last limit, which most readers need, and the earlier ones."""
        if not isinstance(data, Mapping) or not isinstance(data.get("max_turns"), list | tuple):
            return data
        limits = list(data["max_turns"])
        if len(limits) < 2 or any(type(limit) is not int for limit in limits) or "earlier_max_turns" in data:
            raise ValueError("max_turns is a number, or a list of at least two growing numbers")
        return {**data, "max_turns": limits[-1], "earlier_max_turns": limits[:-1]}

    @model_validator(mode="after")
    def _growing(self) -> Self:
        limits = [*self.earlier_max_turns, self.max_turns]
        if any(after <= before for before, after in pairwise(limits)):
            raise ValueError(f"max_turns = {limits}: the limits have to grow")
        if bool(self.earlier_max_turns) != (self.steps_per_limit is not None):
            raise ValueError("steps_per_limit belongs to a list of max_turns and to nothing else")
        if self.earlier_max_turns and self.max_turns > self.max_response_tokens:
            raise ValueError(
                f"max_turns = {limits}: {self.max_turns} turns need more than the {self.max_response_tokens} "
                "tokens of rollout.max_response_tokens"
            )
        return self

    def at_step(self, step: int) -> Limits:
        """The limits of the training step ``step``, counted from 0."""
        if self.steps_per_limit is None:
            return self
        stage = step // self.steps_per_limit
        limits = (*self.earlier_max_turns, self.max_turns)
        return self.model_copy(update={"max_turns": limits[min(stage, len(limits) - 1)]})


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class EvaluationSet(Settings):
    """One evaluation set: the first ``num_tasks`` tasks of ``split``, or of ``task_list`` in the order of the
    file. ``sha256`` is the hash of these tasks, as recorded in ``evaluations.jsonl``; a run with other tasks
    is an error (None: no check).
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"task_list"})

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]*$", max_length=40)
    """Name of the set in results, metrics (``eval/score/NAME``) and messages."""
    split: str = "test"
    """Split of the tasks."""
    num_tasks: int = Field(200, ge=1)
    """Number of tasks: the first ones of the split or of the list."""
    task_list: Path | None = None
    """File of task keys, one per line: the tasks of this set, all from ``split``, in the order of the file
    (None: the order of the split)."""
    sha256: Sha256 | None = None
    """Expected hash of the tasks."""


_ONE_SET: Final = ("split", "num_tasks", "panel")  # settings of a run with one evaluation set


class EvaluationSettings(Settings):
    """Evaluation on the first ``num_tasks`` tasks of ``split``, with ``num_samples`` rollouts each at
    ``temperature`` (0: greedy).

    An evaluation runs before training (``at_start``), after the cold start, after ``every`` training steps
    (0: never) and at the end. ``panel`` is the SHA-256 of these tasks, as recorded in ``evaluations.jsonl``;
    a run with other tasks is an error (None: no check). ``num_trials`` is the number of trials of
    ``outrider eval --adapt`` with ``memory`` (0: an evaluation without memory).
    """

    split: str = "test"
    """Split of the tasks."""
    num_tasks: int = Field(200, ge=1)
    """Number of tasks: the first ones of the split."""
    num_samples: int = Field(1, ge=1)
    """Number of rollouts per task."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of evaluations (0: greedy)."""
    every: int = Field(0, ge=0)
    at_start: bool = True
    panel: Sha256 | None = None
    panels: tuple[EvaluationSet, ...] = ()
    """Several evaluation sets, each evaluated at the same points, in place of ``split``, ``num_tasks`` and
    ``panel``. The first one is the main set, which commands and curves with one score use."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities at ``temperature`` add up to this share (None: all
    tokens). Training never truncates."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this number of likeliest tokens (None: from all tokens). Training never truncates."""
    num_trials: int = Field(0, ge=0)
    memory: Literal["tips", "reflexion"] = "tips"

    @model_validator(mode="after")
    def _validate(self) -> "EvaluationSettings":
        names = [entry.name for entry in self.panels]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError("evaluation.panels: every set needs a name of its own")
        if names and (
            given := [key for key in _ONE_SET if getattr(self, key) != type(self).model_fields[key].default]
        ):
            raise ValueError(
                "evaluation.panels has the split, num_tasks and sha256 of every set: remove "
                f"evaluation.{given[0]}"
            )
        if len(names) > 1 and self.num_trials:
            raise ValueError(
                "evaluation.num_trials (--adapt) plays one evaluation set: name it (--set; sets= in Python), "
                "or leave one in evaluation.panels"
            )
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ValueError("evaluation.temperature = 0 is greedy: remove evaluation.top_p and top_k")
        if self.num_trials and self.memory == "reflexion" and self.num_samples > 1:
            raise ValueError(
                "evaluation.memory = reflexion tries every task again on its own: num_samples must be 1"
            )
        return self

    @property
    def sets(self) -> tuple[EvaluationSet, ...]:
        """The evaluation sets, the main one first. The name of the only set of ``split`` is empty."""
        only = EvaluationSet(name="", split=self.split, num_tasks=self.num_tasks, sha256=self.panel)
        return self.panels or (only,)

    @property
    def truncation(self) -> dict[str, Any]:
        """``top_p`` and ``top_k``, as far as they are set."""
        return sampling_truncation(self)
