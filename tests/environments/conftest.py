"""Fixtures of the tests of environments."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def shared_agent_factories() -> Iterator[None]:
    """Close the agent factories that the tests have shared."""
    yield
    if (harness := sys.modules.get("tests.environments.agents.harness")) is not None:
        harness.close_shared_factories()
