"""The resolved settings with the source of each value, as ``--dry-run`` prints them."""

import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.config import Settings, apply_override, parse_value, to_toml
from outrider.protocols import flat_settings, with_protocol

_ABSENT: Final = object()
_COMMENT: Final = textwrap.TextWrapper(
    107, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A setting with its dotted ``key``. ``source`` is ``recipe``, ``command``, ``preset NAME``,
    ``protocol NAME``, ``default``, or ``derived`` (from other settings).
    """

    key: str
    value: Any
    source: str


def leaves(settings: Settings, *, sources: Mapping[str, str], others: str = "derived") -> list[Leaf]:
    """Every setting, in the order of the tree.

    Args:
        settings: The validated settings.
        sources: The source by dotted key.
        others: The source of a value that has no source and is not the default.
    """
    plain = settings.model_dump(mode="json")
    return [
        Leaf(
            raw.key,
            raw.value,
            sources.get(raw.key) or ("default" if raw.value == raw.default else raw.preset or others),
        )
        for raw in _walk(settings, plain, type(settings), frozenset(sources))
    ]


def format_toml(entries: Sequence[Leaf]) -> str:
    """Format as TOML that :func:`~outrider.config.load_settings` reads back to the same settings. Each
    non-default value has its source, and a comment lists the defaults of each section.
    """
    tree: dict[str, Any] = {}
    defaults: dict[str, list[str]] = {}
    for leaf in entries:
        *above, name = leaf.key.split(".")
        if leaf.source == "default":
            text = f"{name} = {{}}" if leaf.value == {} else to_toml({name: leaf.value})
            # to_toml escapes non-breaking spaces, so that they keep a name and its value on one line here
            defaults.setdefault(".".join(above), []).append(text.replace(" = ", "\u00a0=\u00a0", 1))
            continue
        table = tree
        for part in above:
            table = table.setdefault(part, {})
        table[name] = leaf.value
    sources = {leaf.key: leaf.source for leaf in entries if leaf.source != "default"}
    lines, section = [], ""
    for line in to_toml(tree).split("\n"):  # not splitlines: a string may contain other line breaks
        if line.startswith("["):
            section = line.strip("[]") + "."
        key = f"{section}{line.partition(' = ')[0]}" if " = " in line else ""
        lines.append(f"{line}  # {sources[key]}" if key in sources else line)
    if defaults:
        lines += ["", "# at the default:"]
    for name, texts in defaults.items():
        wrapped = _COMMENT.wrap(f"{f'{name}: ' if name else ''}{', '.join(texts)}")
        lines += [line.replace("\u00a0", " ") for line in wrapped]
    return "\n".join(lines)


def key_sources(file: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Map each dotted key to its source, ``recipe``, ``command`` or ``protocol NAME``. File and overrides
    must be valid.
    """
    tree = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8-sig"))
    sources = dict.fromkeys(flat_settings(tree), "recipe")
    for override in overrides:
        apply_override(tree, override)
    filled = with_protocol(tree)
    sources = dict.fromkeys(flat_settings(filled), f"protocol {tree.get('protocol')}") | sources
    for override in overrides:
        key, _, raw = override.partition("=")
        sources |= dict.fromkeys(flat_settings({key.strip(): parse_value(raw)}), "command")
    return sources


@dataclass(frozen=True, slots=True)
class _RawLeaf:
    key: str
    value: Any
    default: Any
    preset: str | None = None


def _walk(
    settings: BaseModel, plain: Mapping[str, Any], like: Any, set_keys: frozenset[str], above: str = ""
) -> Iterator[_RawLeaf]:
    """The leaves below ``settings``. ``plain`` has their plain values, and ``like`` (an instance or a class)
    the defaults.
    """
    preset = getattr(settings, "preset", None)
    preset_label = f"preset {preset}" if isinstance(preset, str) else None
    for name, field in type(settings).model_fields.items():
        if name not in plain:  # a setting that is only recorded if it is set
            continue
        default = _default(like, name, field)
        for raw in _below(getattr(settings, name), plain[name], default, set_keys, f"{above}{name}"):
            yield replace(raw, preset=raw.preset or preset_label)


def _below(value: Any, plain: Any, default: Any, set_keys: frozenset[str], key: str) -> Iterator[_RawLeaf]:
    """The leaves of a field."""
    if isinstance(value, BaseModel):
        like = default if type(default) is type(value) else type(value)
        # A section that is off by default and not set explicitly must be printed, or it is lost on reading.
        is_new = default is None and not any(raw.startswith(f"{key}.") for raw in set_keys)
        for raw in _walk(value, plain, like, set_keys, f"{key}."):
            yield replace(raw, default=_ABSENT) if is_new else raw
    elif isinstance(plain, dict) and (names := getattr(default, "__dataclass_fields__", {})):
        for name, inner in plain.items():  # for example the settings of a tool
            own = getattr(default, name) if name in names else _ABSENT
            yield _RawLeaf(f"{key}.{name}", inner, list(own) if isinstance(own, tuple) else own)
    else:
        plain_default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        yield _RawLeaf(key, plain, list(plain_default) if isinstance(plain_default, tuple) else plain_default)


def _default(like: Any, name: str, field: FieldInfo) -> Any:
    if isinstance(like, BaseModel):
        return getattr(like, name)
    return _ABSENT if field.is_required() else field.get_default(call_default_factory=True)
