"""The budgets of one rollout."""

from pydantic import Field

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
