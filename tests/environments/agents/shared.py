"""Agent factories that the tests of a module share: to start the launcher of programs takes a second."""

from typing import Any

from outrider.environments.agent.environment import AgentConfig, AgentFactory

_FACTORIES: dict[str, AgentFactory] = {}


def shared_factory(**settings: Any) -> AgentFactory:
    """The factory of these settings, made once in a module. The fixture of ``conftest.py`` closes it."""
    config = AgentConfig(**settings)
    key = config.model_dump_json()
    if key not in _FACTORIES:
        _FACTORIES[key] = AgentFactory(config)
    return _FACTORIES[key]


def close_shared_factories() -> None:
    while _FACTORIES:
        _FACTORIES.popitem()[1].close()
