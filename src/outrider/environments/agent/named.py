"""The functions that a recipe names, and how they are called."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

from outrider.errors import ConfigError
from outrider.plugins.imports import import_function

FunctionRole: TypeAlias = Literal["function", "reward", "expert"]
_ARGUMENTS: Final[Mapping[FunctionRole, tuple[str, ...]]] = {
    "function": ("task",),
    "reward": ("task", "result"),
    "expert": ("task", "messages"),
}


def load_function(key: FunctionRole, path: str) -> Callable[..., Any]:
    """The function at ``path``. Raises ConfigError unless it is there and can be called as ``key`` is."""
    function = import_function(path, *_ARGUMENTS[key])
    if key == "expert" and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{path} is a coroutine: an expert is called, and not awaited")
    return function
