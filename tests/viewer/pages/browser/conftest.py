"""Debian's chromium by Playwright, and a page that must neither complain nor ask anybody else."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.pages.serving import Served, serving

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path("build/axe/package/axe.min.js")
COMPAT = Path(__file__).parents[3] / "compat" / "c91e788"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.viewer)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """A page of an address; in the end it must have asked no other origin and complained of nothing."""
    contexts, problems = [], []

    def opened(address: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        origin = address.split("/", 3)[2]
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda one: problems.append(one.url) if _is_foreign(one.url, origin) else None)
        page.goto(address)
        page.wait_for_selector("main h1")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def _is_foreign(url: str, origin: str) -> bool:
    return not url.startswith((f"http://{origin}/", "data:", "blob:"))


@pytest.fixture(scope="session")
def several(recorded: Path) -> Iterator[Served]:
    """The recorded run, and two of version 1."""
    with serving([recorded, COMPAT]) as found:
        yield found


@pytest.fixture
def at(served: Served, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """A view of the recorded run."""
    return lambda path="", **options: open_page(f"{served.address}#/run/{served.ids[0]}/{path}", **options)
