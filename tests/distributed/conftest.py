"""One Ray for the tests that need it, and groups of ranks that live as long as they are asked for."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import save_tiny_model

if TYPE_CHECKING:
    from outrider.distributed.ray_session import Session
    from tests.distributed.forked_ranks import ForkedRanks

# an older torch, on which a run says what it needs
collect_ignore_glob = [] if find_spec("torch.distributed.checkpoint.hf_storage") else ["test_*.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="package")
def session() -> "Iterator[Session]":
    pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
    from outrider.distributed.ray_session import Session
    from outrider.training.settings import ClusterSettings

    opened = Session(ClusterSettings(num_trainers=6, placement_timeout_s=60))
    yield opened
    opened.close()


@pytest.fixture(scope="package")
def ranks_of(folder: Path) -> "Iterator[Callable[[int], ForkedRanks]]":
    from tests.distributed.forked_ranks import ForkedRanks

    # All at once: they load beside each other.
    made = {size: ForkedRanks(folder, size) for size in (1, 2, 3)}

    def of(size: int) -> ForkedRanks:
        made[size].call("anew")
        return made[size]

    yield of
    for group in made.values():
        group.close()
