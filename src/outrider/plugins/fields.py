"""Fields of the settings tree that hold a plug-in: a section whose ``type`` names it, or a name alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.plugins.names import BUILT_IN, Kind, is_import_path, is_known, resolve_target
from outrider.plugins.presets import expand_preset, preset_names
from outrider.plugins.registry import load_settings_class, resolve, section_type

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
