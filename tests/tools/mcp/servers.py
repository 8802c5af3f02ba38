"""Settings of the servers of these tests, and what they are built to."""

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


def numbers(**given: Any) -> McpConfig:
    """The real server, over stdio."""
    program = {"command": sys.executable, "args": (str(HERE / "server.py"),)}
    return McpConfig.model_validate({"name": "numbers", "restart_wait_s": 0.0} | program | given)


def hostile(how: str, folder: Path, **given: Any) -> McpConfig:
    """The server that breaks the protocol in this way."""
    args = (str(HERE / "hostile.py"), how, str(folder / "starts"))
    return McpConfig.model_validate(
        {"name": "hostile", "command": sys.executable, "args": args, "restart_wait_s": 0.0} | given
    )


@contextmanager
def built(settings: McpConfig) -> Iterator[dict[str, Tool]]:
    """The tools by name, closed in the end."""
    tools = {tool.name: tool for tool in McpServer.build(settings, None).tools}
    try:
        yield tools
    finally:
        for tool in tools.values():
            tool.close()


@contextmanager
def over_http(folder: Path, *flags: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The url of the real server on loopback, and its process."""
    port_file = folder / "port"
    program = [sys.executable, str(HERE / "server.py"), *flags, "--port-file", str(port_file)]
    process = subprocess.Popen(program)
    try:
        while not port_file.exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}/mcp", process
    finally:
        process.kill()
        process.wait()


def is_running(pid: int) -> bool:
    """Whether a process is there and no mere entry of one that ended."""
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
