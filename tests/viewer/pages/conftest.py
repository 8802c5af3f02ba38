"""One small real run and its server for all tests of the viewer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.recorded_run import record_run
from tests.viewer.pages.serving import Served, serving


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("viewed"))


@pytest.fixture(scope="session")
def served(recorded: Path) -> Iterator[Served]:
    with serving([recorded]) as found:
        yield found
