"""Environments of Gymnasium's form for the tests, as a user would write them."""

import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from gymnasium import Env, spaces


class Echo(Env):  # type: ignore[type-arg]
    """Text in, text out: the return is the number of turns that hold the seed's word."""

    WORDS = ("sun", "moon", "star")
    action_space = spaces.Text(max_length=200)
    observation_space = spaces.Text(max_length=200)

    def __init__(self, limit: int = 3, cuts: bool = False) -> None:
        self.limit, self.cuts = limit, cuts

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word, self.turns = self.WORDS[int(self.np_random.integers(3))], 0
        return f"Say {self.word}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        over = self.turns >= self.limit
        said = self.word in action
        info = {"is_success": said and over}
        return f"You said {action}.", float(said), over and not self.cuts, over and self.cuts, info


class Locked(Echo):
    """One that no deep copy can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Shared(Echo):
    """One whose copies share their state, so that a copy disturbs its original."""

    told: ClassVar[list[str]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        Shared.told.clear()
        return super().reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Shared.told.append(action)
        return f"{len(Shared.told)} things were said.", 0.0, False, False, {}


class Door(Echo):
    """One whose copies share a door that an action opens: a copy and its original see the same."""

    opened: ClassVar[list[bool]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        Door.opened.clear()
        return super().reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "5":
            Door.opened.append(True)
        return "It is open." if Door.opened else "It is shut.", 0.0, False, False, {}


class Deck(Echo):
    """Takes cards from the list that it was made with."""

    def __init__(self, cards: list[str]) -> None:
        super().__init__()
        self.cards = cards

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"You draw {self.cards.pop()}.", 0.0, not self.cards, False, {}


class Dice(Echo):
    """Draws from the global generators, as GEM's games do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        return f"{random.random()} {np.random.rand()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{random.random()} {np.random.rand()}", 0.0, False, False, {}


class Broken(Echo):
    """Raises, or gives a reward that is no number."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if "raise" in action:
            raise RuntimeError("the simulator is gone")
        return "?", float("nan"), False, False, {}


class Coin(spaces.Discrete):  # type: ignore[misc]
    """A user's own space."""


class Painter(Echo):
    """One with pictures in text, numbers to see, and a space of its own."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "ansi"]}
    action_space = Coin(2)  # type: ignore[assignment]
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)  # type: ignore[assignment]

    def __init__(self, size: int = 3, render_mode: str | None = None) -> None:
        super().__init__()
        self.size, self.render_mode = size, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"é": np.float32(0.1), np.int64(7): (1, 2)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([0.1, 0.2], np.float32), 0.0, False, False, {}

    def render(self) -> str:
        return f"{self.size} pots of paint"


class Seedless(Echo):
    def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return "", {}


class FourValues(Echo):
    def step(self, action: str) -> Any:  # as before Gymnasium
        return "", 0.0, True, {}


def paint(size: int = 3) -> Painter:
    return Painter(size)


def painted(size: int = 3) -> Painter:
    return Painter(size, render_mode="ansi")


def echo(**kwargs: Any) -> Echo:
    return Echo(**kwargs)


def says_the_word(world: Any) -> Iterator[str]:
    yield from [f"<action>{world.word}</action>"] * world.limit


def tries(world: Any) -> Iterator[str]:
    """Looks for its way in the environment itself, and has no end."""
    world.step("nothing")
    while True:
        yield f"<action>{world.word}</action>"


def says_nothing(world: Any) -> list[str]:
    return ["<action>nothing</action>"] * 3


def breaks(world: Any) -> list[str]:
    return [str(world.no_such)]
