"""What a server says of itself over HTTP: whether it is there, its name and version, its schemas."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from outrider.engines.chat.http_client import HttpAnswer, HttpClient
from outrider.errors import EnvironmentFault

_LOCAL_CLIENT: Final = HttpClient(is_bare=True)
_REMOTE_CLIENT: Final = HttpClient()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """A server's name with its version, and the JSON schemas of its actions and observations."""

    name: str
    version: str
    action: Mapping[str, Any]
    observation: Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether it is an address of this machine, before which no proxy stands."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def is_healthy(url: str, limit_s: float) -> bool:
    """Whether it answers that it is."""
    try:
        answer = _get(f"{url}/health", limit_s)
    except EnvironmentFault:
        return False
    return not answer.is_error


def fetch_description(url: str, limit_s: float) -> ServerDescription:
    """Raises :class:`EnvironmentFault` where nothing answers, or what answers is no OpenEnv server."""
    about, schemas = _fetch_json(f"{url}/metadata", limit_s), _fetch_json(f"{url}/schema", limit_s)
    match about, schemas:
        case {"name": str(name)}, {"action": dict(action), "observation": dict(observation)} if name:
            version = str(about.get("version") or "without a version")
            return ServerDescription(name=name, version=version, action=action, observation=observation)
    raise EnvironmentFault(f"{url} is no OpenEnv server: it tells no name and no schemas")


def _fetch_json(url: str, limit_s: float) -> Any:
    answer = _get(url, limit_s)
    if answer.is_error:
        raise EnvironmentFault(f"{url}: {answer.status} {answer.reason}")
    try:
        return json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{url} is answered by what is no JSON") from error


def _get(url: str, limit_s: float) -> HttpAnswer:
    client = _LOCAL_CLIENT if is_local(url) else _REMOTE_CLIENT
    try:
        return client.request(url, None, {"Accept": "application/json"}, timeout_s=limit_s)
    except TimeoutError as error:
        raise EnvironmentFault(f"{url}: no answer within {limit_s:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        reason = str(error).partition(": bytearray(")[0] or type(error).__name__
        raise EnvironmentFault(f"{url}: no connection: {reason}") from error
