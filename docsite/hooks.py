"""Hooks of mkdocs: pages that are generated from the code, links that leave the documents, roles in
docstrings.
"""

import re
from typing import TYPE_CHECKING, Final

from docsite.reference import PAGES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_OUTSIDE: Final = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+(?:src|tests|recipes|benchmarks|examples|README)[^)]*)\)"
)
_ROLE: Final = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_files(files: "Files", *, config: "MkDocsConfig") -> "Files":
    """Adds the generated pages; nothing of them is in the repository, so none can be out of date."""
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files of the repository that are no page become their name: the site does not know where the
    code lies.
    """
    return _OUTSIDE.sub(r"`\1`", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Sphinx roles of docstrings are shown as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
