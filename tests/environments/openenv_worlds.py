"""A real OpenEnv server for the tests, made of OpenEnv's own classes:
``python -m tests.environments.openenv_worlds PORT [MARK]``. ``MARK`` is a file that the world's death leaves,
so that it dies once.
"""

import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

MARK = Path(sys.argv[2]) if len(sys.argv) > 2 else None
NUM_SESSIONS = 4
LIMIT = 3


class Say(Action):
    text: str = Field(max_length=60)


class Heard(Observation):
    text: str
    won: bool = False


class Echo(Environment[Say, Heard, State]):
    """The return is the number of turns that hold the seed's word."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    WORDS = ("sun", "moon", "star")

    def __init__(self) -> None:
        super().__init__()
        self.now = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Heard:
        self.word, self.now = random.Random(seed).choice(self.WORDS), State()
        return Heard(text=f"Say {self.word}{options.get('ending', '.')}")

    def step(self, action: Say, timeout_s: float | None = None, **options: Any) -> Heard:
        if action.text == "die" and not (MARK and MARK.exists()):
            if MARK is not None:
                MARK.touch()
            os._exit(3)
        if action.text == "hang":
            threading.Event().wait()
        if action.text == "raise":
            raise RuntimeError("the world is broken")
        self.now.step_count += 1
        over, said = self.now.step_count >= LIMIT, self.word in action.text
        return Heard(text=f"You said {action.text}.", reward=said, done=over, won=said and over)

    @property
    def state(self) -> State:
        return self.now

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="echo", description="says it again", version="2.1")


class Unseeded(Echo):
    """Takes no seed: every episode has a word of its own number."""

    number = 0

    def reset(self) -> Heard:  # type: ignore[override]
        Unseeded.number += 1
        heard = super().reset(seed=0)
        return heard.model_copy(update={"text": f"Episode {Unseeded.number}. {heard.text}"})


class Place(Action):
    row: int = Field(ge=0, le=2)
    column: int = Field(ge=0, le=2)
    note: str = ""


class Board(Observation):
    cells: list[list[int]]
    left: int


class Grid(Environment[Place, Board, State]):
    """Actions of several fields, and an observation that is no text."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[list[int]] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Board:
        self.cells = [[0] * 3 for _ in range(3)]
        self.cells[random.Random(seed).randrange(3)][1] = 1
        return self._board(None)

    def step(self, action: Place, timeout_s: float | None = None, **options: Any) -> Board:
        free = not self.cells[action.row][action.column]
        self.cells[action.row][action.column] = 1
        return self._board(0.25 if free else -0.5)

    def _board(self, reward: float | None) -> Board:
        left = sum(not cell for row in self.cells for cell in row)
        return Board(cells=[list(row) for row in self.cells], left=left, reward=reward, done=left == 0)

    @property
    def state(self) -> State:
        return State()


def app() -> Any:
    """The echo at the root, the others below it."""
    root = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=NUM_SESSIONS)
    others: dict[str, tuple[Callable[[], Any], type[Action], type[Observation], int]] = {
        "grid": (Grid, Place, Board, NUM_SESSIONS),
        "unseeded": (Unseeded, Say, Heard, NUM_SESSIONS),
        "single": (Echo, Say, Heard, 1),
    }
    for name, (world, action, observation, most) in others.items():
        root.mount(f"/{name}", create_fastapi_app(world, action, observation, max_concurrent_envs=most))
    return root


if __name__ == "__main__":
    uvicorn.run(app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
