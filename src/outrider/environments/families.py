"""Which settings make which task family; nothing here needs a model."""

from typing import Annotated, TypeAlias, cast

from outrider.environments.base import EnvironmentSettings, TaskFamily
from outrider.plugins.fields import Section
from outrider.plugins.registry import build, resolve
from outrider.types import Role

EnvironmentConfig: TypeAlias = Annotated[EnvironmentSettings, Section("environments")]
"""The section ``environment``: that of the family which its ``type`` names."""


def make_family(config: EnvironmentSettings) -> TaskFamily:
    """The task family of an environment's settings."""
    return cast(TaskFamily, build("environments", config, None))


def is_stateful(config: EnvironmentSettings) -> bool:
    """Whether an action of this family changes hidden state."""
    return bool(getattr(resolve("environments", config.type), "stateful", True))


def is_inline(config: EnvironmentSettings) -> bool:
    """Whether an observation continues the open assistant message (``protocol``), and is no message of its
    own.
    """
    if config.call_format is not None:
        return False
    return getattr(resolve("environments", config.type), "protocol", "chat") == "inline"


def observation_roles(config: EnvironmentSettings) -> tuple[Role, ...]:
    """The roles of the messages that answer a turn."""
    if config.call_format is not None:
        return ("tool",)
    return ("inline",) if is_inline(config) else ("user",)
