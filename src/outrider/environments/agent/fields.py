"""Fields of a request's body, or what is wrong with them in words."""

from collections.abc import Mapping
from typing import Any


class BadRequest(Exception):
    """A request that cannot be served; the text tells the program why. ``param`` is the field, ``code`` what
    OpenAI's clients know such an error by.
    """

    def __init__(self, text: str, *, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.param = param
        self.code = code


def mapping(value: Any, label: str, *, param: str | None = None) -> dict[str, Any]:
    """A JSON object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{label} must be a JSON object", param=param)
    return value


def count(fields: Mapping[str, Any], name: str) -> int | None:
    """A number of at least one, where it is given. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name} must be a whole number of at least 1", param=name)
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """True or false; false where it is not given. Raises BadRequest."""
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{name} is true or false", param=name)
    return bool(value)
