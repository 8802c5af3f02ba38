"""Which MCP server is asked, how it is reached, and within which limits."""

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from outrider.errors import ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.tools.base import ToolSettings
from outrider.tools.mcp import LOOK_S

if TYPE_CHECKING:
    from outrider.plugins.origin import Origin

_VARIABLE: Final = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_KEY: Final = re.compile(r"key|token|secret|passw|auth|credential", re.IGNORECASE)  # names in a url's query
_SHORTEST_KEY: Final = 4  # characters; a shorter value stands in other words too


class McpConfig(ToolSettings):
    """An MCP server, all or some of whose tools the policy can call. Its tools must keep no state that one
    episode could see of another: all episodes share its servers.
    """

    details: ClassVar[frozenset[str]] = frozenset(
        {"max_concurrent", "start_timeout_s", "max_restarts", "restart_wait_s", "max_chars", "max_bytes"}
    )

    type: Literal["mcp"] = "mcp"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """What lines and records call the server."""
    command: str | None = None
    """A program that is the server, speaking on stdin and stdout; ``args`` are its arguments."""
    script: str | None = None
    """A Python file in its place, run by this Python: looked for beside the recipe and in the current
    folder, and recorded as a plug-in's code is.
    """
    url: str | None = None
    """A running server instead, over streamable HTTP."""
    args: tuple[str, ...] = ()
    """Arguments of ``command`` or ``script``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server beside ``PATH``, ``HOME`` and their like. ``$NAME`` is replaced by
    a variable of yours, so that no key stands in a recipe.
    """
    cwd: Path | None = None
    """The folder in which the server runs; None is the current one."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers; each value names a variable: ``{Authorization = "Bearer $MY_TOKEN"}``."""
    only: tuple[str, ...] = ()
    """Names of the server's tools that are taken, in this order; empty takes all."""
    prefix: Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]*)?$")] = ""
    """Put before the names of its tools, where those of two servers are the same."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """Processes of the server, or sessions over HTTP; a call goes to the one with the fewest calls."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Calls that one of them gets at a time; further ones wait."""
    timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds in which a call is answered; later it is a tool fault."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which the server has started and told its tools."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Starts in a row behind which no call was answered. After that every call is a tool fault."""
    restart_wait_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds before the second start of such a row; it doubles from start to start."""
    max_chars: Annotated[int, Field(ge=1)] = 20_000
    """Characters of a result that are shown."""
    max_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Bytes of a message of the server; a longer one ends the server."""

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
            _require_url(self.url)
        return self

    def waiting_s(self, num_concurrent: int) -> float:
        """See :class:`outrider.tools.base.ToolSettings`."""
        rounds = math.ceil(num_concurrent / (self.num_servers * self.max_concurrent))
        return rounds * (self.timeout_s + LOOK_S) + self.start_timeout_s

    def origins(self) -> "Mapping[str, Origin]":
        """The server, its script, its list of tools and every tool."""
        from outrider.tools.mcp.asking import get_listing
        from outrider.tools.mcp.listing import origins

        return origins(self, get_listing(self))

    def program(self) -> list[str]:
        """What is started. Raises ToolUnavailable where it is not there."""
        if self.script is not None:
            return [sys.executable, str(self.script_path()), *self.args]
        assert self.command is not None
        if (executable := shutil.which(self.command)) is None:
            raise ToolUnavailable(f"MCP server {self.name}: there is no program {self.command!r}")
        return [executable, *self.args]

    def script_path(self) -> Path:
        """Where the script lies. Raises ToolUnavailable where it is in no folder that is searched."""
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
        """``headers`` with their variables' values. Raises ToolUnavailable, without the value, for what no
        header can carry.
        """
        sent = {name: value.strip() for name, value in self.filled(self.headers).items()}
        for name, value in sent.items():
            if not value.isascii() or not value.isprintable():
                raise ToolUnavailable(
                    f"MCP server {self.name}: the value of the header {name} holds characters that a header "
                    f"cannot have: look at the variable in {self.headers[name]!r}"
                )
        return sent

    def without_keys(self, text: str) -> str:
        """``text`` with ``$NAME`` in place of the values of variables that the recipe names: a server may
        repeat a key in its last words.
        """
        templates = [*self.env.values(), *self.headers.values()]
        for name in (variable.strip("${}") for value in templates for variable in _VARIABLE.findall(value)):
            if len(key := os.environ.get(name, "").strip()) >= _SHORTEST_KEY:
                text = text.replace(key, f"${name}")
        return text

    def filled(self, values: Mapping[str, str]) -> dict[str, str]:
        """``values`` with variables of the environment in place of ``$NAME``. Raises ToolUnavailable."""
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


def _require_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must begin with http:// or https:// and name a host, not {url!r}")
    if parts.username or parts.password or any(_KEY.search(name) for name, _ in parse_qsl(parts.query)):
        raise ValueError("url must hold no key: use headers with a variable of the environment")
