"""Training. The package can be called: ``outrider.train(recipe, run=...)`` is :func:`outrider.api.train`.

Python puts a package of this name into ``outrider`` as soon as a module of it is imported, so a function
could not stay there.
"""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :func:`outrider.api.train`."""
        return import_module("outrider.api").train(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of :func:`outrider.api.train`, for :func:`inspect.signature` and notebooks."""
        return inspect.signature(import_module("outrider.api").train)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Signature and documentation of :func:`outrider.api.train`, for :func:`help`."""
        train = import_module("outrider.api").train
        return f"Train LLM agents.\n\ntrain{inspect.signature(train)}\n\n{inspect.getdoc(train)}"


sys.modules[__name__].__class__ = _Callable
