"""Tools of MCP servers (Model Context Protocol), asked with the official client (package ``mcp``).

One section of a recipe names a server (:mod:`outrider.tools.mcp.tool`), whose list of tools is asked
before the first rollout (:mod:`outrider.tools.mcp.tool`). Calls come from many threads and go to sessions
in one thread's event loop (:mod:`outrider.tools.mcp.tool`).
"""

from typing import Final

LOOK_S: Final = 5.0
"""Seconds in which a server that failed a call has to show that it is still there."""
