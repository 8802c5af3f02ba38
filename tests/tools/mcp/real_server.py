"""A real MCP server of the package ``mcp``.

python real_server.py                  over stdio
python real_server.py --port-file F    over HTTP on loopback; the port is written to F
"""

import socket
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("numbers", version="1.0")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def shout(text: str) -> str:
    """Write a text large."""
    if text == "down":
        raise ValueError("nothing is down here")
    return text.upper()


@server.tool()
def picture() -> CallToolResult:
    """Draw."""
    parts = [TextContent(text="here:"), ImageContent(data="AAAA", mime_type="image/png")]
    return CallToolResult(content=parts)


@server.tool()
def table() -> CallToolResult:
    """Return structured content without a text."""
    return CallToolResult(content=[TextContent(text="")], structured_content={"rows": [1, 2]})


@server.tool()
async def meet(folder: str, others: int) -> str:
    """Respond only when as many calls are here at the same time."""
    (Path(folder) / f"{time.monotonic_ns()}-{id(anyio.get_current_task())}").touch()
    while len(list(Path(folder).iterdir())) < others:
        await anyio.sleep(0.01)
    return "met"


@server.tool()
async def hang() -> str:
    """Block the whole server."""
    time.sleep(3600)  # noqa: ASYNC251
    return ""


@server.tool(name="Get-Time.now")
def clock() -> str:
    """Return the time under a name that cannot be a tag."""
    return "noon"


async def serve_http(port_file: Path) -> None:
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        app = server.streamable_http_app(json_response="--json" in sys.argv)
        config = uvicorn.Config(app, log_level="error")
        port_file.with_suffix(".new").write_text(str(listening.getsockname()[1]))
        port_file.with_suffix(".new").rename(port_file)
        await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    if "--port-file" in sys.argv:
        anyio.run(serve_http, Path(sys.argv[-1]))
    else:
        server.run()
