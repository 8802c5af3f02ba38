"""The plug-in ``mcp``: the tools of one server."""

from collections.abc import Callable, Mapping, Sequence

from outrider.tools.base import Tool, ToolContext, ToolGroup, ToolOutput
from outrider.tools.functions import CalledByText
from outrider.tools.mcp.asking import get_listing
from outrider.tools.mcp.listing import ListedTool, tool_tag
from outrider.tools.mcp.settings import McpConfig
from outrider.types import Json


class McpTool(CalledByText):
    """One tool of a server, which it shares with the server's other tools."""

    def __init__(
        self,
        listed: ListedTool,
        call: Callable[[str, Mapping[str, Json]], ToolOutput],
        close: Callable[[], None],
    ) -> None:
        self.name = listed.name
        self.usage = listed.usage
        self.schema = listed.schema
        self._listed_name = listed.listed_name
        self._call, self._close = call, close

    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        return self._call(self._listed_name, arguments)

    def close(self) -> None:
        """End the server, for all of its tools; may be called twice."""
        self._close()


class McpServer(ToolGroup):
    """The tools of a section."""

    Settings = McpConfig

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    @classmethod
    def lines(cls, settings: McpConfig) -> Mapping[str, str]:
        """See :class:`outrider.tools.base.ToolGroup`. Asks the server, once a process."""
        return {tag: tool.usage for tag, tool in get_listing(settings).tools.items()}

    @classmethod
    def names(cls, settings: McpConfig) -> tuple[str, ...]:
        """See :class:`outrider.tools.base.ToolGroup`."""
        return tuple(tool_tag(settings, name) for name in settings.only) or super().names(settings)

    @classmethod
    def build(cls, settings: McpConfig, context: ToolContext) -> "McpServer":
        """Ask the server, which is started again for the first call. Raises ToolUnavailable."""
        listing = get_listing(settings)
        from outrider.tools.mcp.servers import Servers  # needs the package

        servers = Servers(settings, listing)
        return cls([McpTool(tool, servers.call, servers.close) for tool in listing.tools.values()])

    @property
    def tools(self) -> Sequence[Tool]:
        """In the order of the section."""
        return self._tools
