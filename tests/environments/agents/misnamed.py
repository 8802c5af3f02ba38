"""Objects that a recipe may name by mistake."""

from typing import Any

TABLE = {"a": 1}


def nothing() -> float:
    return 1.0


def apart(*, task: Any) -> float:
    return 1.0


def yielding(task: Any) -> Any:
    yield 1.0


async def waiting(task: Any, messages: Any = ()) -> str:
    return "a"


class Agent:
    def __init__(self, task: Any = None) -> None: ...

    def __call__(self, task: Any, *rest: Any) -> float:
        return 1.0


agent = Agent()
