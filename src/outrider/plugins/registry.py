"""The names that a recipe may use: the table of what is built in, and what installed packages register."""

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

from outrider.config import Settings
from outrider.errors import ConfigError, OutriderError
from outrider.plugins.imports import Origin, describe_exception, find_origin, import_target
from outrider.suggestions import did_you_mean

Kind = Literal["algorithms", "environments", "tools", "engines", "embedders", "trackers", "call_formats"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

# The only list of classes. They are strings, so that nothing is imported before a recipe names it.
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
    },
    "environments": {
        "factbook": "outrider.environments.factbook.environment:FactbookTaskSet",
        "tools": "outrider.environments.tool_qa.environment:ToolsTaskSet",
        "scienceworld": "outrider.environments.scienceworld.environment:ScienceWorldTaskSet",
        "webshop": "outrider.environments.webshop.environment:WebShopTaskSet",
        "textworld": "outrider.environments.textworld.environment:TextWorldTaskSet",
        "house": "outrider.environments.house:HouseTaskSet",
        "alfworld": "outrider.environments.alfworld.environment:AlfworldTaskSet",
        "gym": "outrider.environments.gym.environment:GymTaskSet",
        "agent": "outrider.environments.agent.environment:AgentTaskSet",
        "verifiers": "outrider.environments.verifiers.environment:VerifiersTaskSet",
        "openenv": "outrider.environments.openenv.environment:OpenEnvTaskSet",
        "reasoning_gym": "outrider.environments.reasoning_gym.environment:ReasoningGymTaskSet",
    },
    "tools": {
        "search": "outrider.tools.search:SearchTool",
        "python": "outrider.tools.python.tool:PythonAdapter",
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


def is_import_path(name: str) -> bool:
    """Whether ``name`` is of the form ``package.module:Class``."""
    module, separator, attribute = name.partition(":")
    return bool(separator and attribute) and all(part.isidentifier() for part in module.split("."))


@cache
def registered(kind: Kind) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Names that installed packages register under ``outrider.KIND``. Two packages may claim one name."""
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=f"outrider.{kind}"):
        if point not in points.get(point.name, ()):
            points[point.name] = (*points.get(point.name, ()), point)
    return points


def known_names(kind: Kind) -> list[str]:
    """Every short name of a kind, those that are built in first."""
    return [*BUILT_IN[kind], *(name for name in sorted(registered(kind)) if name not in BUILT_IN[kind])]


def is_known(kind: Kind, name: str) -> bool:
    """Whether a recipe may use this name. Installed packages are asked only about names that are not built
    in."""
    return name in BUILT_IN[kind] or is_import_path(name) or name in registered(kind)


def resolve_target(kind: Kind, name: str, *, also: Sequence[str] = (), presets: Sequence[str] = ()) -> str:
    """``module:Class`` of a name. Raises ConfigError, with a near match, for one that nobody has.

    ``also`` are words that may stand in its place, ``presets`` names that a message lists behind the others.

    What is built in keeps its name, whatever is installed beside it: no package changes what a recipe meant.
    """
    if name in BUILT_IN[kind]:
        return BUILT_IN[kind][name]
    if is_import_path(name):
        return name
    if len(points := registered(kind).get(name, ())) > 1:
        packages = " and ".join(sorted({package_label(point) for point in points}))
        raise ConfigError(
            f"{name!r} is registered by {packages}: give the import path "
            "(package.module:Class) of the one you mean",
        )
    if points:
        return points[0].value
    known = [*also, *known_names(kind)]
    listed = f"{', '.join(known)}, or package.module:Class"
    raise ConfigError(
        f"there is no {name!r}{_owner(kind, name) or did_you_mean(name, [*known, *presets])} (one of "
        f"{listed}{'; presets: ' if presets else ''}{', '.join(presets)})",
    )


def _owner(kind: Kind, name: str) -> str:
    """The end of a message about a name that another kind has."""
    owners = [other for other in KINDS if other != kind and name in BUILT_IN[other]]
    if not owners:
        return ""
    return f" among the {kind.replace('_', ' ')}; it is one of the {owners[0].replace('_', ' ')}"


def package_label(point: EntryPoint) -> str:
    """Name and version of the package that registers an entry point."""
    return "an unnamed package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


# From a name to a class, its settings and what is built of it: one way for what is built in and for what is
# not.
#
# A plug-in is a class. ``Settings`` is its section of a recipe, and it is built by
# ``build(settings, context)`` where it has that class method, else by being called with its settings. The
# context is that of its kind (for an algorithm :class:`outrider.algorithms.base.AlgorithmContext`).


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
        return _class_of(_substitutes[kind, name])
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
    if missing := getattr(cls, "__abstractmethods__", ()):
        raise ConfigError(
            f"{name} ({find_origin(cls)}) is not {_NOUN[kind]}: it has no method {min(missing)}"
        )
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
            f"{label} ({find_origin(cls)}): its Settings are no subclass of "
            f"{base.__module__}.{base.__name__}",
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
        cls = _class_of(plugin)
        name = f"{cls.__module__}:{cls.__qualname__}"
        own = _settings_inside(plugin)
        sections[kind] = {**({} if own is None else own.model_dump(exclude={"type"})), "type": name}
        _substitutes[kind, name] = plugin
        keys.append((kind, name))
    try:
        yield sections
    finally:
        for key in keys:
            _substitutes.pop(key, None)


def _class_of(plugin: object) -> type:
    """The class that a recipe names for an object, whose own class may be what that class builds."""
    cls: type = getattr(plugin, "plugin_class", type(plugin))
    return cls


def substituted_kinds() -> list[str]:
    """The kinds for which objects stand in at present."""
    return sorted({kind for kind, _ in _substitutes})


def short_name(name: str) -> str:
    """The class's name of an import path, else the name: for labels."""
    return name.rpartition(":")[2] if is_import_path(name) else name


# Presets of the algorithms: named combinations of settings, which a recipe may also name as ``type``.


PAPER: Final = "-paper"  # the variant that a method's plain name means, unless that is a preset itself


def preset_values(settings: type[Settings]) -> tuple[str, ...]:
    """The values of the field ``preset``, the default first; none without that field."""
    field = settings.model_fields.get("preset")
    return () if field is None else tuple(map(str, get_args(field.annotation)))


@cache
def preset_types(kind: Kind) -> Mapping[str, tuple[str, str]]:
    """What else may be a ``type`` of this kind, with the type and the preset that it stands for: every preset
    whose name is no type, and ``dapo`` for ``dapo-paper``. Only algorithms have such names.
    """
    presets: dict[str, tuple[str, str]] = {}
    for name in BUILT_IN[kind] if kind == "algorithms" else ():
        for preset in preset_values(load_settings_class(kind, name)):
            if preset not in BUILT_IN[kind]:
                presets[preset] = (name, preset)
    plain = {preset.removesuffix(PAPER): chosen for preset, chosen in presets.items()}
    return {**{name: chosen for name, chosen in plain.items() if name not in BUILT_IN[kind]}, **presets}


def preset_names(kind: Kind) -> list[str]:
    """Presets that a message lists: of two names for one, the shorter."""
    return [name for name in preset_types(kind) if not name.endswith(PAPER)]


def expand_preset(kind: Kind, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section whose ``type`` may be a preset, spelled out as ``type`` and ``preset``; what the section sets
    itself stays. Spelling may differ in case, hyphens and dots (``DrGRPO``, ``dr_grpo``).

    Raises ConfigError if the section has a preset that is no variant of the one in ``type``.
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


def preset_keys(kind: Kind, owner: str, preset: str) -> list[str]:
    """The settings that a preset sets differently from its type's default."""
    settings = load_settings_class(kind, owner)
    default = settings().model_dump(mode="json")
    values = settings.model_validate({"preset": preset}).model_dump(mode="json")
    return [key for key, value in values.items() if key != "preset" and default.get(key, ...) != value]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


# Fields of the settings tree that hold a plug-in: a section whose ``type`` names it, or a name alone.


BAD_NAME = "plugin_name"
"""Type of the error of a name that is missing or stands for nothing; its message is a whole line."""


@dataclass(frozen=True, slots=True)
class Section:
    """Marks a field that holds the settings of a plug-in of ``kind``, as ``Annotated[Base, Section(kind)]``.

    A table is read by the settings of the plug-in that its ``type`` names; settings that were read before
    pass.
    """

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A function of the value: the classes are not known before a recipe names them."""
        return core_schema.no_info_plain_validator_function(self.read)

    def read(self, value: Any) -> Any:
        """The settings. Raises errors of pydantic, whose place begins with the plug-in's name."""
        if isinstance(value, Settings) and hasattr(value, "type"):
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("dict_type")
        if "type" not in value:
            raise PydanticCustomError(BAD_NAME, "is missing")
        try:
            value = expand_preset(self.kind, value)
        except ConfigError as error:
            raise PydanticCustomError(BAD_NAME, "{told}", {"told": str(error)}) from error
        name = str(value["type"])
        _require(self.kind, name)
        reader = _reader(self.kind, name, load_settings_class(self.kind, name))
        return reader.validate_python({name: dict(value)})[name]

    def settings_class(self, name: str) -> type[Settings]:
        """The settings that a table with this ``type`` is read by."""
        return load_settings_class(self.kind, expand_preset(self.kind, {"type": name})["type"])

    def builtin_classes(self) -> list[type[Settings]]:
        """Those of every plug-in that is built in."""
        return [load_settings_class(self.kind, name) for name in BUILT_IN[self.kind]]


@dataclass(frozen=True, slots=True)
class Name:
    """Marks a string that names a plug-in of ``kind``; one that is not built in is imported when it is read.

    ``is_open``: any other string passes too, because it names something else (a model of a library).
    ``also``: words that are no plug-in's name and pass.
    """

    kind: Kind
    is_open: bool = False
    also: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A string first, and then a name."""
        return core_schema.no_info_after_validator_function(self.read, core_schema.str_schema())

    def read(self, value: str) -> str:
        """The name. Raises an error of pydantic where nothing has it, or where it cannot be imported."""
        if value not in self.also and (not self.is_open or is_import_path(value)):
            _require(self.kind, value, also=self.also)
        return value


EmbedderName: TypeAlias = Annotated[str, Name("embedders", is_open=True)]
"""An embedder, or a sentence-transformers model."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Marks an element that is either a name of a plug-in, with its default settings, or a section."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A function of the value, as that of :class:`Section`."""
        return core_schema.no_info_plain_validator_function(self.read)

    def read(self, value: Any) -> Any:
        """The name or the settings. Raises errors of pydantic."""
        if not isinstance(value, str):
            return Section(self.kind).read(value)
        _require(self.kind, value)
        # settings without a default are missed here, not when it is built
        Section(self.kind).read({"type": value})
        return value

    def settings_class(self, name: str) -> type[Settings]:
        """As that of :class:`Section`."""
        return load_settings_class(self.kind, name)

    def builtin_classes(self) -> list[type[Settings]]:
        """Those with settings of their own; the other ones have theirs in a section of the environment."""
        own = (name for name in BUILT_IN[self.kind] if hasattr(resolve(self.kind, name), "Settings"))
        return [load_settings_class(self.kind, name) for name in own]


Marker: TypeAlias = Section | Name | Entry


def field_markers(settings: type[BaseModel], key: str) -> list[Marker]:
    """Those of a field, wherever its annotation has them."""
    field = settings.model_fields[key]
    return list(_markers((*field.metadata, field.annotation)))


def _markers(parts: Iterable[Any]) -> Iterator[Marker]:
    for part in parts:
        if isinstance(part, Marker):
            yield part
        yield from _markers(get_args(part))


def _require(kind: Kind, name: str, *, also: Sequence[str] = ()) -> None:
    """The name is known and, where it is not built in, its class can be imported."""
    try:
        if not is_known(kind, name):
            resolve_target(kind, name, also=also, presets=preset_names(kind))
        if name not in BUILT_IN[kind]:
            resolve(kind, name)
    except ConfigError as error:
        raise PydanticCustomError(BAD_NAME, "{told}", {"told": str(error)}) from error


@cache
def _reader(kind: Kind, name: str, settings: type[Settings]) -> TypeAdapter[Any]:
    """One a class: an object that stands in for a name may have settings of another one."""
    return TypeAdapter(section_type(name, settings))
