"""The record of an episode of moves, whose return is the sum of what somebody else's environment gave."""

from dataclasses import dataclass
from typing import Any, Final

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.seeds import SeedSettings
from outrider.environments.values import as_bool, as_float
from outrider.types import Message

MAX_EXPERT_TURNS: Final = 10_000
"""An expert may give turns without an end, of which an episode takes those that it needs."""


@dataclass(slots=True, kw_only=True)
class MoveRecord:
    """Counts of one episode. ``name`` is the environment's, for messages."""

    name: str
    settings: SeedSettings
    episode_return: float = 0.0
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    success: bool | None = None
    """What the environment said last, where ``success_key`` asks for it."""
    done: bool = False

    def record_invalid(self, problem: str) -> StepResult:
        """A turn that held no action: nothing happened, and ``problem`` says why."""
        self.num_invalid += 1
        return StepResult(message=Message(role="user", content=problem), invalid=True)

    def record_move(
        self, text: str, reward: Any, *, terminated: Any, truncated: Any = False, success: Any
    ) -> StepResult:
        """A turn whose action was done. ``success`` is what the environment says under ``success_key``: None
        and a missing value are no success.

        Raises InvalidResult for a reward or flag that is none, NonFiniteResult for NaN and infinity.
        """
        step_reward = as_float(reward, f"{self.name} gave the reward {reward}: it")
        is_over, is_cut = (
            as_bool(flag, f"{self.name}: {name}")
            for name, flag in (("terminated", terminated), ("truncated", truncated))
        )
        key = self.settings.success_key
        if key is not None:
            success = success is not None and as_bool(success, f"{self.name}: {key}")
        self.num_moves += 1
        self.episode_return += step_reward
        self.success = success
        # GEM's games say both where the last turn won as well as where it was only the last one.
        limit = self.settings.max_moves
        is_truncated = not is_over and (is_cut or (limit is not None and self.num_moves >= limit))
        self.done = is_over or is_truncated
        return StepResult(
            message=Message(role="user", content=text or "Nothing is seen."),
            reward=step_reward,
            done=self.done,
            truncated=is_truncated,
        )

    def result(self) -> EpisodeResult:
        """The sum of rewards so far."""
        reached = self.episode_return >= self.settings.success_at
        return EpisodeResult(
            episode_return=self.episode_return,
            success=(reached if self.success is None else self.success) and self.num_moves > 0,
            metrics={
                "num_moves": float(self.num_moves),
                "num_turns": float(self.num_turns),
                "num_invalid": float(self.num_invalid),
            },
        )


def opening_message(settings: SeedSettings, instructions: str, text: str) -> Message:
    """The prompt of an episode: how to act, and what is seen first."""
    prompt = instructions if settings.prompt is None else settings.prompt
    return Message(role="user", content="\n\n".join(part for part in (prompt, text) if part))
