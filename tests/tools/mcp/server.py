"""A real MCP server with tools that work and tools that break: over stdio, or over HTTP on loopback.

python server.py                  stdio
python server.py --port-file F    HTTP; the port is written to F
"""

import os
import socket
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("numbers", version=os.environ.get("NUMBERS_VERSION", "1.0"))


@server.tool(description="Add." if os.environ.get("NUMBERS_OTHER") else None)
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
def read_environment(name: str) -> str:
    """Read a variable."""
    return os.environ.get(name, "is not set")


@server.tool()
def process_id() -> int:
    """Tell who answers."""
    return os.getpid()


@server.tool()
def picture() -> CallToolResult:
    """Draw."""
    parts = [TextContent(text="here:"), ImageContent(data="AAAA", mime_type="image/png")]
    return CallToolResult(content=parts)


@server.tool()
def table() -> CallToolResult:
    """Tell without a text."""
    return CallToolResult(content=[], structured_content={"rows": [1, 2]})


@server.tool()
def die(status: int) -> str:
    """End in the middle of a call."""
    print("a grave fault", file=sys.stderr, flush=True)
    os._exit(status)


@server.tool()
async def meet(folder: str, others: int) -> str:
    """Answer only when so many calls are here at the same time."""
    (Path(folder) / f"{time.monotonic_ns()}-{id(anyio.get_current_task())}").touch()
    while len(list(Path(folder).iterdir())) < others:
        await anyio.sleep(0.01)
    return "met"


@server.tool()
async def sleep() -> str:
    """Never answer, and let others be answered."""
    await anyio.sleep_forever()
    return ""


@server.tool()
async def stop_all() -> str:
    """Never answer, nor let others be answered."""
    time.sleep(3600)  # noqa: ASYNC251
    return ""


@server.tool()
def babble(lines: int) -> str:
    """Write what is no message to stdout, and answer."""
    sys.__stdout__.write("Hello, I am a server!\n" * lines)
    sys.__stdout__.flush()
    return "done"


@server.tool()
def flood() -> str:
    """Write a line without an end to stdout."""
    while True:
        os.write(1, b"x" * 65536)


if os.environ.get("NUMBERS_MORE"):

    @server.tool()
    def double(a: int) -> int:
        """Double a number."""
        return 2 * a


@server.tool(name="Get-Time.now")
def clock() -> str:
    """Tell the time under a name that is no tag."""
    return "noon"


async def over_http(port_file: Path) -> None:
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
        anyio.run(over_http, Path(sys.argv[-1]))
    else:
        server.run()
