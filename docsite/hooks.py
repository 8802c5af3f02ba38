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
    """Add the generated pages. The repository contains only the metrics of built-in plug-ins; here they are
    replaced by those of all plug-ins.
    """
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        if (written := files.get_file_from_path(name)) is not None:
            files.remove(written)
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files of the repository that are no pages by their names, because the site does not
    contain the code.
    """
    return _OUTSIDE.sub(r"`\1`", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Sphinx roles of docstrings are shown as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
