"""``outrider explain``: what a setting, a section, a type or a metric means."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from outrider.commands import describe
from outrider.errors import ConfigError
from outrider.printing import print_lines
from outrider.suggestions import did_you_mean

if TYPE_CHECKING:
    from outrider.reference import Section, Setting

_WIDTH: Final = 78


def add_explain(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Print type, bounds, default and meaning of a setting, all keys of a section or of a type, or the "
        "meaning of a metric. Without KEY, list the sections of a recipe.",
        "outrider explain",
        "outrider explain algorithm.group_size",
        "outrider explain algorithm.retrieval",
        "outrider explain dapo",
        "outrider explain grad/norm",
    )
    parser.add_argument("key", nargs="?", metavar="KEY", help="setting, section, type, preset or metric")
    parser.set_defaults(command=_explain)


def _explain(parsed: argparse.Namespace) -> int:
    key = (parsed.key or "").strip("[]. ")
    print_lines(*(_metric_lines(key) if "/" in key else _setting_lines(key)))
    return 0


def _metric_lines(name: str) -> list[str]:
    """Raises ConfigError for an unknown metric."""
    from outrider.metrics import DECLARED, UndeclaredMetric, declared_metric

    try:
        metric = declared_metric(name)
    except UndeclaredMetric as error:
        hint = did_you_mean(name, [metric.name for metric in DECLARED])
        raise ConfigError(f"there is no metric {name!r}{hint or '; docs/metrics.md lists them'}") from error
    return [
        name,
        *_wrapped(metric.meaning, "  "),
        *_fields(unit=metric.unit, healthy=metric.healthy_range),
        *_fields(look_at=metric.look_at, page="docs/metrics.md"),
    ]


def _setting_lines(key: str) -> list[str]:
    """Raises ConfigError if no setting, section or plug-in has this name."""
    from outrider.config import SIMILAR_KEYS
    from outrider.reference import Section, sections
    from outrider.training.settings import RunSettings

    top = Section(RunSettings, ("",)).settings()
    if not key:
        lines = [line for setting in top for line in _row(setting.name, setting.description)]
        return [
            "A recipe has these settings and sections:",
            "",
            *lines,
            "",
            "outrider explain KEY prints one.",
        ]
    first = key.partition(".")[0]
    known = sections(first if any(setting.name == first for setting in top) else "")
    if found := _find(known, key):
        return found
    if "." not in key:
        if found := _plugin_lines(key, known):
            return found
        # a key without its section, also by the name that it has in other libraries
        paths = dict.fromkeys(
            f"{section.paths[0]}.{one.name}"
            for section in known
            for one in section.settings()
            if one.name == key
        )
        similar = [*paths, *SIMILAR_KEYS.get(key, ())]
        # the shortest section first: algorithm.num_hybrid before algorithm.retrieval.num_hybrid
        similar.sort(key=lambda path: path.count("."))
        if found := [line for path in similar for line in [*_find(known, path), ""]]:
            return found[:-1]
    names = [path for section in sections() for path in _paths(section)]
    hint = did_you_mean(key, names) or did_you_mean(key, {name.rpartition(".")[2] for name in names})
    raise ConfigError(f"there is no setting {key!r}{hint or '; outrider explain lists the sections'}")


def _paths(section: "Section") -> Iterator[str]:
    for path in section.paths:
        yield from filter(None, [path, section.type_name])
        yield from (f"{path}.{setting.name}".lstrip(".") for setting in section.settings())


def _find(known: "Sequence[Section]", path: str) -> list[str]:
    """The section or the setting with this dotted key; [] if there is none."""
    if tables := [section for section in known if path in section.paths]:
        has_types = len(tables) > 1 and all(table.type_name for table in tables)
        return _choice_lines(tables, path) if has_types else _section_lines(tables[-1], path)
    above, _, name = path.rpartition(".")
    if name == "type":
        return _type_lines([section for section in known if above in section.paths], above)
    types: dict[tuple[str, ...], list[str]] = {}
    for section in known:
        for setting in section.settings() if above in section.paths else ():
            if setting.name == name:
                selects = f"{above}.type = {section.type_name}" if section.type_name else ""
                if not selects and section.parents:  # a section of one type of its parent
                    selects = f"{above.rpartition('.')[0]}.type = {', '.join(section.parents)}"
                texts = (setting.description, setting.type_text, setting.default)
                types.setdefault(texts, []).append(selects)
    lines = []
    for (meaning, type_text, default), selections in types.items():
        suffix = f" (with {_join_selections(selections)})" if all(selections) else ""
        lines += [
            *_wrapped(f"{path}{suffix}", ""),
            *_wrapped(meaning, "  "),
            *_fields(type=type_text, default=default or "a table with defaults", page=_page(path)),
            "",
        ]
    return lines[:-1]


def _join_selections(selections: Sequence[str]) -> str:
    """Join ``a.type = x`` and ``a.type = y`` as ``a.type = x, y``."""
    values: dict[str, list[str]] = {}
    for selection in selections:
        key, _, value = selection.partition(" = ")
        values.setdefault(key, []).append(value)
    return "; ".join(f"{key} = {', '.join(items)}" for key, items in values.items())


def _type_lines(tables: "Sequence[Section]", above: str) -> list[str]:
    """What ``type`` of a section selects, its choices and its default; [] if the section has no types."""
    from outrider.plugins.registry import KINDS
    from outrider.training.settings import RunSettings

    if not all(table.type_name for table in tables) or not tables:
        return []
    field = RunSettings.model_fields.get(above)
    default = "required"
    if field is not None and not field.is_required():
        default = json.dumps(field.get_default(call_default_factory=True).type)
    lines = [
        f"{above}.type",
        *_wrapped(f"Selects one of these; outrider explain TYPE prints the keys of [{above}] with it:", "  "),
        "",
    ]
    for table in tables:
        lines += _row(table.type_name, _describe_type(above, table))
    if f"{above}s" in KINDS:
        lines += ["", *_wrapped(f"outrider list {above}s also prints presets and plug-ins.", "  ")]
    default = default if field is not None else ""
    return [
        *lines,
        "",
        *_fields(
            **{
                key: text
                for key, text in (("type", "string"), ("default", default), ("page", _page(above)))
                if text
            }
        ),
    ]


def _section_lines(section: "Section", path: str) -> list[str]:
    from outrider.reference import about

    title = section.title.replace("`", "")
    lines = [title]
    for paragraph in filter(None, about(section.kind).split("\n\n")):
        lines += ["", *_wrapped(" ".join(paragraph.split()), "")]
    lines += ["", *(line for setting in section.settings() for line in _key_lines(setting))]
    return [*lines, "", f"page: {_page(path)}"]


def _choice_lines(tables: "Sequence[Section]", path: str) -> list[str]:
    """The types of a section, and the keys that all of them have."""
    shared = [
        one for one in tables[0].settings() if all(one.name in table.kind.model_fields for table in tables)
    ]
    lines = [f"[{path}] has one of these types; outrider explain TYPE prints its keys:", ""]
    for table in tables:
        lines += _row(table.type_name, _describe_type(path, table))
    if shared:
        lines += ["", "keys of every type:", *(line for one in shared for line in _key_lines(one))]
    return [*lines, "", f"page: {_page(path)}"]


def _describe_type(path: str, table: "Section") -> str:
    from outrider.plugins.listing import description
    from outrider.plugins.registry import KINDS

    kinds = [kind for kind in KINDS if kind == f"{path}s"]
    return description(kinds[0], table.type_name) if kinds else table.summary


def _plugin_lines(name: str, known: "Sequence[Section]") -> list[str]:
    """What a type, a preset or another plug-in is, and the keys of a type."""
    from outrider.plugins.listing import rows
    from outrider.plugins.registry import KINDS

    lines: list[str] = []
    for kind in KINDS:
        for known_name, origin, line, _ in rows(kind):
            if known_name == name:
                lines += [f"{name} ({kind.replace('_', ' ')}, {origin})", *_wrapped(line, "  "), ""]
    for section in known:
        if section.type_name == name:
            lines += [*_section_lines(section, section.paths[0]), ""]
    return lines[:-1]


def _key_lines(setting: "Setting") -> list[str]:
    default = f", default {setting.default}" if setting.default not in ("", "required") else ""
    required = ", required" if setting.default == "required" else ""
    head = f"{setting.name}: {setting.type_text}{default}{required}"
    return [*_wrapped(head, "  ", "      "), *_wrapped(setting.description, "      ")]


def _page(path: str) -> str:
    above = path.partition(".")[0]
    return f"docs/reference/settings{'' if path in ('seed', 'num_threads', 'trackers') else f'/{above}'}.md"


def _row(name: str, text: str) -> list[str]:
    lines = _wrapped(text, " " * 16) or [""]
    return [
        f"  {name:13} {lines[0].strip()}" if len(name) < 14 else f"  {name}",
        *(lines[1:] if len(name) < 14 else lines),
    ]


def _fields(**texts: str) -> list[str]:
    return [
        line
        for name, text in texts.items()
        for line in _wrapped(text, f"  {name.replace('_', ' ') + ':':9}", " " * 11)
    ]


def _wrapped(text: str, indent: str, following: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent if following is None else following,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
