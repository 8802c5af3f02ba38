"""Which settings make which task family; nothing here needs a model."""

from typing import Annotated

from pydantic import Field

from outrider.environments.base import TaskFamily
from outrider.environments.factbook import FactbookConfig, FactbookFamily
from outrider.environments.house import HouseConfig, HouseFamily
from outrider.environments.scienceworld import ScienceWorldConfig, ScienceWorldFamily
from outrider.environments.textworld import TextWorldConfig, TextWorldFamily
from outrider.environments.tools import ToolsConfig, ToolsFamily
from outrider.environments.webshop import WebShopConfig, WebShopFamily

EnvironmentConfig = Annotated[
    FactbookConfig | ToolsConfig | ScienceWorldConfig | WebShopConfig | TextWorldConfig | HouseConfig, Field(discriminator="type")
]


def make_family(config: EnvironmentConfig) -> TaskFamily:
    """The task family of an environment's settings."""
    if isinstance(config, FactbookConfig):
        return FactbookFamily(config)
    if isinstance(config, WebShopConfig):
        return WebShopFamily(config)
    if isinstance(config, TextWorldConfig):
        return TextWorldFamily(config)
    if isinstance(config, HouseConfig):
        return HouseFamily(config)
    return ScienceWorldFamily(config) if isinstance(config, ScienceWorldConfig) else ToolsFamily(config)
