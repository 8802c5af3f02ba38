"""Deprecated names of the plug-in interfaces. They work for one more version, with a warning."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import FrameType, ModuleType
from typing import Any, Final

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "outrider.algorithms.algorithm": ("outrider.algorithms.base",),
    "outrider.algorithms.context": ("outrider.algorithms.base",),
    "outrider.algorithms.common": (),
    "outrider.algorithms.common.advantages": ("outrider.algorithms.advantages",),
    "outrider.algorithms.common.batch_advantages": ("outrider.algorithms.advantages",),
    "outrider.algorithms.common.group_settings": ("outrider.algorithms.grpo",),
    "outrider.algorithms.common.on_policy": ("outrider.algorithms.grpo",),
    "outrider.algorithms.common.loss_settings": ("outrider.algorithms.loss_settings",),
    "outrider.algorithms.common.losses": ("outrider.algorithms.losses",),
    "outrider.algorithms.common.objectives": ("outrider.algorithms.losses",),
    "outrider.algorithms.common.token_loss": ("outrider.algorithms.losses",),
    "outrider.algorithms.common.ratios": ("outrider.algorithms.sampler_correction",),
    "outrider.memory.embedder": ("outrider.memory.embedders",),
    "outrider.environments.task_sets": ("outrider.environments.base",),
    "outrider.environments.tool_qa.episodes": ("outrider.environments.tool_qa.environment",),
    "outrider.environments.tool_qa.tag_protocol": ("outrider.environments.tool_qa.rewards",),
    "outrider.tokens.thoughts": ("outrider.tokens.tool_calls",),
    "outrider.tokens.tokenizer": ("outrider.tokens.template",),
    "outrider.tokens.calls": ("outrider.tokens.tool_calls", "outrider.tokens.call_formats"),
    "outrider.tokens.calls.format": ("outrider.tokens.tool_calls",),
    "outrider.tokens.calls.schemas": ("outrider.tokens.tool_calls",),
    "outrider.tokens.parsed": ("outrider.tokens.tool_calls",),
}
"""Old module names and the modules that define their names now."""
NAMES: Final[Mapping[str, str]] = {
    "GroupCredit": "GroupAdvantages",
    "write_credit": "write_advantages",
    "assign_advantages": "write_advantages",
    "TaskFamily": "TaskSet",
    "FoundCalls": "ParsedCalls",
    "LimitedForm": "CallFormat",
    "fault_of": "find_call_error",
    "flaw_of": "find_schema_flaw",
    "form_named": "get_call_format",
    "OwnConversations": "ExternalAgent",
    "Refusing": "ExternalAgent",
    "NativeTools": "Env",
    "CallCapped": "EnvironmentFactory",
    "RoundAware": "EnvironmentFactory",
    "Forgetful": "StatelessHook",
    "Portable": "Hook",
    "Reflector": "Hook",
    "Brancher": "Hook",
}
"""Old and new names, valid in every module above and in modules that call :func:`keep_old_names`."""


def keep_old_names(module: str) -> None:
    """Make the old names of ``module`` readable, with a warning. mypy still rejects them."""

    def find(name: str) -> Any:
        new_name = NAMES.get(name)
        if new_name is None or new_name not in vars(sys.modules[module]):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{module}.{new_name}")
        return vars(sys.modules[module])[new_name]

    sys.modules[module].__getattr__ = find  # type: ignore[method-assign]


def rename_methods(cls: type, **new_names: str) -> None:
    """Let a new class define and call methods by their old names as well; the keywords are old=new."""
    for old, new in new_names.items():
        # The first class that defines either name, because a mixin may still use the old one.
        owner = next((base for base in cls.__mro__ if old in vars(base) or new in vars(base)), None)
        if owner is None:
            continue
        if old in vars(owner) and new not in vars(owner):
            warn(f"{owner.__name__}.{old}", f"{owner.__name__}.{new}")
            setattr(cls, new, vars(owner)[old])
        elif new in vars(cls) and old not in vars(cls):
            setattr(
                cls, old, _warning_alias(vars(cls)[new], f"{cls.__name__}.{old}", f"{cls.__name__}.{new}")
            )


def _warning_alias(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    @wraps(method)
    def alias(*args: Any, **kwargs: Any) -> Any:
        warn(old, new)
        return method(*args, **kwargs)

    return alias


def warn_old_environment(cls: type) -> None:
    """Warn about an environment with the methods ``tasks`` and ``make`` of 0.3.0."""
    is_ours = cls.__module__.startswith("outrider.")
    if hasattr(cls, "make") and not hasattr(cls, "build") and not is_ours:
        warnings.warn(
            f"{cls.__module__}:{cls.__qualname__} is an environment in the old form (tasks, make, expert, "
            "close), which the next version does not support: derive one class from outrider.Environment "
            "(docs/plugins.md)",
            FutureWarning,
            stacklevel=2,
        )


def warn(old: str, new: str) -> None:
    """Warn that a name changed, at the line of the caller that is neither of this package nor of the import
    system. The number of frames between them depends on the form of the import, so a fixed ``stacklevel``
    would miss that line.
    """
    frame = sys._getframe(1)
    while _is_internal(frame) and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is now {new}; the next version removes the old name",
        FutureWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_internal(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("outrider", "importlib", "_frozen_importlib", "abc")


class _MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return spec_from_loader(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__

        def find(name: str) -> Any:
            new_name = NAMES.get(name, name)
            for target in MODULES[old]:
                if not name.startswith("__") and hasattr(import_module(target), new_name):
                    warn(f"{old}.{name}", f"{target}.{new_name}")
                    return getattr(import_module(target), new_name)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Make old modules importable. The package calls this once."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
