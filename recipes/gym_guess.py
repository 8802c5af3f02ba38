"""The expert of recipes/gym-guess.toml."""

from collections.abc import Iterator
from typing import Any


def halve(game: Any) -> Iterator[str]:
    """Guess the number in the middle of what is left, and look at the number for the hint."""
    low, high = game.min_number, game.max_number
    while True:
        guess = (low + high) // 2
        yield f"\\boxed{{{guess}}}"
        if guess == game.game_number:
            return
        low, high = (guess + 1, high) if guess < game.game_number else (low, guess - 1)
