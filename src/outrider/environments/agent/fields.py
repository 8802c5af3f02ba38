"""Fields of a request's body, or what is wrong with them in words."""

from collections.abc import Mapping
from typing import Any


class BadRequest(Exception):
    """A request that cannot be served; the text tells the program why."""


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object")
    return value


def count(fields: Mapping[str, Any], name: str) -> int | None:
    """A number of at least one, where it is given. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name} must be a whole number of at least 1")
    return value
