"""The plug-in ``mcp``: tools of an MCP server (Model Context Protocol), through the client package ``mcp``.

A section of a recipe names a server. Its list of tools is requested before the first rollout.
"""

import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from outrider.errors import ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.tools.base import SingleFlightCache, Tool, ToolContext, ToolGroup, ToolOutput, ToolSettings
from outrider.tools.functions import CalledByText
from outrider.types import Json

if TYPE_CHECKING:
    from outrider.plugins.imports import Origin
    from outrider.tools.mcp.session import ListedTool, Listing, Servers

_VARIABLE: Final = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_KEY: Final = re.compile(r"key|token|secret|passw|auth|credential", re.IGNORECASE)  # names in a url's query
_SHORTEST_KEY: Final = 4  # characters; a shorter value may be part of ordinary words


class McpConfig(ToolSettings):
    """An MCP server whose tools, or some of them, the policy can call.

    All episodes share its servers, so its tools must not keep state that other episodes can see.
    """

    LOOK_S: ClassVar[float] = 5.0
    """Seconds within which a server must respond after a failed call, or it is restarted."""

    type: Literal["mcp"] = "mcp"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """Name of the server in messages and records."""
    command: str | None = None
    """Program of a server that communicates through stdin and stdout; ``args`` are its arguments."""
    script: str | None = None
    """Python file to run instead of a command, with this Python. It is searched beside the recipe and in the
    current folder, and recorded like the code of a plug-in.
    """
    url: str | None = None
    """Address of a running server (streamable HTTP) to use instead."""
    args: tuple[str, ...] = ()
    """Arguments of ``command`` or ``script``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, in addition to ``PATH``, ``HOME`` and the like. ``$NAME`` is
    replaced by the value of your environment variable, so that recipes contain no keys.
    """
    cwd: Path | None = None
    """Folder in which the server runs; None for the current one."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers. Each value names a variable, for example ``{Authorization = "Bearer $MY_TOKEN"}``."""
    only: tuple[str, ...] = ()
    """Names of the server's tools to use, in this order; empty for all."""
    prefix: Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]*)?$")] = ""
    """Prefix of the names of its tools, in case two servers have tools of the same name."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """Processes of the server, or sessions over HTTP. A call goes to the one with the fewest calls."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Concurrent calls per process or session; further calls wait."""
    timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """Time limit of a call; after it the call is a tool fault."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time limit for starting the server and listing its tools."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Starts in a row without an answered call. After that every call is a tool fault."""
    restart_wait_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds to wait before the second start in such a row; doubles with each start."""
    max_chars: Annotated[int, Field(ge=1)] = 20_000
    """Characters of a result that the policy sees."""
    max_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Bytes of a message; a longer one ends the server."""

    @model_validator(mode="after")
    def _validate(self) -> "McpConfig":
        if [self.command, self.script, self.url].count(None) != 2:
            raise ValueError("set exactly one of command, script and url")
        if self.url is not None and (self.args or self.env or self.cwd is not None):
            raise ValueError("args, env and cwd are for a server that is started: with url it runs already")
        if self.url is None and self.headers:
            raise ValueError("headers are for a server with a url")
        if len(set(self.only)) != len(self.only):
            raise ValueError("only names a tool twice")
        if bare := [name for name, value in self.headers.items() if not _VARIABLE.search(value)]:
            raise ValueError(
                f"the header {bare[0]} names no variable: write $NAME in place of the key, which then "
                "comes from the environment"
            )
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"url must begin with http:// or https:// and name a host, not {self.url!r}")
            names = [name for name, _ in parse_qsl(parts.query)]
            if parts.username or parts.password or any(map(_KEY.search, names)):
                raise ValueError("url must hold no key: use headers with a variable of the environment")
        return self

    def waiting_s(self, num_concurrent: int) -> float:
        rounds = math.ceil(num_concurrent / (self.num_servers * self.max_concurrent))
        return rounds * (self.timeout_s + self.LOOK_S) + self.start_timeout_s

    def tag(self, name: str) -> str:
        """Return the tag of a server's tool: lower case, with ``_`` for characters that a tag cannot have."""
        return self.prefix + re.sub(r"[^a-z0-9_]", "_", name.lower())

    def origins(self) -> "Mapping[str, Origin]":
        """Describe the server, its script, its list of tools and every tool for the record of a run."""
        from outrider.tools.mcp.session import origins

        return origins(self, get_listing(self))

    def program(self) -> list[str]:
        """Return the command line of the server. Raises ToolUnavailable if the program does not exist."""
        if self.script is not None:
            return [sys.executable, str(self.script_path()), *self.args]
        assert self.command is not None
        if (executable := shutil.which(self.command)) is None:
            raise ToolUnavailable(f"MCP server {self.name}: there is no program {self.command!r}")
        return [executable, *self.args]

    def script_path(self) -> Path:
        """Find the script. Raises ToolUnavailable."""
        assert self.script is not None
        folders = [*search_folders(), Path.cwd()]
        for folder in folders:
            if (path := folder / self.script).is_file():
                return path
        searched_folders = ", ".join(dict.fromkeys(str(directory) for directory in folders))
        raise ToolUnavailable(
            f"MCP server {self.name}: there is no file {self.script!r} in {searched_folders}"
        )

    def sent_headers(self) -> dict[str, str]:
        """Return ``headers`` with the values of their variables.

        Raises ToolUnavailable, without printing the value, if a value is not valid in a header.
        """
        sent = {name: value.strip() for name, value in self.filled(self.headers).items()}
        for name, value in sent.items():
            if not value.isascii() or not value.isprintable():
                raise ToolUnavailable(
                    f"MCP server {self.name}: the value of the header {name} holds characters that a header "
                    f"cannot have: check the variable in {self.headers[name]!r}"
                )
        return sent

    def without_keys(self, text: str) -> str:
        """Replace the values of the recipe's variables by ``$NAME``: a server may print a key on stderr."""
        templates = [*self.env.values(), *self.headers.values()]
        for name in (variable.strip("${}") for value in templates for variable in _VARIABLE.findall(value)):
            if len(key := os.environ.get(name, "").strip()) >= _SHORTEST_KEY:
                text = text.replace(key, f"${name}")
        return text

    def filled(self, values: Mapping[str, str]) -> dict[str, str]:
        """Substitute environment variables for ``$NAME``. Raises ToolUnavailable."""
        try:
            return {name: Template(value).substitute(os.environ) for name, value in values.items()}
        except KeyError as error:
            raise ToolUnavailable(
                f"MCP server {self.name}: the environment variable {error.args[0]} is not set"
            ) from error
        except ValueError as error:
            raise ToolUnavailable(
                f"MCP server {self.name}: a value of env or headers has a $ without a name ($$ is a dollar)"
            ) from error


_listings: "SingleFlightCache[Listing]" = SingleFlightCache(64)


def get_listing(settings: McpConfig) -> "Listing":
    """Return the server and its tools, requested once per process from a server that is then ended.

    Raises ToolUnavailable if the server cannot be reached or lacks a tool, ConfigError if two of its tools
    have the same tag.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ToolUnavailable("the package mcp is not installed: pip install 'outrider[mcp]'")
    from outrider.tools.mcp.session import fetch_listing

    return _listings.get(settings.model_dump_json(), lambda: fetch_listing(settings))


class McpTool(CalledByText):
    """One tool of a server."""

    def __init__(self, listed: "ListedTool", servers: "Servers") -> None:
        self.name, self.usage, self.schema = listed.name, listed.usage, listed.schema
        self._listed_name, self._servers = listed.listed_name, servers

    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        return self._servers.call(self._listed_name, arguments)

    def close(self) -> None:
        """End the servers, which all tools of the section share; may be called twice."""
        self._servers.close()


class McpServer(ToolGroup):
    """The tools of a section."""

    Settings = McpConfig
    tools: Sequence[Tool] = ()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools

    @classmethod
    def lines(cls, settings: McpConfig) -> Mapping[str, str]:
        return {tag: tool.usage for tag, tool in get_listing(settings).tools.items()}

    @classmethod
    def names(cls, settings: McpConfig) -> tuple[str, ...]:
        return tuple(settings.tag(name) for name in settings.only) or super().names(settings)

    @classmethod
    def build(cls, settings: McpConfig, context: ToolContext) -> "McpServer":
        """Request the list of tools; servers start at the first call. Raises ToolUnavailable."""
        listing = get_listing(settings)
        from outrider.tools.mcp.session import Servers

        servers = Servers(settings, listing)
        return cls([McpTool(tool, servers) for tool in listing.tools.values()])
