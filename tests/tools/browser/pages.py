"""A small collection of pages, and a tool over it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outrider.tools.base import ToolContext
from outrider.tools.browser.pages import BrowserSettings
from outrider.tools.browser.tool import Browser

ROWS: list[dict[str, Any]] = [
    {"id": "1", "title": "Tower", "text": "The tower stands in Paris."},
    {"id": "2", "title": "Sea | a poem", "text": "Blue is the sea. Nobody counts its waves."},
    {"id": "3", "title": "Tower", "text": "It was built in 1889. It is 330 metres high."},
    {"id": "4", "title": "1", "text": "One is a number."},
    {"id": "5", "title": "Same", "url": "https://www.a.org/x/", "text": "The first of two."},
    {"id": "6", "title": "Same", "url": "https://b.org/x", "text": "The second of two."},
]


def browser(folder: Path, rows: list[dict[str, Any]] | None = None, **settings: Any) -> Browser:
    file = folder / "pages.jsonl"
    lines = (json.dumps(row) + "\n" for row in (ROWS if rows is None else rows))
    file.write_text("".join(lines), encoding="utf-8")
    chosen = BrowserSettings.model_validate(settings)
    return Browser.build(chosen, ToolContext(environment=SimpleNamespace(corpus=None, pages=file)))
