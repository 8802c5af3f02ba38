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

from outrider.config import Settings, to_toml, value_of

# A zero that is a choice like another, and no switch.
_CHOICES: Final = {"seed", "temperature"}
_ABSENT: Final = object()
_DETAIL: Final = "details"
_COMMENT: Final = textwrap.TextWrapper(
    107, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A setting by its dotted ``key``. ``by`` is who set it: a source that was given, ``preset NAME``,
    ``default``, or ``derived`` from others. ``left_out`` says why it is not shown (None: it is).
    """

    key: str
    value: Any
    by: str
    left_out: str | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A leaf with what its section says about it."""

    key: str
    value: Any
    default: Any
    preset: str | None
    is_idle: bool
    is_detail: bool


def leaves(
    settings: Settings,
    *,
    given: Mapping[str, str],
    unseen: Mapping[str, str] | None = None,
    others: str = "derived",
) -> list[Leaf]:
    """Every setting, in the order of the tree.

    ``given``: who set a dotted key. ``unseen``: why somebody who reads the settings need not see the default
    of a key. ``others``: who set what nobody gave and is not at its default.
    """
    plain = settings.model_dump(mode="json")
    return [
        _leaf(one, given, unseen or {}, others)
        for one in _walk(settings, plain, type(settings), frozenset(given))
    ]


def show(found: Sequence[Leaf]) -> str:
    """TOML that :func:`~outrider.config.load_settings` reads back, a comment behind each value and one for
    each reason to leave something out.
    """
    tree: dict[str, Any] = {}
    for leaf in found:
        if leaf.left_out is None:
            *above, name = leaf.key.split(".")
            table = tree
            for part in above:
                table = table.setdefault(part, {})
            table[name] = leaf.value
    by = {leaf.key: leaf.by for leaf in found}
    lines, section = [], ""
    for line in to_toml(tree).split("\n"):  # no other line break: a text may hold one
        if line.startswith("["):
            section = line.strip("[]") + "."
        key = f"{section}{line.partition(' = ')[0]}" if " = " in line else ""
        lines.append(f"{line}  # {by[key]}" if key in by else line)
    for why in sorted({leaf.left_out for leaf in found if leaf.left_out is not None}):
        names = ", ".join(_told(leaf, why) for leaf in found if leaf.left_out == why)
        lines += ["", *_COMMENT.wrap(f"at the default, {why}: {names}")]
    return "\n".join(lines)


def given_by(file: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Who set a dotted key: ``recipe`` or ``command``. The file and the overrides have been read before."""
    tree = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
    given = dict.fromkeys(_keys(tree), "recipe")
    for override in overrides:
        key, _, raw = override.partition("=")
        value = value_of(raw)
        given |= dict.fromkeys(_keys({key.strip(): value}), "command")
    return given


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _told(leaf: Leaf, why: str) -> str:
    return f"{leaf.key} = {leaf.value}" if why == _DETAIL else leaf.key


def _leaf(found: _Found, given: Mapping[str, str], unseen: Mapping[str, str], others: str) -> Leaf:
    by = given.get(found.key) or ("default" if found.value == found.default else found.preset or others)
    leaf = Leaf(key=found.key, value=found.value, by=by)
    if by != "default":
        return leaf
    if found.is_idle:
        return replace(leaf, left_out="without effect beside the others")
    if found.key in unseen:
        return replace(leaf, left_out=unseen[found.key])
    if not found.value and found.key.rpartition(".")[2] not in _CHOICES:
        return replace(leaf, left_out="off")
    return replace(leaf, left_out=_DETAIL) if found.is_detail else leaf


def _walk(
    settings: BaseModel, plain: Mapping[str, Any], like: Any, given: frozenset[str], above: str = ""
) -> Iterator[_Found]:
    """The leaves below ``settings``, whose values are ``plain``. ``like`` has the defaults: an instance, or a
    class.
    """
    idle = settings.idle() if isinstance(settings, Settings) else frozenset()
    details = settings.details if isinstance(settings, Settings) else frozenset()
    preset = getattr(settings, "preset", None)
    named = f"preset {preset}" if isinstance(preset, str) else None
    for name, field in type(settings).model_fields.items():
        default = _default(like, name, field)
        for one in _below(getattr(settings, name), plain[name], default, given, f"{above}{name}"):
            own = one.key.removeprefix(above)
            yield replace(
                one,
                preset=one.preset or named,
                is_idle=one.is_idle or name in idle or own in idle,
                is_detail=one.is_detail or name in details or own in details,
            )


def _below(value: Any, plain: Any, default: Any, given: frozenset[str], key: str) -> Iterator[_Found]:
    """The leaves of a field."""
    if isinstance(value, BaseModel):
        like = default if type(default) is type(value) else type(value)
        # A section that is off by default, and that nobody named, must be shown to be read back.
        is_new = default is None and not any(one.startswith(f"{key}.") for one in given)
        for one in _walk(value, plain, like, given, f"{key}."):
            yield replace(one, default=_ABSENT) if is_new else one
    elif isinstance(plain, dict) and (own := _as_dict(default)):
        # Settings of a tool, say: no model, but fields with defaults. Any other table is a value.
        for name, inner in plain.items():
            yield _Found(f"{key}.{name}", inner, own.get(name, _ABSENT), None, False, True)
    else:
        shown = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        yield _Found(key, plain, list(shown) if isinstance(shown, tuple) else shown, None, False, False)


def _as_dict(default: Any) -> dict[str, Any]:
    names = getattr(default, "__dataclass_fields__", {})
    values = {name: getattr(default, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _default(like: Any, name: str, field: FieldInfo) -> Any:
    if isinstance(like, BaseModel):
        return getattr(like, name)
    return _ABSENT if field.is_required() else field.get_default(call_default_factory=True)
