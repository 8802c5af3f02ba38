"""Asks a server for its tools, once a process."""

import importlib.util
from typing import TYPE_CHECKING, Final

from outrider.errors import ToolUnavailable
from outrider.tools.mcp.listing import Listing
from outrider.tools.once import Once

if TYPE_CHECKING:
    from outrider.tools.mcp.settings import McpConfig

_KEPT: Final = 64  # servers
_asked: Once[Listing] = Once(_KEPT)


def ask(settings: "McpConfig") -> Listing:
    """What a server says of itself; what was started for that is ended.

    Raises ToolUnavailable where it cannot be asked or has no such tool, ConfigError where two of its tools
    are one tag.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ToolUnavailable("the package mcp is not installed: pip install 'outrider[mcp]'")

    def ask_now() -> Listing:
        from outrider.tools.mcp.servers import asked_once  # needs the package

        return asked_once(settings)

    return _asked.get(settings.model_dump_json(), ask_now)
