"""The resolved settings for somebody who reads them: what applies, and who set it.

What is shown reads back to the same settings. Left out is only what is at its default and is off, has no
effect beside the others, moves no number of the run, or is a detail that hardly anybody sets; the last lines
name it.
"""

import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.config import Settings, parse_value, to_toml

# A zero that is a choice like another, and no switch.
_CHOICES: Final = {"seed", "temperature"}
_ABSENT: Final = object()
_DETAIL: Final = "details"
_COMMENT: Final = textwrap.TextWrapper(
    107, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A setting by its dotted ``key``. ``source`` is who set it: a source that was given, ``preset NAME``,
    ``default``, or ``derived`` from others. ``left_out`` says why it is not shown (None: it is).
    """

    key: str
    value: Any
    source: str
    left_out: str | None = None


@dataclass(frozen=True, slots=True)
class _RawLeaf:
    """A leaf with what its section says about it."""

    key: str
    value: Any
    default: Any
    preset: str | None
    is_unused: bool
    is_detail: bool


def leaves(
    settings: Settings,
    *,
    sources: Mapping[str, str],
    unseen: Mapping[str, str] | None = None,
    others: str = "derived",
) -> list[Leaf]:
    """Every setting, in the order of the tree.

    ``sources``: who set a dotted key. ``unseen``: why somebody who reads the settings need not see the
    default of a key. ``others``: who set what nobody gave and is not at its default.
    """
    plain = settings.model_dump(mode="json")
    return [
        _leaf(raw, sources, unseen or {}, others)
        for raw in _walk(settings, plain, type(settings), frozenset(sources))
    ]


def format_toml(entries: Sequence[Leaf]) -> str:
    """TOML that :func:`~outrider.config.load_settings` reads back, a comment behind each value and one for
    each reason to leave something out.
    """
    tree: dict[str, Any] = {}
    for leaf in entries:
        if leaf.left_out is None:
            *above, name = leaf.key.split(".")
            table = tree
            for part in above:
                table = table.setdefault(part, {})
            table[name] = leaf.value
    sources = {leaf.key: leaf.source for leaf in entries}
    lines, section = [], ""
    for line in to_toml(tree).split("\n"):  # no other line break: a text may hold one
        if line.startswith("["):
            section = line.strip("[]") + "."
        key = f"{section}{line.partition(' = ')[0]}" if " = " in line else ""
        lines.append(f"{line}  # {sources[key]}" if key in sources else line)
    for reason in sorted({leaf.left_out for leaf in entries if leaf.left_out is not None}):
        names = ", ".join(_format_leaf(leaf, reason) for leaf in entries if leaf.left_out == reason)
        lines += ["", *_COMMENT.wrap(f"at the default, {reason}: {names}")]
    return "\n".join(lines)


def key_sources(file: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Who set a dotted key: ``recipe`` or ``command``. The file and the overrides have been read before."""
    tree = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    sources = dict.fromkeys(_keys(tree), "recipe")
    for override in overrides:
        key, _, raw = override.partition("=")
        value = parse_value(raw)
        sources |= dict.fromkeys(_keys({key.strip(): value}), "command")
    return sources


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _format_leaf(leaf: Leaf, reason: str) -> str:
    return f"{leaf.key} = {leaf.value}" if reason == _DETAIL else leaf.key


def _leaf(raw: _RawLeaf, sources: Mapping[str, str], unseen: Mapping[str, str], others: str) -> Leaf:
    source = sources.get(raw.key) or ("default" if raw.value == raw.default else raw.preset or others)
    leaf = Leaf(key=raw.key, value=raw.value, source=source)
    if source != "default":
        return leaf
    if raw.is_unused:
        return replace(leaf, left_out="without effect beside the others")
    if raw.key in unseen:
        return replace(leaf, left_out=unseen[raw.key])
    if not raw.value and raw.key.rpartition(".")[2] not in _CHOICES:
        return replace(leaf, left_out="off")
    return replace(leaf, left_out=_DETAIL) if raw.is_detail else leaf


def _walk(
    settings: BaseModel, plain: Mapping[str, Any], like: Any, set_keys: frozenset[str], above: str = ""
) -> Iterator[_RawLeaf]:
    """The leaves below ``settings``, whose values are ``plain``. ``like`` has the defaults: an instance, or a
    class.
    """
    unused = settings.idle() if isinstance(settings, Settings) else frozenset()
    details = settings.details if isinstance(settings, Settings) else frozenset()
    preset = getattr(settings, "preset", None)
    preset_label = f"preset {preset}" if isinstance(preset, str) else None
    for name, field in type(settings).model_fields.items():
        default = _default(like, name, field)
        for raw in _below(getattr(settings, name), plain[name], default, set_keys, f"{above}{name}"):
            own = raw.key.removeprefix(above)
            yield replace(
                raw,
                preset=raw.preset or preset_label,
                is_unused=raw.is_unused or name in unused or own in unused,
                is_detail=raw.is_detail or name in details or own in details,
            )


def _below(value: Any, plain: Any, default: Any, set_keys: frozenset[str], key: str) -> Iterator[_RawLeaf]:
    """The leaves of a field."""
    if isinstance(value, BaseModel):
        like = default if type(default) is type(value) else type(value)
        # A section that is off by default, and that nobody named, must be shown to be read back.
        is_new = default is None and not any(raw.startswith(f"{key}.") for raw in set_keys)
        for raw in _walk(value, plain, like, set_keys, f"{key}."):
            yield replace(raw, default=_ABSENT) if is_new else raw
    elif isinstance(plain, dict) and (own := _as_dict(default)):
        # Settings of a tool, say: no model, but fields with defaults. Any other table is a value.
        for name, inner in plain.items():
            yield _RawLeaf(f"{key}.{name}", inner, own.get(name, _ABSENT), None, False, True)
    else:
        plain_default = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        yield _RawLeaf(
            key,
            plain,
            list(plain_default) if isinstance(plain_default, tuple) else plain_default,
            None,
            False,
            False,
        )


def _as_dict(default: Any) -> dict[str, Any]:
    names = getattr(default, "__dataclass_fields__", {})
    values = {name: getattr(default, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _default(like: Any, name: str, field: FieldInfo) -> Any:
    if isinstance(like, BaseModel):
        return getattr(like, name)
    return _ABSENT if field.is_required() else field.get_default(call_default_factory=True)
