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
from outrider.plugins.imports import describe_exception, import_target
from outrider.plugins.names import Kind, is_import_path, resolve_target
from outrider.plugins.origin import Origin, find_origin

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
_FUNCTION_WRAPPERS: Final[Mapping[Kind, str]] = {"tools": "outrider.tools.functions:tool_class"}
_ARTICLE: Final = {"algorithms": "an algorithm", "environments": "an environment", "engines": "an engine"}
_NOUN: Final = _ARTICLE | {
    "tools": "a tool", "embedders": "an embedder", "trackers": "a tracker", "call_formats": "a call format",
}  # fmt: skip
# Methods without which an object is nothing of its kind; of a pair, either.
_METHODS: Final[Mapping[Kind, tuple[tuple[str, ...], ...]]] = {
    "algorithms": (("assign_advantages",),),
    "environments": (("tasks",), ("make",)),
    "engines": (("generate",),),
    "tools": (("run_text", "tools"),),
    "embedders": (("embed",),),
    "trackers": (("log",), ("close",)),
    "call_formats": (("read",), ("write",)),
}
_substitutes: dict[tuple[Kind, str], object] = {}


def resolve(kind: Kind, name: str) -> type:
    """The class of a name. Raises ConfigError for one that cannot be imported, or that is no plug-in of this
    kind."""
    if (kind, name) in _substitutes:
        return type(_substitutes[kind, name])
    # Which file an import path stands for depends on the recipe's folder: what it names is looked at each
    # time.
    return _load_class(kind, name) if is_import_path(name) else _resolve(kind, name)


@cache
def _resolve(kind: Kind, name: str) -> type:
    return _load_class(kind, name)


def _load_class(kind: Kind, name: str) -> type:
    target = resolve_target(kind, name)
    loaded = import_target(target)
    label = name if name == target else f"{name} ({target})"
    if kind in _FUNCTION_WRAPPERS and callable(loaded) and not isinstance(loaded, type):
        loaded = import_target(_FUNCTION_WRAPPERS[kind])(loaded)
    if not isinstance(loaded, type):
        raise ConfigError(f"{label} is no class{' and no function' if kind in _FUNCTION_WRAPPERS else ''}")
    _require_settings(kind, label, loaded)
    return loaded


def require_kind(kind: Kind, name: str) -> None:
    """Raises ConfigError for a class that lacks a method of its kind. What a class builds by ``build`` is
    looked at when it is built.
    """
    cls = resolve(kind, name)
    if not hasattr(cls, "build"):
        _require_methods(kind, f"{name} ({find_origin(cls)})", cls)


def _require_methods(kind: Kind, label: str, plugin: object) -> None:
    """Raises ConfigError for an object or a class that lacks a method of its kind."""
    for names in _METHODS[kind]:
        if not any(getattr(plugin, name, None) is not None for name in names):
            raise ConfigError(f"{label} is not {_NOUN[kind]}: it has no method {names[0]}")


def _require_settings(kind: Kind, label: str, cls: type) -> None:
    base, settings = settings_base(kind), getattr(cls, "Settings", None)
    if settings is None and kind in _ARTICLE:
        raise ConfigError(
            f"{label} ({find_origin(cls)}) is not {_ARTICLE[kind]}: it has no class Settings "
            f"(a subclass of {base.__name__})",
        )
    if settings is not None and not (isinstance(settings, type) and issubclass(settings, base)):
        raise ConfigError(
            f"{label} ({find_origin(cls)}): its Settings are no subclass of {base.__module__}.{base.__name__}",
        )


def settings_base(kind: Kind) -> type[Settings]:
    """Base class of the settings of a kind."""
    return cast(type[Settings], import_target(_BASES[kind]))


def load_settings_class(kind: Kind, name: str) -> type[Settings]:
    """The settings of a plug-in, whose ``type`` is the name that the recipe has."""
    own = getattr(resolve(kind, name), "Settings", None)
    if own is None and (kind, name) in _substitutes:
        own = type(_settings_inside(_substitutes[kind, name]))
    return _bound(kind, name, own if own is not None and issubclass(own, Settings) else settings_base(kind))


def _settings_inside(plugin: object) -> Settings | None:
    """Those that an object was made with, where it keeps them under a usual name."""
    candidates = (getattr(plugin, name, None) for name in ("settings", "config", "objective"))
    return next((candidate for candidate in candidates if isinstance(candidate, Settings)), None)


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
    return load_settings_class(kind, tree["type"]).model_validate(dict(tree))


def build(kind: Kind, settings: Settings, context: Any) -> Any:
    """The plug-in that ``settings.type`` names."""
    return build_by_name(kind, settings.type, settings, context)  # type: ignore[attr-defined]


def build_by_name(kind: Kind, name: str, settings: Settings | None, context: Any) -> Any:
    """The same for a kind whose plug-ins may be named without a section; ``settings`` None are the
    defaults."""
    if (kind, name) in _substitutes:
        return _substitutes[kind, name]
    cls = resolve(kind, name)
    if settings is None:
        settings = load_settings_class(kind, name)()
    if find_origin(cls).is_built_in:
        return _instantiate(cls, settings, context)
    try:
        built = _instantiate(cls, settings, context)
    except OutriderError:
        raise
    except Exception as error:  # of somebody else's code: one line that names it
        raise ConfigError(f"{name} cannot be built{describe_exception(error)}") from error
    _require_methods(kind, f"what {name} builds ({type(built).__name__})", built)
    return built


def _instantiate(cls: type, settings: Settings, context: Any) -> Any:
    if hasattr(cls, "build"):
        return cls.build(settings, context)
    return cls(settings) if _accepts_settings(cls) else cls()


def _accepts_settings(cls: type) -> bool:
    if not hasattr(cls, "Settings"):
        return False
    return any(name != "self" for name in inspect.signature(cls.__init__).parameters)  # type: ignore[misc]


def origin(kind: Kind, name: str) -> Origin:
    """Where the class of a name comes from."""
    return find_origin(resolve(kind, name))


@contextmanager
def substitute(objects: Mapping[Kind, object]) -> Iterator[dict[Kind, dict[str, Any]]]:
    """Let objects stand in for what a recipe names; yields the section that stands for each in the settings.

    Its ``type`` is the import path of the object's class, so that a run can be resumed by name where the
    class can be imported.
    """
    sections: dict[Kind, dict[str, Any]] = {}
    keys = []
    for kind, plugin in objects.items():
        if isinstance(plugin, type):
            raise ConfigError(
                f"{plugin.__name__} is a class: give an object of it, or its import path "
                f"{plugin.__module__}:{plugin.__qualname__}"
            )
        _require_methods(kind, f"an object of {type(plugin).__name__}", plugin)
        name = f"{type(plugin).__module__}:{type(plugin).__qualname__}"
        own = _settings_inside(plugin)
        sections[kind] = {**({} if own is None else own.model_dump(exclude={"type"})), "type": name}
        _substitutes[kind, name] = plugin
        keys.append((kind, name))
    try:
        yield sections
    finally:
        for key in keys:
            _substitutes.pop(key, None)


def substituted_kinds() -> list[str]:
    """The kinds for which objects stand in at present."""
    return sorted({kind for kind, _ in _substitutes})


def short_name(name: str) -> str:
    """The class's name of an import path, else the name: for labels."""
    return name.rpartition(":")[2] if is_import_path(name) else name
