"""Sizes of rendered pages, in a real browser (`make test-viewer`)."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from docsite.page_sizes import MAX_HEIGHT, PageSize, page_sizes

SITE = Path(__file__).parents[2] / "build" / "site"  # `make test-viewer` builds it first
pytestmark = [
    pytest.mark.viewer,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: apt-get install chromium"),
]


def measured(site: Path) -> list[PageSize]:
    """In a thread of its own: the tests of the viewer leave Playwright's event loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: list(page_sizes(site))).result()


def test_height_and_overflow_are_measured_with_folded_blocks_closed_and_open(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    page = (
        '<style>*{{margin:0}}</style><div style="height:{}px"></div><details><summary>x</summary>'
        '<div class="md-typeset__scrollwrap" style="overflow:auto;width:100px">'
        '<div style="width:{}px;height:8000px"></div></div></details>'
    )
    (tmp_path / "long.html").write_text(page.format(MAX_HEIGHT + 1, 100))
    (tmp_path / "wide.html").write_text(page.format(900, 130))
    long, wide = measured(tmp_path)
    assert long.height > MAX_HEIGHT and long.overflow == 0 and not long.fits
    assert wide.height < MAX_HEIGHT and wide.overflow == 30 and not wide.fits


def test_pages_of_reference_may_be_long() -> None:
    assert PageSize("reference/settings.html", 90_000, 0).fits and not PageSize("index.html", 90_000, 0).fits


def test_every_page_fits() -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: make docs")
    assert [size for size in measured(SITE) if not size.fits] == []
