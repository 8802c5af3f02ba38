"""The expert of recipes/openenv-safe.toml."""

from collections.abc import Generator


def halve(prompt: str) -> Generator[str, str, None]:
    """Turn the dial to the number in the middle of what is left, and hear where to go on."""
    low, high = 1, 4
    while True:
        number = (low + high) // 2
        told = yield f"<action>{number}</action>"
        if "Click" in told:
            low, high = 1, 4
        elif "higher" in told:
            low = number + 1
        else:
            high = number - 1
