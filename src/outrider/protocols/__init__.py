"""Protocols: how published code plays and trains on a task, point by point, as data.

Every protocol is a TOML file of this folder: ``points``, ``evidence`` (a repository with its commit, and a
file with lines), ``cannot`` (points that Outrider does not copy, with the reason) and ``needed`` (those
without which the protocol is not run). ``base`` inherits from another protocol. The table ``points.toml``
maps points to settings, in both directions.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigError
from outrider.files import read_toml
from outrider.plugins.registry import expand_preset, load_settings_class
from outrider.printing import plural
from outrider.suggestions import did_you_mean

_POINTS: Final = "points"
_NONE: Final = "none"
_UNKNOWN: Final = "unknown"  # value of a point that does not follow the base
_WINDOW: Final = "environment.window."
_DEFAULTS: Final = {"environment.context": "chat"}
"""Settings of environments that do not have them, and of runs before they existed."""
_REPLACED: Final[Mapping[str, Sequence[str]]] = {
    "evaluation.panels": ("evaluation.split", "evaluation.num_tasks"),
    "evaluation.split": ("evaluation.panels",),
    "evaluation.num_tasks": ("evaluation.panels",),
    "update.num_mini_batches": ("update.mini_batch_samples",),
    "update.mini_batch_samples": ("update.num_mini_batches",),
}
"""Settings that a protocol does not fill if the recipe sets the key, which decides the same."""
_OF_CHAT: Final = ("environment.actions", "environment.show_admissible", "environment.show_valid_actions")
COMPARABLE: Final = frozenset({"play", "data", "evaluation"})
"""Groups of points in which scores of one test agree."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a protocol. See ``points.toml`` for the fields; settings of ``choices`` have dotted keys."""

    group: str
    meaning: str
    keys: tuple[str, ...]
    choices: tuple[tuple[Any, Mapping[str, Any]], ...]
    always: Any

    def settings(self, value: Any, chosen: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the settings that ``value`` stands for beside the settings ``chosen``, or None."""
        for known, settings in self.choices:
            if known == value and all(
                chosen.get(key, setting) == setting for key, setting in settings.items()
            ):
                return settings
        if self.keys and self.group != "report":
            values = value if len(self.keys) > 1 else [value]
            return dict(zip(self.keys, values, strict=True))
        return {} if value == self.always else None

    def value(self, settings: Mapping[str, Any]) -> Any:
        """Return the value that settings (by dotted key) stand for; None if they do not decide it."""
        for value, required in self.choices:
            if all(settings.get(key) == setting for key, setting in required.items()):
                return value
        if self.keys and all(key in settings for key in self.keys):
            values = [settings[key] for key in self.keys]
            return values if len(values) > 1 else values[0]
        return self.always


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A protocol with all points that it inherits. ``extra`` are settings of no point, by dotted key."""

    name: str
    title: str
    source: str
    points: Mapping[str, Any]
    evidence: Mapping[str, str]
    cannot: Mapping[str, str]
    needed: Sequence[str]
    extra: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """SHA-256 of the points, and of the settings of no point."""
        content = json.dumps([self.points, self.extra], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def settings(self) -> dict[str, Any]:
        """Return the settings that the points stand for, by dotted key.

        Raises ConfigError, which names the points, if Outrider cannot run the protocol.
        """
        if self.needed:
            reasons = "; ".join(f"{name}: {self.cannot[name]}" for name in self.needed)
            raise ConfigError(
                f"protocol = {self.name} cannot be run ({reasons}); outrider protocol show and diff read it"
            )
        chosen: dict[str, Any] = dict(self.extra)
        for name, point in all_points().items():
            if name in self.points and name not in self.cannot:
                chosen |= point.settings(self.points[name], chosen) or {}
        return chosen


@cache
def all_points() -> Mapping[str, Point]:
    """Every point by name, in the order of tables."""
    return {
        name: Point(
            group=table["group"],
            meaning=table["meaning"],
            keys=tuple(table.get("keys", ())),
            choices=tuple(
                (choice["value"], flat_settings(choice["settings"])) for choice in table.get("choices", ())
            ),
            always=table.get("always"),
        )
        for name, table in _read(_POINTS).items()
    }


@cache
def protocol_names() -> tuple[str, ...]:
    """Names of all protocols, sorted."""
    names = (
        file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml")
    )
    return tuple(sorted(set(names) - {_POINTS}))


@cache
def find_protocol(name: str) -> Protocol:
    """Return a protocol by name. Raises ConfigError for an unknown name."""
    if name not in protocol_names():
        hint = did_you_mean(name, protocol_names())
        raise ConfigError(f"unknown protocol {name!r}{hint or '; outrider protocol list prints the names'}")
    table = _read(name)
    points, cannot = table["points"], table.get("cannot", {})
    evidence = {key: f"{table['source']} {place}" for key, place in table.get("evidence", {}).items()}
    extra = flat_settings(table.get("settings", {}))
    if "base" in table:
        base = find_protocol(table["base"])
        # Evidence for the base's value is no evidence for another value.
        evidence = {key: text for key, text in base.evidence.items() if key not in points} | evidence
        cannot = {key: text for key, text in base.cannot.items() if key not in points} | cannot
        points, extra = {**base.points, **points}, {**base.extra, **extra}
    return Protocol(
        name=name,
        title=table["title"],
        source=table["source"],
        points={key: points[key] for key in all_points() if points.get(key, _UNKNOWN) != _UNKNOWN},
        evidence=evidence,
        cannot=cannot,
        needed=table.get("needed", ()),
        extra=extra,
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))


# Between points and the settings of a recipe.


def with_protocol(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill the settings of the protocol that a recipe names, for keys that the recipe does not set.

    If the recipe chooses another algorithm, it gets those of the protocol's settings that this algorithm has;
    its advantage and the keys of its preset are its own. The record of a run, which has the hash of its
    protocol, is returned unchanged.

    Raises ConfigError for an unknown protocol, for one that cannot be run, and for another environment.
    """
    name = tree.get("protocol")
    if not isinstance(name, str) or name == _NONE or tree.get("protocol_sha256", _NONE) != _NONE:
        return tree
    protocol = find_protocol(name)
    replaced = {name for key in flat_settings(tree) for name in _REPLACED.get(key, ())}
    context = _table(tree, "environment").get("context")
    if context in ("chat", "window"):
        others = (_WINDOW,) if context == "chat" else _OF_CHAT
        replaced |= {key for key in protocol.settings() if key.startswith(others)}
    settings = {key: value for key, value in protocol.settings().items() if key not in replaced}
    filled = nested_settings(settings)
    kind = filled["environment"]["type"]
    own_kind = _table(tree, "environment").get("type", kind)
    if own_kind != kind:
        raise ConfigError(
            f"protocol = {name} is for environment.type = {kind}, not {own_kind}: use another protocol"
        )
    method, algorithm = _table(tree, "algorithm"), filled["algorithm"]
    if "preset" in method or method.get("type", algorithm["type"]) != algorithm["type"]:
        chosen = expand_preset("algorithms", {"type": algorithm["type"], **method})
        own = load_settings_class("algorithms", str(chosen["type"]))
        presets: Mapping[str, Mapping[str, Any]] = getattr(own, "presets", {})
        base = load_settings_class("algorithms", algorithm["type"]).model_fields
        shared = own.model_fields.keys() - {"advantage", *presets.get(str(chosen.get("preset")), ())}
        # A key of the same name may have other values: LUFFY's statistics are "mixed" or "on_policy".
        shared = {
            key for key in shared if key in base and own.model_fields[key].annotation == base[key].annotation
        }
        filled["algorithm"] = {key: value for key, value in algorithm.items() if key in shared}
        filled["algorithm"]["type"] = method.get("type", algorithm["type"])
    return {**_merged(filled, tree), "protocol_sha256": protocol.sha256}


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``own`` over ``base``, recursively; a table of another ``type`` replaces that of the base."""
    merged = {**base, **own}
    for key, table in base.items():
        value = own.get(key)
        if isinstance(table, Mapping) and isinstance(value, Mapping):
            same_type = value.get("type", table.get("type")) == table.get("type")
            merged[key] = _merged(table, value) if same_type else value
    return merged


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted key, with ``"none"`` for None."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _without_none(value)
    return flat


def _without_none(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [flat_settings(item) if isinstance(item, Mapping) else item for item in value]
    return _NONE if value is None else value


def nested_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as sections."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        table = tree
        *above, name = key.split(".")
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return tree


def points_from_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the points that the complete settings of a recipe or run decide."""
    flat = _DEFAULTS | flat_settings(tree)
    if earlier := flat.get("rollout.earlier_max_turns"):
        flat["rollout.max_turns"] = [*earlier, flat["rollout.max_turns"]]
    if panels := flat.get("evaluation.panels"):
        # The hash of a set follows from the other keys; the default split and number are not in use.
        flat["evaluation.panels"] = [{**entry, "sha256": _NONE} for entry in panels]
        for key in ("split", "num_tasks"):
            values = [entry[key] for entry in panels]
            flat[f"evaluation.{key}"] = values if len(values) > 1 else values[0]
    if flat["environment.context"] != "window":
        flat = {key: value for key, value in flat.items() if not key.startswith(_WINDOW)}
    points = {name: point.value(flat) for name, point in all_points().items()}
    return {name: value for name, value in points.items() if value is not None}


# Differences.


class Status(StrEnum):
    """How two sides agree in a point."""

    SAME = "same"
    DIFFERS = "differs"
    CANNOT = "cannot be expressed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A point of a difference: a value per side, None if it is unknown. ``note`` is the evidence, or the
    reason why Outrider does not copy the point.
    """

    point: str
    status: Status
    left: Any
    right: Any
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The points of a recipe, a run or a protocol (``left``) beside those of a protocol (``right``)."""

    left: str
    right: str
    rows: tuple[Row, ...]

    def with_status(self, status: Status) -> list[Row]:
        """The rows with this status."""
        return [row for row in self.rows if row.status is status]

    @property
    def exit_status(self) -> int:
        """0 if all points are the same, 3 if one differs or cannot be expressed, else 4: some are unknown."""
        found = {row.status for row in self.rows}
        if found & {Status.DIFFERS, Status.CANNOT}:
            return 3
        return 4 if Status.UNKNOWN in found else 0

    @property
    def summary(self) -> str:
        """The number of points by status, in a line."""
        counts = {status: len(self.with_status(status)) for status in Status}
        return (
            f"{self.left} and {self.right}: {plural(counts[Status.SAME], 'point is', 'points are')} "
            "the same, "
            f"{counts[Status.DIFFERS]} differ, {counts[Status.CANNOT]} cannot be expressed, "
            f"{counts[Status.UNKNOWN]} are unknown"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The summary, the points that differ or cannot be expressed, and the names of the unknown ones."""
        lines = [self.summary]
        for status in (Status.DIFFERS, Status.CANNOT):
            for row in self.with_status(status):
                lines.append(f"  {row.point}: {status}")
                lines += [f"      {self.left}: {format_value(row.left)}"]
                lines += [f"      {self.right}: {format_value(row.right)}"]
                lines += [f"      {row.note}"] if row.note else []
        unknown = [row.point for row in self.with_status(Status.UNKNOWN)]
        return [*lines, *([f"  unknown: {', '.join(unknown)}"] if unknown else [])]

    def cells(self) -> list[tuple[str, ...]]:
        """Point, status, both values and note of the points that are not the same, as text."""
        return [
            (row.point, str(row.status), format_value(row.left), format_value(row.right), row.note)
            for row in self.rows
            if row.status is not Status.SAME
        ]


def format_value(value: Any) -> str:
    """Format the value of a point."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def compare_protocols(left: Protocol, right: Protocol) -> Difference:
    """Compare two protocols."""
    evidence = {
        name: "; ".join(dict.fromkeys(side.evidence[name] for side in (left, right) if name in side.evidence))
        for name in all_points()
    }
    return _difference(left.name, left.points, right, cannot={}, evidence=evidence)


def compare_settings(label: str, tree: Mapping[str, Any], right: Protocol) -> Difference:
    """Compare the complete settings of a recipe or run with a protocol."""
    return _difference(label, points_from_settings(tree), right, cannot=right.cannot, evidence=right.evidence)


def run_difference(record: Path, name: str | None = None) -> Difference | None:
    """Compare the record of a run (``config.toml``) with the protocol ``name``, by default that of its
    recipe; None if there is none. Raises ConfigError for an unknown ``name``.
    """
    tree = read_toml(record)
    chosen = name or tree.get("protocol", _NONE)
    if chosen == _NONE or (name is None and chosen not in protocol_names()):
        return None
    protocol = find_protocol(chosen)
    is_changed = chosen == tree.get("protocol") and tree.get("protocol_sha256") != protocol.sha256
    label = f"this run{' (of another version of the protocol)' * is_changed}"
    return compare_settings(label, tree, protocol)


def _difference(
    label: str,
    left: Mapping[str, Any],
    right: Protocol,
    *,
    cannot: Mapping[str, str],
    evidence: Mapping[str, str],
) -> Difference:
    rows = []
    for name in all_points():
        values = left.get(name), right.points.get(name)
        if values == (None, None):
            continue
        status, note = Status.SAME, evidence.get(name, "")
        if not _is_same(*values):
            status = Status.UNKNOWN if None in values else Status.DIFFERS
            status, note = (Status.CANNOT, cannot[name]) if name in cannot else (status, note)
        rows.append(Row(point=name, status=status, left=values[0], right=values[1], note=note))
    return Difference(left=label, right=right.name, rows=tuple(rows))


def _is_same(left: Any, right: Any) -> bool:
    """Whether two values agree; a protocol may list several models."""
    if isinstance(right, list) and isinstance(left, str):
        return left in right
    return bool(left == right)


def differing_points(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the points in which the settings of runs (by label) differ, with a value per run."""
    points = [points_from_settings(tree) for tree in runs.values()]
    return {
        name: tuple(format_value(own.get(name)) for own in points)
        for name in all_points()
        if any(own.get(name) != points[0].get(name) for own in points)
    }
