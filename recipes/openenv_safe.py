"""The server of recipes/openenv-safe.toml: a safe with two dials, made with OpenEnv's own classes.

pip install openenv-core
python recipes/openenv_safe.py 8000
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

HIGHEST, NUM_DIALS, NUM_TURNS, NUM_SESSIONS = 4, 2, 4, 64


class Turn(Action):
    """The dial is turned to a number."""

    number: int = Field(ge=1, le=HIGHEST)


class Seen(Observation):
    """What is heard."""

    text: str


class Safe(Environment[Turn, Seen, State]):
    """Each dial has a number, and tells whether it is higher or lower. A dial that clicks pays its share."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._numbers: list[int] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        """Numbers of the seed."""
        draws = random.Random(seed)
        self._numbers = [draws.randint(1, HIGHEST) for _ in range(NUM_DIALS)]
        self._state = State(episode_id=episode_id)
        return Seen(
            text=f"A safe has {NUM_DIALS} dials with numbers from 1 to {HIGHEST}. "
            f"You have {NUM_TURNS} turns. Turn the first dial."
        )

    def step(self, action: Turn, timeout_s: float | None = None, **options: Any) -> Seen:
        """Turn the dial that is next."""
        self._state.step_count += 1
        is_last = self._state.step_count >= NUM_TURNS
        wanted = self._numbers[0]
        if action.number != wanted:
            way = "higher" if wanted > action.number else "lower"
            return Seen(text=f"Not {action.number}: {way}.", reward=0.0, done=is_last)
        self._numbers.pop(0)
        told = "Click! Turn the next dial." if self._numbers else "Click! The safe is open."
        return Seen(text=told, reward=1 / NUM_DIALS, done=is_last or not self._numbers)

    @property
    def state(self) -> State:
        """How many turns were taken."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """A version: other rules get another one."""
        return EnvironmentMetadata(name="safe", description="a safe with dials", version="1")


if __name__ == "__main__":
    app = create_fastapi_app(Safe, Turn, Seen, max_concurrent_envs=NUM_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws_max_size=1 << 20)
