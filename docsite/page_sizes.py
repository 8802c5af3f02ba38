"""Renders the built site at 1280 pixels, and prints the height and the widest overflow of its pages.

    python -m mkdocs build --strict -d build/site
    python -m docsite.page_sizes build/site [--check]

The overflow is the number of pixels by which the widest table exceeds the text, those in folded blocks
included. ``--check`` prints only pages that are too high or have such a table, and exits with status 1 if
there is one. Needs Playwright and Chromium.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

WIDTH: Final = 1280
MAX_HEIGHT: Final = 6000
# a reader searches in these pages; the error page loads its style from the server's root
_REFERENCE: Final = ("reference/", "metrics.html", "formats.html", "papers.html", "404.html")
_MEASURE: Final = """() => {
    const height = document.documentElement.scrollHeight
    document.querySelectorAll('details').forEach(block => { block.open = true })
    const wide = [...document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset table, html')]
    return [height, Math.max(...wide.map(element => element.scrollWidth - element.clientWidth))]
}"""


class PageSize(NamedTuple):
    """A page with its height and overflow in pixels."""

    name: str
    height: int
    overflow: int

    @property
    def fits(self) -> bool:
        """True if the page is not too high, except pages of reference, and its tables fit."""
        return self.overflow <= 0 and (self.height <= MAX_HEIGHT or self.name.startswith(_REFERENCE))


def page_sizes(site: Path) -> Iterator[PageSize]:
    """Render every page of a built site."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        for path in sorted(site.rglob("*.html")):
            page.goto(path.resolve().as_uri())
            yield PageSize(path.relative_to(site).as_posix(), *page.evaluate(_MEASURE))
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if ``--check`` names a page."""
    parser = argparse.ArgumentParser(prog="python -m docsite.page_sizes", description="Sizes of the pages.")
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--check", action="store_true", help="print only pages that do not fit")
    parsed = parser.parse_args(arguments)
    sizes = [size for size in page_sizes(parsed.site) if not (parsed.check and size.fits)]
    for size in sorted(sizes, key=lambda size: -size.height):
        print(f"{size.height:6} px high, {size.overflow:4} px too wide: {size.name}")
    return int(parsed.check and bool(sizes))


if __name__ == "__main__":
    sys.exit(main())
