"""The pages of plug-ins and metrics say what registry and declarations say, also of other packages."""

import re
from importlib.metadata import EntryPoint

import pytest
from docsite.plugins import all_metrics_page, plugins_page
from docsite.reference import PAGES, settings_pages

from outrider.metrics import DECLARED
from outrider.metrics.registry import metrics_page
from outrider.plugins import listing
from outrider.plugins import registry as names
from outrider.plugins.registry import BUILT_IN, KINDS, load_settings_class, settings_base


def _row(page: str, name: str) -> list[str]:
    (found,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", page, re.MULTILINE)
    return [cell.strip() for cell in found.split(" | ")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As though a package had registered the example, and another one a module that is not there."""
    points = {
        "mine": (EntryPoint("mine", "examples.own_algorithm:PastBaseline", "outrider.algorithms"),),
        "gone": (EntryPoint("gone", "no_such_module:Thing", "outrider.algorithms"),),
    }
    for module in (names, listing):
        monkeypatch.setattr(module, "registered", lambda kind: points if kind == "algorithms" else {})


def test_every_plugin_has_a_row_with_its_settings_and_pages() -> None:
    page = plugins_page()
    titles = [kind.capitalize().replace("_", " ") for kind in KINDS]
    assert re.findall("^## (.*)$", page, re.MULTILINE) == titles
    for kind in KINDS:
        for name in BUILT_IN[kind]:
            came_from, what, settings, pages = _row(page, name)
            assert came_from == "built in" and what.endswith(".") and pages.startswith("[about](../")
            own = (
                load_settings_class(kind, name).model_fields.keys()
                - settings_base(kind).model_fields.keys()
                - {"type"}
            )
            if own:
                assert set(re.findall("`([a-z0-9_]+)`", settings)) == own


def test_links_to_settings_hit_a_heading() -> None:
    anchors = set(re.findall(r"\]\((settings/\w+\.md#[^)]+)", plugins_page()))
    made = set()
    for name, page in settings_pages().items():
        for title in re.findall("^## (.*)$", page, re.MULTILINE):
            anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
            made.add(f"{name.removeprefix('reference/')}#{anchor}")
    assert len(anchors) == sum(len(BUILT_IN[kind]) for kind in ("algorithms", "environments", "engines"))
    assert anchors <= made


def test_metrics_of_built_in_plugins() -> None:
    assert all_metrics_page() == metrics_page() and PAGES["metrics.md"] is all_metrics_page


@pytest.mark.usefixtures("installed")
def test_an_installed_package_has_its_row_and_its_metrics() -> None:
    page, metrics = plugins_page(), all_metrics_page()
    came_from, _, settings, pages = _row(page, "mine")
    assert came_from != "built in" and "Settings`" in settings and pages == ""
    assert "no_such_module" in _row(page, "gone")[1]
    assert metrics.startswith(metrics_page())
    own = metrics.removeprefix(metrics_page())
    assert own.startswith("\n## Of `mine`, algorithms (")
    assert own.count("\n| `") > 0 and not any(f"| `{one.name}` |" in own for one in DECLARED)
