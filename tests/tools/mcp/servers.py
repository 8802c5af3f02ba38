"""Settings of the MCP servers of these tests, and the tools that are built from them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.tools.base import Tool
from outrider.tools.mcp.tool import McpConfig, McpServer

HERE = Path(__file__).parent


def stdio_server(file: str, /, *args: str, **options: Any) -> McpConfig:
    """Settings of a server of this folder over stdio."""
    program = {"command": sys.executable, "args": (str(HERE / file), *args)}
    return McpConfig.model_validate({"name": "numbers", "restart_wait_s": 0.0} | program | options)


def fake(**options: Any) -> McpConfig:
    """The quick server, which follows the protocol."""
    return stdio_server("fake_server.py", **options)


def hostile(mode: str, folder: Path, **options: Any) -> McpConfig:
    """The quick server, which breaks the protocol in a way and counts its starts in ``folder / "starts"``."""
    return stdio_server("fake_server.py", mode, str(folder / "starts"), **{"name": "hostile"} | options)


@contextmanager
def built(settings: McpConfig) -> Iterator[dict[str, Tool]]:
    """The tools by name; closed at the end."""
    tools = {tool.name: tool for tool in McpServer.build(settings, None).tools}
    try:
        yield tools
    finally:
        for tool in tools.values():
            tool.close()


@contextmanager
def serve_http(folder: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The url of the real server on loopback, and its process."""
    port_file = folder / "port"
    program = [sys.executable, str(HERE / "real_server.py"), *flags, "--port-file", str(port_file)]
    process = subprocess.Popen(program)
    try:
        while not port_file.exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}/mcp", process
    finally:
        process.kill()
        process.wait()


def http_server(url: str, **options: Any) -> McpConfig:
    """Settings of a running server."""
    return McpConfig.model_validate({"name": "numbers", "restart_wait_s": 0.0, "url": url} | options)


def is_running(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
