"""Fixtures of the tests of environments."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def agent_factories_of_a_module() -> Iterator[None]:
    """Close the agent factories that the tests of a module have shared."""
    yield
    if (shared := sys.modules.get("tests.environments.agents.shared")) is not None:
        shared.close_shared_factories()
