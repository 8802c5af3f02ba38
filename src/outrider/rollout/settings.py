"""Settings of rollouts: the budgets of one rollout, and evaluations."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from outrider.config import Settings


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
    """Most tokens of one retrieved step."""
    step_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one step of the environment, tool calls included."""


class EvaluationSettings(Settings):
    """Evaluation on the first ``num_tasks`` tasks of ``split``, with ``num_samples`` rollouts each at
    ``temperature`` (0: greedy; top-p, top-k and min-p cannot be set).

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
    panel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    num_trials: int = Field(0, ge=0)
    memory: Literal["tips", "reflexion"] = "tips"

    @model_validator(mode="after")
    def _validate(self) -> "EvaluationSettings":
        if self.num_trials and self.memory == "reflexion" and self.num_samples > 1:
            raise ValueError(
                "evaluation.memory = reflexion tries every task again on its own: num_samples must be 1"
            )
        return self
