"""Outrider trains LLM agents to explore: ``outrider.train``, ``outrider.evaluate``, ``outrider.load_run``,
imported when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider import deprecated

if TYPE_CHECKING:
    from outrider.api import evaluate, evaluate_tasks, load_run, train

__version__ = "0.3.0"
__all__ = ["__version__", "evaluate", "evaluate_tasks", "load_run", "train"]


deprecated.install()


def __getattr__(name: str) -> Any:
    """Import the API at its first use."""
    if name in __all__:
        return getattr(import_module("outrider.api"), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
