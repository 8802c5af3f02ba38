"""Which settings of a run may be read by everybody: those whose form rules out paths and secrets."""

import getpass
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from keyword import iskeyword
from math import isfinite
from pathlib import Path
from typing import Any, Final

from outrider.config import NONE, to_toml
from outrider.resolved import leaves
from outrider.train.settings import RunSettings
from outrider.train.state.same_settings import UNSEEN

OMITTED: Final = "(not shown)"
_PLAIN: Final = re.compile(r"[\w.@:+=*-]*", re.ASCII)
_DATE: Final = re.compile(r"\d{1,2} [A-Za-z]{3,9} \d{4}", re.ASCII)  # as templates write the day
_MODEL: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_SECRET: Final = re.compile(
    r"(^|_)(api_?keys?|keys?|token|secret|password|passwd|auth|authorization|credentials?|variable)(_|$)",
    re.IGNORECASE,
)
_PROGRAM_KEYS: Final = frozenset({"args", "command", "env", "headers"})  # where a key may stand in any form
_LONGEST_MIXED: Final = 24  # of letters and digits without a break: longer ones may be keys


def public_settings(settings: RunSettings) -> str:
    """TOML of what is not at its default. Texts with blanks or slashes, and whatever may be a secret or name
    a person or a machine, are left out, which the value says.
    """
    tree: dict[str, Any] = {}
    private = private_words()
    for leaf in leaves(settings, sources={}, unseen=UNSEEN):
        if leaf.source == "default" and leaf.key not in (
            "algorithm.type",
            "environment.type",
            "model.name",
            "seed",
        ):
            continue
        *above, name = leaf.key.split(".")
        table = tree
        for part in above:
            table = table.setdefault(part, {})
        table[name] = _redact(leaf.key, leaf.value, private)
    return to_toml(tree)


def public_variables(variables: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Of ``model.template_kwargs`` what a reader needs: variables that the chat template names. A value that
    is no switch, number, plain word or date is ``OMITTED``.
    """
    private = private_words()
    own = set(re.findall(r"\w+", template))
    return {
        name: value if _is_plain_variable(name, value, private) else OMITTED
        for name, value in variables.items()
        if name in own and name.isidentifier() and not iskeyword(name)
    }


def _is_plain_variable(name: str, value: Any, private: frozenset[str]) -> bool:
    if may_be_secret(name):
        return False
    if isinstance(value, str):
        return _is_plain(value, private) or bool(_DATE.fullmatch(value))
    return value is None or (isinstance(value, bool | int | float) and isfinite(value))


def private_words() -> frozenset[str]:
    """Names of this user and this machine."""
    names = {socket.gethostname(), Path.home().name}
    with suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    return frozenset(word.lower() for name in names for word in _words(name))


def base_model(name: str) -> str:
    """The name of a model that everybody can read; empty for a folder of this machine."""
    is_plain = _MODEL.fullmatch(name) and not Path(name).exists()
    return name if is_plain else ""


def _redact(key: str, value: Any, private: frozenset[str]) -> Any:
    parts = key.split(".")
    if (value and _PROGRAM_KEYS & set(parts)) or any(may_be_secret(part) for part in parts):
        return OMITTED
    if isinstance(value, Mapping):
        return {
            item: _redact(f"{key}.{item}", inner, private)
            for item, inner in value.items()
            if _is_plain(item, private)
        }
    if isinstance(value, list | tuple):
        return [_redact(key, item, private) for item in value]
    if value is None:
        return NONE
    if isinstance(value, bool | int | float):
        return value
    if key == "model.name":
        return base_model(str(value)) or OMITTED
    return value if _is_plain(str(value), private) else OMITTED


def may_be_secret(name: str) -> bool:
    """Whether a name is a secret's, by its words: ``api_key``, ``API-KEY`` and ``apiKey`` alike."""
    return bool(_SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", name)))


def plain(text: str) -> str:
    """A word that names no place, key, person or machine, or :data:`OMITTED`."""
    return text if _is_plain(text, private_words()) else OMITTED


def _is_plain(text: str, private: frozenset[str]) -> bool:
    words = _words(text)
    looks_random = any(len(word) > _LONGEST_MIXED and re.search(r"\d", word) for word in words)
    return (
        bool(_PLAIN.fullmatch(text)) and not looks_random and not private & {word.lower() for word in words}
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text)
