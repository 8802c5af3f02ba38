"""The mode of a rollout: one word a method, joined by "+" where several methods act in one rollout."""

from typing import Final

ON_POLICY: Final = "on_policy"
HYBRID: Final = "hybrid"  # may retrieve steps (RAPO)


def join_modes(*parts: str) -> str:
    """One mode that says what every method does."""
    return "+".join(parts)


def has_part(mode: str, part: str) -> bool:
    """Whether one of the methods has a rollout of this mode do ``part``."""
    return part in mode.split("+")
