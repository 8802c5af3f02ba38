"""Settings of rollouts: the budgets of one rollout, and evaluations."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from outrider.config import Settings


class Limits(Settings):
    """Budgets of one rollout; none is ever exceeded. Observations and retrieved steps count as response
    tokens too.

    A longer observation or retrieved step loses its middle. What still leaves the policy no room for a token
    is not appended: the rollout ends there as truncated after an observation. A splice must leave room for a
    whole turn, or the rollout goes on without it.
    """

    max_turns: int = Field(8, ge=1)
    max_turn_tokens: int = Field(256, ge=1)
    max_response_tokens: int = Field(2048, ge=1)
    max_observation_tokens: int = Field(1024, ge=1)
    max_splice_tokens: int = Field(512, ge=1)
    step_timeout_s: float = Field(60.0, gt=0)


class EvaluationSettings(Settings):
    """``num_tasks`` first tasks of ``split``, ``num_samples`` rollouts each at ``temperature`` (0: greedy).

    It is played before training (``at_start``), after the cold start, after ``every`` training steps (0:
    never) and at the end. ``panel`` is the SHA-256 of these tasks: a run on other ones is refused (None: any;
    ``evaluations.jsonl`` has it). ``num_trials`` of ``outrider eval --adapt`` with ``memory`` (0: an
    evaluation without any).
    """

    split: str = "test"
    num_tasks: int = Field(200, ge=1)
    num_samples: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
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
