"""Reference pages generated from the registry of plug-ins: names, settings and metrics."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outrider.metrics import Metric
from outrider.metrics.registry import metrics_page
from outrider.plugins.listing import rows
from outrider.plugins.registry import KINDS, Kind, load_settings_class, preset_types, resolve, settings_base

_HEAD: Final = """# Plug-ins

This page is generated when the site is built, from the registry that `outrider list` prints: built-in
plug-ins and those of packages that are installed where the site is built. [Your own](../plugins.md) are
registered in the same way. The column of settings omits those that all plug-ins of a kind share.
"""
# The setting of a recipe that selects a plug-in, by kind.
_NAMED: Final[Mapping[Kind, str]] = {
    "algorithms": "`[algorithm]`, `type = ...`",
    "environments": "`[environment]`, `type = ...`",
    "engines": "`[engine]`, `type = ...`",
    "tools": '`environment.tools = [...]` with `type = "tools"`',
    "embedders": "`buffer.embedder = ...`, `algorithm.memory.embedder = ...`",
    "trackers": "`trackers = [...]`",
    "call_formats": "`environment.protocol = ...` or `environment.tool_calls = ...`",
}
_OF_KIND: Final[Mapping[Kind, str]] = {
    "environments": "../environments.md",
    "tools": "../tasks/tools_and_rewards.md",
    "engines": "../howto/scale.md",
    "embedders": "../install.md",
    "trackers": "../look/trackers.md",
    "call_formats": "../concepts/messages.md#native-tool-calls",
}
# The page of the kind or of the algorithm; a broken link fails the build.
_ELSEWHERE: Final[Mapping[str, str]] = {
    "reinforce++": "../algorithms/details/objectives.md#advantages",
    "rejection": "../algorithms/objectives.md#rejection-sampling-and-fine-tuning",
    "tools": "../tasks/tools_and_rewards.md",
    "factbook": "../tasks/factbook.md",
    "webshop": "../tasks/webshop.md",
    "scienceworld": "../tasks/scienceworld.md",
    "textworld": "../tasks/text_games.md",
    "house": "../tasks/text_games.md",
    "alfworld": "../tasks/alfworld.md",
    "gym": "../tasks/gym.md",
    "reasoning_gym": "../tasks/reasoning_gym.md",
    "openenv": "../tasks/openenv.md",
    "verifiers": "../tasks/verifiers.md",
    "agent": "../howto/agents.md",
}
_IN_SECTION: Final[Mapping[Kind, str]] = {
    "algorithms": "algorithm",
    "environments": "environment",
    "engines": "engine",
}


def plugins_page() -> str:
    """One table per kind."""
    return _HEAD + "".join(_table(kind) for kind in KINDS)


def _table(kind: Kind) -> str:
    base = settings_base(kind)
    shared = [key for key in base.model_fields if key != "type"]
    title = (
        f"\n## {kind.capitalize().replace('_', ' ')}\n\n{_NAMED[kind]}.{_shared(base.__name__, shared)}\n\n"
    )
    head = "| name | from | what | settings | page |\n| --- | --- | --- | --- | --- |\n"
    return title + head + "".join(_row(kind, *row) for row in rows(kind))


def _shared(name: str, keys: Sequence[str]) -> str:
    return f" All of them have the keys of `{name}`: {_listed(keys)}." if keys else ""


def _row(kind: Kind, name: str, came_from: str, what: str, is_broken: bool) -> str:
    """A broken plug-in of an installed package has a row with the reason, and no settings; a preset has the
    settings of its type.
    """
    is_plugin = not is_broken and name not in preset_types(kind)
    settings, page = (_settings(kind, name), _page(kind, name, came_from)) if is_plugin else ("", "")
    cells = (f"`{name}`", came_from, what.replace("``", "`"), settings, page)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _settings(kind: Kind, name: str) -> str:
    """The class and its own keys."""
    if getattr(resolve(kind, name), "Settings", None) is None:
        # A tool that is built in has its section in every recipe.
        of_recipe = kind == "tools" and name in load_settings_class("environments", "tools").model_fields
        return f"`environment.{name}`" if of_recipe else "none"
    cls, shared = load_settings_class(kind, name), settings_base(kind).model_fields
    own = [key for key in cls.model_fields if key not in shared and key != "type"]
    return f"`{cls.__name__}`" + (f": {_listed(own)}" if own else "")


def _page(kind: Kind, name: str, came_from: str) -> str:
    """Return links to its description and its settings; plug-ins of other packages have none."""
    if came_from != "built in":
        return ""
    described = _ELSEWHERE.get(name) or _OF_KIND.get(kind) or f"../algorithms/{name}.md"
    found = [f"[about]({described})"]
    if section := _IN_SECTION.get(kind):
        found.append(f"[settings](settings/{section}.md#{section_anchor(section, name)})")
    return ", ".join(found)


def section_anchor(section: str, name: str) -> str:
    """Return the anchor of the heading in the settings page; a wrong one fails the build."""
    words = re.sub(r"[^\w\s-]", "", f"{section} with type = {name}").strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def declared_by_plugins() -> Iterator[tuple[str, Sequence[Metric]]]:
    """Return the additional metrics of each plug-in, by its name in a recipe."""
    for kind in KINDS:
        for name, came_from, _, is_broken in rows(kind):
            is_plugin = not is_broken and name not in preset_types(kind)
            metrics = () if not is_plugin else getattr(resolve(kind, name), "metrics", ())
            if metrics:
                where = "" if came_from == "built in" else f" ({came_from})"
                yield f"`{name}`, {kind}{where}", metrics


def all_metrics_page() -> str:
    """The metrics of every run and of every plug-in that the registry knows."""
    return metrics_page(dict(declared_by_plugins()))
