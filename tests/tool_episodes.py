"""Episodes with given tools, for tests."""

from collections.abc import Sequence

from outrider.environments.base import EpisodeFactory
from outrider.environments.tool_qa.environment import EpisodeConfig, ToolEnvironment, ToolResources
from outrider.tools.base import Tool


def tool_factory(*, tools: Sequence[Tool], config: EpisodeConfig, system_prompt: str = "") -> EpisodeFactory:
    """Return the factory of episodes that use ``tools`` in place of those that ``config`` names."""
    resources = ToolResources(tools=tools, settings=config, system_prompt=system_prompt)
    return EpisodeFactory(ToolEnvironment, config, resources)
