"""Templates of the HTML pages, which lie beside the code that fills them."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


@cache  # to compile it takes longer than to fill it in
def page_template(path: Path) -> Template:
    """The template at ``path``: what is put in is escaped, and a name that is not given is an error."""
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(path.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)
