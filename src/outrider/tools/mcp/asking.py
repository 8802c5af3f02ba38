"""Asks a server for its tools, once a process."""

import importlib.util
from typing import TYPE_CHECKING, Final

from outrider.errors import ToolUnavailable
from outrider.tools.mcp.listing import Listing
from outrider.tools.once import SingleFlightCache

if TYPE_CHECKING:
    from outrider.tools.mcp.settings import McpConfig

_CACHE_SIZE: Final = 64  # servers
_listings: SingleFlightCache[Listing] = SingleFlightCache(_CACHE_SIZE)


def get_listing(settings: "McpConfig") -> Listing:
    """What a server says of itself; what was started for that is ended.

    Raises ToolUnavailable where it cannot be asked or has no such tool, ConfigError where two of its tools
    are one tag.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ToolUnavailable("the package mcp is not installed: pip install 'outrider[mcp]'")

    def request_listing() -> Listing:
        from outrider.tools.mcp.servers import fetch_listing  # needs the package

        return fetch_listing(settings)

    return _listings.get(settings.model_dump_json(), request_listing)
