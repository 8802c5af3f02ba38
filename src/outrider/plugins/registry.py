"""Plug-ins by name: built-in ones, those of installed packages, and how a class is built.

A plug-in is a class. ``Settings`` is its section of a recipe. It is built by its class method
``build(settings, context)`` if it has one, else by calling it with its settings. A tool may be a function.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter, create_model
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema
from typing_extensions import TypedDict

from outrider.config import Settings, annotation_parts
from outrider.deprecated import warn_old_environment
from outrider.errors import ConfigError, OutriderError
from outrider.plugins.imports import describe_exception, find_origin, import_target
from outrider.suggestions import did_you_mean

Kind = Literal["algorithms", "environments", "tools", "engines", "embedders", "trackers", "call_formats"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# Strings, so that nothing is imported before a recipe names it.
BUILT_IN: Final[Mapping[Kind, Mapping[str, str]]] = {
    "algorithms": {
        "grpo": "outrider.algorithms.grpo:Grpo",
        "reinforce++": "outrider.algorithms.grpo:ReinforcePlusPlus",
        "rejection": "outrider.algorithms.grpo:Rejection",
        "rapo": "outrider.algorithms.exploration:Rapo",
        "arpo": "outrider.algorithms.exploration:Arpo",
        "gigpo": "outrider.algorithms.gigpo:Gigpo",
        "empo2": "outrider.algorithms.exploration:Empo2",
        "combined": "outrider.algorithms.exploration:Combined",
        "luffy": "outrider.algorithms.luffy:Luffy",
        "rollout_replay": "outrider.algorithms.rollout_replay:RolloutReplay",
        "tree_grpo": "outrider.algorithms.tree_grpo:TreeGrpo",
        "lamer": "outrider.algorithms.lamer:Lamer",
    },
    "environments": {
        "factbook": "outrider.environments.factbook.environment:FactbookEnvironment",
        "tools": "outrider.environments.tool_qa.environment:ToolEnvironment",
        "scienceworld": "outrider.environments.scienceworld.environment:ScienceWorldEnvironment",
        "webshop": "outrider.environments.webshop.environment:WebShopEnvironment",
        "textworld": "outrider.environments.textworld.environment:TextWorldEnvironment",
        "house": "outrider.environments.house:HouseEnvironment",
        "alfworld": "outrider.environments.alfworld.environment:AlfworldEnvironment",
        "gym": "outrider.environments.gym.environment:GymEnvironment",
        "agent": "outrider.environments.agent.environment:AgentTaskSet",
        "verifiers": "outrider.environments.verifiers.environment:VerifiersTaskSet",
        "openenv": "outrider.environments.openenv.environment:OpenEnvTaskSet",
        "reasoning_gym": "outrider.environments.reasoning_gym.environment:ReasoningGymEnvironment",
    },
    "tools": {
        "search": "outrider.tools.search:SearchTool",
        "python": "outrider.tools.python.tool:PythonTool",
        "http-search": "outrider.tools.http_search:HttpSearch",
        "browser": "outrider.tools.browser.tool:Browser",
        "mcp": "outrider.tools.mcp.tool:McpServer",
    },
    "engines": {
        "local": "outrider.engines.plugins:Local",
        "vllm": "outrider.engines.plugins:Vllm",
        "retrospex": "outrider.algorithms.retrospex:Retrospex",
    },
    "embedders": {
        "minilm": "outrider.memory.embedders:MiniLmEmbedder",
        "hash": "outrider.memory.embedders:HashEmbedder",
    },
    "trackers": {
        "tensorboard": "outrider.viewer.trackers:TensorboardTracker",
        "wandb": "outrider.viewer.trackers:WandbTracker",
        "trackio": "outrider.viewer.trackers:TrackioTracker",
    },
    "call_formats": {
        "hermes": "outrider.tokens.call_formats:Hermes",
        "qwen3_coder": "outrider.tokens.call_formats:Qwen3Coder",
        "llama3_json": "outrider.tokens.call_formats:Llama3Json",
        "pythonic": "outrider.tokens.call_formats:Pythonic",
    },
}


@dataclass(frozen=True, slots=True)
class Contract:
    """Requirements for a class to be a plug-in of a kind.

    Attributes:
        noun: the kind in messages.
        methods: the required methods; of alternatives (``a|b``) one is sufficient.
        settings: import path of the base class of its settings; None if it needs no settings.
        wrapper: import path of the callable that converts a function to a class.
    """

    noun: str
    methods: tuple[str, ...]
    settings: str | None = None
    wrapper: str | None = None


_CONTRACTS: Final[Mapping[Kind, Contract]] = {
    "algorithms": Contract(
        "an algorithm", ("assign_advantages",), "outrider.algorithms.base:ObjectiveSettings"
    ),
    "environments": Contract(
        "an environment", ("tasks", "make"), "outrider.environments.base:EnvironmentSettings"
    ),
    "tools": Contract("a tool", ("run_text|tools",), wrapper="outrider.tools.functions:tool_class"),
    "engines": Contract("an engine", ("generate",), "outrider.engines.base:EngineSettings"),
    "embedders": Contract("an embedder", ("embed",)),
    "trackers": Contract("a tracker", ("log", "close")),
    "call_formats": Contract("a call format", ("read", "write")),
}
_substitutes: dict[tuple[Kind, str], object] = {}


def is_import_path(name: str) -> bool:
    """Whether ``name`` has the form ``package.module:Class``."""
    module, separator, attribute = name.partition(":")
    return bool(separator and attribute) and all(part.isidentifier() for part in module.split("."))


@cache
def registered(kind: Kind) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of installed packages under ``outrider.KIND``, by name. Two packages may use one name."""
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=f"outrider.{kind}"):
        if point not in points.get(point.name, ()):
            points[point.name] = (*points.get(point.name, ()), point)
    return points


def package_labels(points: Iterable[EntryPoint]) -> str:
    """Names and versions of the packages that registered entry points."""
    labels = {
        "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        for point in points
    }
    return " and ".join(sorted(labels))


def known_names(kind: Kind) -> list[str]:
    """All short names of a kind, built-in ones first."""
    return [*BUILT_IN[kind], *(name for name in sorted(registered(kind)) if name not in BUILT_IN[kind])]


def is_known(kind: Kind, name: str) -> bool:
    """Return whether a recipe may use this name."""
    return name in BUILT_IN[kind] or is_import_path(name) or name in registered(kind)


def _find_target(kind: Kind, name: str, *, also: Sequence[str] = ()) -> str:
    """The import path of a name; ``also`` are other valid words, for the suggestions of the error.

    A built-in name always means the built-in class, so that no installed package changes a recipe.
    """
    if name in BUILT_IN[kind]:
        return BUILT_IN[kind][name]
    if is_import_path(name):
        return name
    points = registered(kind).get(name, ())
    if len(points) == 1:
        return points[0].value
    if points:
        raise ConfigError(
            f"{name!r} is registered by {package_labels(points)}: give the import path "
            "(package.module:Class) of the one you mean"
        )
    # of two names of one preset, the shorter one
    presets = [preset for preset in preset_types(kind) if not preset.endswith(PAPER)]
    known = [*also, *known_names(kind)]
    owner = next((other for other in KINDS if other != kind and name in BUILT_IN[other]), None)
    hint = did_you_mean(name, [*known, *presets])
    if owner is not None:
        hint = f" among the {kind.replace('_', ' ')}; it is one of the {owner.replace('_', ' ')}"
    raise ConfigError(
        f"there is no {name!r}{hint} (one of {', '.join(known)}, or package.module:Class"
        f"{'; presets: ' if presets else ''}{', '.join(presets)})"
    )


def resolve(kind: Kind, name: str) -> type:
    """Import the class of a name. Raises ConfigError if that fails or if it is no plug-in of this kind."""
    if (kind, name) in _substitutes:
        return _class_of(_substitutes[kind, name])
    # The file of an import path depends on the recipe's folder, so only short names are cached.
    return _load_class(kind, name) if is_import_path(name) else _load_named_class(kind, name)


@cache
def _load_named_class(kind: Kind, name: str) -> type:
    return _load_class(kind, name)


def _load_class(kind: Kind, name: str) -> type:
    contract, target = _CONTRACTS[kind], _find_target(kind, name)
    loaded = import_target(target)
    label = name if name == target else f"{name} ({target})"
    if contract.wrapper is not None and callable(loaded) and not isinstance(loaded, type):
        loaded = import_target(contract.wrapper)(loaded)
    if not isinstance(loaded, type):
        raise ConfigError(f"{label} is no class{' and no function' if contract.wrapper else ''}")
    base, settings = settings_base(kind), getattr(loaded, "Settings", None)
    if settings is None and contract.settings is not None:
        raise ConfigError(
            f"{label} ({find_origin(loaded)}) is not {contract.noun}: it has no class Settings "
            f"(a subclass of {base.__name__})"
        )
    if settings is not None and not (isinstance(settings, type) and issubclass(settings, base)):
        raise ConfigError(
            f"{label} ({find_origin(loaded)}): its Settings are no subclass of "
            f"{base.__module__}.{base.__name__}"
        )
    if name not in BUILT_IN[kind]:
        label = f"{name} ({find_origin(loaded)})"
        if missing := getattr(loaded, "__abstractmethods__", ()):
            raise ConfigError(f"{label} is not {contract.noun}: it has no method {min(missing)}")
        if not hasattr(loaded, "build"):  # otherwise `build_by_name` checks what it returns
            _require_methods(kind, label, loaded)
        if kind == "environments":
            warn_old_environment(loaded)
    return loaded


def _require_methods(kind: Kind, label: str, plugin: object) -> None:
    for method in _CONTRACTS[kind].methods:
        names = method.split("|")
        if not any(getattr(plugin, name, None) is not None for name in names):
            raise ConfigError(f"{label} is not {_CONTRACTS[kind].noun}: it has no method {names[0]}")


def settings_base(kind: Kind) -> type[Settings]:
    """The base class of the settings of a kind."""
    path = _CONTRACTS[kind].settings
    return Settings if path is None else cast(type[Settings], import_target(path))


def load_settings_class(kind: Kind, name: str) -> type[Settings]:
    """The settings class of a plug-in, with the recipe's name as ``type``."""
    own = getattr(resolve(kind, name), "Settings", None)
    if own is None and (kind, name) in _substitutes:
        own = type(find_settings(_substitutes[kind, name]))
    return _bound(kind, name, own if own is not None and issubclass(own, Settings) else settings_base(kind))


def find_settings(plugin: object) -> Settings | None:
    """The settings of an object, if it has them under a usual name."""
    candidates = (getattr(plugin, name, None) for name in ("settings", "config", "objective"))
    return next((candidate for candidate in candidates if isinstance(candidate, Settings)), None)


@cache
def _bound(kind: Kind, name: str, own: type[Settings]) -> type[Settings]:
    field = own.model_fields.get("type")
    if field is not None and field.annotation in (str, Literal[name]):
        return own
    literal = (cast(Any, Literal[name]), name)
    bound = create_model(own.__name__, __base__=own, __module__=own.__module__, type=literal)
    bound.__doc__ = own.__doc__
    # pickle looks a class up by its name, and would find the one without the type.
    cast(Any, bound).__reduce__ = lambda self: (read_settings, (kind, self.model_dump()))
    return bound


def read_settings(kind: Kind, tree: Mapping[str, Any]) -> Settings:
    """Validate the section of the plug-in that ``tree["type"]`` names."""
    return load_settings_class(kind, tree["type"]).model_validate(dict(tree))


def build(kind: Kind, settings: Settings, context: Any) -> Any:
    """Build the plug-in that ``settings.type`` names."""
    return build_by_name(kind, settings.type, settings, context)  # type: ignore[attr-defined]


def build_by_name(kind: Kind, name: str, settings: Settings | None, context: Any) -> Any:
    """Build a plug-in by its name; ``settings`` None means the defaults."""
    if (kind, name) in _substitutes:
        return _substitutes[kind, name]
    cls = resolve(kind, name)
    if settings is None:
        settings = load_settings_class(kind, name)()
    try:
        if hasattr(cls, "build"):
            built = cls.build(settings, context)
        else:
            parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
            accepts_settings = hasattr(cls, "Settings") and len(parameters) > 1
            built = cls(settings) if accepts_settings else cls()
    except Exception as error:
        if find_origin(cls).is_built_in or isinstance(error, OutriderError):
            raise
        raise ConfigError(f"{name} cannot be built{describe_exception(error)}") from error
    if not find_origin(cls).is_built_in:
        _require_methods(kind, f"what {name} builds ({type(built).__name__})", built)
    return built


@contextmanager
def substitute(objects: Mapping[Kind, object]) -> Iterator[dict[Kind, dict[str, Any]]]:
    """Use objects in place of the named plug-ins. Yields the section of the settings for each of them.

    The section's ``type`` is the import path of the object's class, so that a run can be resumed by name if
    the class can be imported.
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
        cls = _class_of(plugin)
        if kind == "environments":
            warn_old_environment(cls)
        name = f"{cls.__module__}:{cls.__qualname__}"
        own = find_settings(plugin)
        sections[kind] = {**({} if own is None else own.model_dump(exclude={"type"})), "type": name}
        _substitutes[kind, name] = plugin
        keys.append((kind, name))
    try:
        yield sections
    finally:
        for key in keys:
            _substitutes.pop(key, None)


def _class_of(plugin: object) -> type:
    """The class that a recipe names for an object, which may be what the ``build`` of that class returns."""
    cls: type = getattr(plugin, "plugin_class", type(plugin))
    return cls


def substituted_kinds() -> list[str]:
    """The kinds of the objects that are in use in place of named plug-ins."""
    return sorted({kind for kind, _ in _substitutes})


# Presets of the algorithms: named combinations of settings, which a recipe may also use as ``type``.


PAPER: Final = "-paper"  # the variant that a method's plain name means, unless that is a preset itself


@cache
def preset_types(kind: Kind) -> Mapping[str, tuple[str, str]]:
    """Presets that may be a ``type`` of this kind, with the type and the preset that they mean.

    These are all presets whose names are no types, and the plain names of ``-paper`` presets (``dapo`` for
    ``dapo-paper``). Only algorithms have presets.
    """
    presets: dict[str, tuple[str, str]] = {}
    for name in BUILT_IN[kind] if kind == "algorithms" else ():
        field = load_settings_class(kind, name).model_fields.get("preset")
        for preset in () if field is None else map(str, get_args(field.annotation)):
            if preset not in BUILT_IN[kind]:
                presets[preset] = (name, preset)
    plain = {preset.removesuffix(PAPER): chosen for preset, chosen in presets.items()}
    return {**{name: chosen for name, chosen in plain.items() if name not in BUILT_IN[kind]}, **presets}


def expand_preset(kind: Kind, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section whose ``type`` may be a preset, with ``type`` and ``preset`` in its place. The spelling may
    differ in case, hyphens and dots (``DrGRPO``, ``dr_grpo``).

    Raises ConfigError if the section sets another preset than its ``type``.
    """
    name = str(table.get("type"))
    if kind != "algorithms" or is_known(kind, name):
        return table
    known = {_bare(preset_name): (preset_name, *chosen) for preset_name, chosen in preset_types(kind).items()}
    if _bare(name) not in known:
        return table
    spelled, owner, preset = known[_bare(name)]
    requested = table.get("preset", preset)
    if not str(requested).startswith(spelled):
        raise ConfigError(
            f"{name} is the preset {preset} of type {owner}, and preset = {requested} contradicts it: "
            f"use type = {owner} with the preset that you want"
        )
    return {**table, "type": owner, "preset": requested}


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def preset_keys(kind: Kind, owner: str, preset: str) -> list[str]:
    """The settings that a preset sets differently from its type's default."""
    settings = load_settings_class(kind, owner)
    default = settings().model_dump(mode="json")
    values = settings.model_validate({"preset": preset}).model_dump(mode="json")
    return [key for key, value in values.items() if key != "preset" and default.get(key, ...) != value]


# Markers of settings that name a plug-in: a section whose ``type`` is its name, or the name alone.


BAD_NAME: Final = "plugin_name"
"""Type of the error for a missing or an unknown name; its message is a whole line."""


def _require(kind: Kind, name: str, *, also: Sequence[str] = ()) -> None:
    """Raise an error of pydantic if the name is unknown or its class cannot be imported."""
    try:
        if not is_known(kind, name):
            _find_target(kind, name, also=also)
        if name not in BUILT_IN[kind]:
            resolve(kind, name)
    except ConfigError as error:
        raise PydanticCustomError(BAD_NAME, "{reason}", {"reason": str(error)}) from error


@cache
def _reader(name: str, settings: type[Settings]) -> TypeAdapter[Any]:
    """Reader of a table with the settings below their name, which is then part of an error's location as in
    pydantic's own unions.
    """
    return TypeAdapter(cast(Any, TypedDict)("Section", {name: settings}))


@dataclass(frozen=True, slots=True)
class Section:
    """Marks a field with the settings of a plug-in of ``kind``, as ``Annotated[Base, Section(kind)]``.

    The plug-in that a table's ``type`` names validates the table. Validated settings pass.
    """

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A function of the value, because the classes are unknown before a recipe names them."""
        return core_schema.no_info_plain_validator_function(self.read)

    def read(self, value: Any) -> Any:
        """Validate the settings. Raises errors of pydantic, whose location begins with the plug-in's name."""
        if isinstance(value, Settings) and hasattr(value, "type"):
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("dict_type")
        if "type" not in value:
            raise PydanticCustomError(BAD_NAME, "is missing")
        try:
            value = expand_preset(self.kind, value)
        except ConfigError as error:
            raise PydanticCustomError(BAD_NAME, "{reason}", {"reason": str(error)}) from error
        name = str(value["type"])
        _require(self.kind, name)
        reader = _reader(name, load_settings_class(self.kind, name))
        return reader.validate_python({name: dict(value)})[name]

    def settings_class(self, name: str) -> type[Settings]:
        """The settings class that validates a table with this ``type``."""
        return load_settings_class(self.kind, expand_preset(self.kind, {"type": name})["type"])

    def builtin_classes(self) -> list[type[Settings]]:
        """The settings classes of the built-in plug-ins."""
        return [load_settings_class(self.kind, name) for name in BUILT_IN[self.kind]]


class Entry(Section):
    """Marks an element that is the name of a plug-in, which then has its default settings, or a section."""

    __slots__ = ()

    def read(self, value: Any) -> Any:
        if not isinstance(value, str):
            return super().read(value)
        _require(self.kind, value)
        super().read({"type": value})  # reports settings without a default now, not when the plug-in is built
        return value

    def builtin_classes(self) -> list[type[Settings]]:
        """Those with settings of their own; the settings of others are a section of the environment."""
        names = [name for name in BUILT_IN[self.kind] if hasattr(resolve(self.kind, name), "Settings")]
        return [load_settings_class(self.kind, name) for name in names]


@dataclass(frozen=True, slots=True)
class Name:
    """Marks a string that names a plug-in of ``kind``.

    ``is_open``: any other string is valid, too, because it names something else (a model of a library).
    ``also``: further valid words.
    """

    kind: Kind
    is_open: bool = False
    also: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A string that is a name."""
        return core_schema.no_info_after_validator_function(self.read, core_schema.str_schema())

    def read(self, value: str) -> str:
        """Validate the name. Raises an error of pydantic."""
        if value not in self.also and (not self.is_open or is_import_path(value)):
            _require(self.kind, value, also=self.also)
        return value


EmbedderName: TypeAlias = Annotated[str, Name("embedders", is_open=True)]
"""An embedder, or a sentence-transformers model."""
Marker: TypeAlias = Section | Name


def field_markers(settings: type[BaseModel], key: str) -> list[Marker]:
    """The markers of a field, at any depth of its annotation."""
    field = settings.model_fields[key]
    parts = annotation_parts((*field.metadata, field.annotation))
    return [part for part in parts if isinstance(part, Marker)]
