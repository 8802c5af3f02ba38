"""Training. The package can be called: ``outrider.train(recipe, run=...)`` is :func:`outrider.api.train`.

Python puts a package of this name into ``outrider`` as soon as a module of it is imported, so a function
could not stay there.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """:func:`outrider.api.train`."""
        return import_module("outrider.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
