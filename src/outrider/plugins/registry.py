"""From a name to a class, its settings and what is built of it: one way for what is built in and for what is
not.

A plug-in is a class. ``Settings`` is its section of a recipe, and it is built by ``build(settings, context)``
where it has that class method, else by being called with its settings. The context is that of its kind (for
an algorithm :class:`outrider.algorithms.context.AlgorithmContext`).
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Literal, cast

from pydantic import create_model
from typing_extensions import TypedDict

from outrider.config import Settings
from outrider.errors import ConfigError, OutriderError
from outrider.plugins.imports import import_target, told_of
from outrider.plugins.names import Kind, is_import_path, target_of
from outrider.plugins.origin import Origin, origin_of

# What the settings of a kind must be, as a string: no kind is imported for the sake of another one.
_BASES: Final[Mapping[Kind, str]] = {
    "algorithms": "outrider.algorithms.base:ObjectiveSettings",
    "environments": "outrider.environments.base:EnvironmentSettings",
    "engines": "outrider.engines.base:EngineSettings",
    "tools": "outrider.config:Settings",
    "embedders": "outrider.config:Settings",
    "trackers": "outrider.config:Settings",
    "call_formats": "outrider.config:Settings",
}
# What makes a class of a function, for the kinds that take one.
_OF_FUNCTIONS: Final[Mapping[Kind, str]] = {"tools": "outrider.tools.functions:tool_class"}
_ARTICLE: Final = {"algorithms": "an algorithm", "environments": "an environment", "engines": "an engine"}
_NOUN: Final = _ARTICLE | {
    "tools": "a tool", "embedders": "an embedder", "trackers": "a tracker", "call_formats": "a call format",
}  # fmt: skip
# Methods without which an object is nothing of its kind; of a pair, either.
_METHODS: Final[Mapping[Kind, tuple[tuple[str, ...], ...]]] = {
    "algorithms": (("credit",),),
    "environments": (("tasks",), ("make",)),
    "engines": (("generate",),),
    "tools": (("run_text", "tools"),),
    "embedders": (("embed",),),
    "trackers": (("log",), ("close",)),
    "call_formats": (("read",), ("write",)),
}
_given: dict[tuple[Kind, str], object] = {}


def resolve(kind: Kind, name: str) -> type:
    """The class of a name. Raises ConfigError for one that cannot be imported, or that is no plug-in of this
    kind."""
    if (kind, name) in _given:
        return type(_given[kind, name])
    # Which file an import path stands for depends on the recipe's folder: what it names is looked at each
    # time.
    return _found(kind, name) if is_import_path(name) else _resolve(kind, name)


@cache
def _resolve(kind: Kind, name: str) -> type:
    return _found(kind, name)


def _found(kind: Kind, name: str) -> type:
    target = target_of(kind, name)
    found = import_target(target)
    label = name if name == target else f"{name} ({target})"
    if kind in _OF_FUNCTIONS and callable(found) and not isinstance(found, type):
        found = import_target(_OF_FUNCTIONS[kind])(found)
    if not isinstance(found, type):
        raise ConfigError(f"{label} is no class{' and no function' if kind in _OF_FUNCTIONS else ''}")
    _require_settings(kind, label, found)
    return found


def require_kind(kind: Kind, name: str) -> None:
    """Raises ConfigError for a class that lacks a method of its kind. What a class builds by ``build`` is
    looked at when it is built.
    """
    found = resolve(kind, name)
    if not hasattr(found, "build"):
        _require_methods(kind, f"{name} ({origin_of(found)})", found)


def _require_methods(kind: Kind, label: str, one: object) -> None:
    """Raises ConfigError for an object or a class that lacks a method of its kind."""
    for names in _METHODS[kind]:
        if not any(getattr(one, name, None) is not None for name in names):
            raise ConfigError(f"{label} is not {_NOUN[kind]}: it has no method {names[0]}")


def _require_settings(kind: Kind, label: str, cls: type) -> None:
    base, settings = base_of(kind), getattr(cls, "Settings", None)
    if settings is None and kind in _ARTICLE:
        raise ConfigError(
            f"{label} ({origin_of(cls)}) is not {_ARTICLE[kind]}: it has no class Settings "
            f"(a subclass of {base.__name__})",
        )
    if settings is not None and not (isinstance(settings, type) and issubclass(settings, base)):
        raise ConfigError(
            f"{label} ({origin_of(cls)}): its Settings are no subclass of {base.__module__}.{base.__name__}",
        )


def base_of(kind: Kind) -> type[Settings]:
    """Base class of the settings of a kind."""
    return cast(type[Settings], import_target(_BASES[kind]))


def settings_of(kind: Kind, name: str) -> type[Settings]:
    """The settings of a plug-in, whose ``type`` is the name that the recipe has."""
    own = getattr(resolve(kind, name), "Settings", None)
    if own is None and (kind, name) in _given:
        own = type(_settings_inside(_given[kind, name]))
    return _bound(kind, name, own if own is not None and issubclass(own, Settings) else base_of(kind))


def _settings_inside(one: object) -> Settings | None:
    """Those that an object was made with, where it keeps them under a usual name."""
    kept = (getattr(one, name, None) for name in ("settings", "config", "objective"))
    return next((found for found in kept if isinstance(found, Settings)), None)


@cache
def _bound(kind: Kind, name: str, own: type[Settings]) -> type[Settings]:
    field = own.model_fields.get("type")
    if field is not None and field.annotation in (str, Literal[name]):
        return own
    bound = create_model(
        own.__name__,
        __base__=own,
        __module__=own.__module__,
        type=(cast(Any, Literal[name]), name),
    )
    bound.__doc__ = own.__doc__
    # pickle looks a class up by its name, and there it would find the one without the type.
    cast(Any, bound).__reduce__ = lambda self: (read_settings, (kind, self.model_dump()))
    return bound


def section_type(name: str, settings: type[Settings]) -> Any:
    """A table with the settings below their name: so that an error's place holds the name, as with pydantic's
    own unions."""
    return cast(Any, TypedDict)("Section", {name: settings})


def read_settings(kind: Kind, tree: Mapping[str, Any]) -> Settings:
    """Settings of the plug-in that ``tree["type"]`` names."""
    return settings_of(kind, tree["type"]).model_validate(dict(tree))


def build(kind: Kind, settings: Settings, context: Any) -> Any:
    """The plug-in that ``settings.type`` names."""
    return build_named(kind, settings.type, settings, context)  # type: ignore[attr-defined]


def build_named(kind: Kind, name: str, settings: Settings | None, context: Any) -> Any:
    """The same for a kind whose plug-ins may be named without a section; ``settings`` None are the
    defaults."""
    if (kind, name) in _given:
        return _given[kind, name]
    cls = resolve(kind, name)
    if settings is None:
        settings = settings_of(kind, name)()
    if origin_of(cls).is_built_in:
        return _built(cls, settings, context)
    try:
        built = _built(cls, settings, context)
    except OutriderError:
        raise
    except Exception as error:  # of somebody else's code: one line that names it
        raise ConfigError(f"{name} cannot be built{told_of(error)}") from error
    _require_methods(kind, f"what {name} builds ({type(built).__name__})", built)
    return built


def _built(cls: type, settings: Settings, context: Any) -> Any:
    if hasattr(cls, "build"):
        return cls.build(settings, context)
    return cls(settings) if _takes_settings(cls) else cls()


def _takes_settings(cls: type) -> bool:
    if not hasattr(cls, "Settings"):
        return False
    return any(name != "self" for name in inspect.signature(cls.__init__).parameters)  # type: ignore[misc]


def origin(kind: Kind, name: str) -> Origin:
    """Where the class of a name comes from."""
    return origin_of(resolve(kind, name))


@contextmanager
def given(objects: Mapping[Kind, object]) -> Iterator[dict[Kind, dict[str, Any]]]:
    """Let objects stand in for what a recipe names; yields the section that stands for each in the settings.

    Its ``type`` is the import path of the object's class, so that a run can be resumed by name where the
    class can be imported.
    """
    sections: dict[Kind, dict[str, Any]] = {}
    keys = []
    for kind, one in objects.items():
        if isinstance(one, type):
            raise ConfigError(
                f"{one.__name__} is a class: give an object of it, or its import path "
                f"{one.__module__}:{one.__qualname__}"
            )
        _require_methods(kind, f"an object of {type(one).__name__}", one)
        name = f"{type(one).__module__}:{type(one).__qualname__}"
        own = _settings_inside(one)
        sections[kind] = {**({} if own is None else own.model_dump(exclude={"type"})), "type": name}
        _given[kind, name] = one
        keys.append((kind, name))
    try:
        yield sections
    finally:
        for key in keys:
            _given.pop(key, None)


def stand_ins() -> list[str]:
    """The kinds for which objects stand in at present."""
    return sorted({kind for kind, _ in _given})


def short_name(name: str) -> str:
    """The class's name of an import path, else the name: for labels."""
    return name.rpartition(":")[2] if is_import_path(name) else name
