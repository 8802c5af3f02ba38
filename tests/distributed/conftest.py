"""One Ray and one group of ranks per size for all tests of the folder."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import save_tiny_model

if TYPE_CHECKING:
    from outrider.distributed.processes import Cluster
    from outrider.distributed.ray_session import Session
    from tests.distributed.forked_ranks import ForkedRanks

# an older torch, with which a run with ranks is refused
collect_ignore_glob = [] if find_spec("torch.distributed.checkpoint.hf_storage") else ["test_*.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="package")
def cluster() -> "Iterator[Cluster]":
    from outrider.distributed.processes import Cluster
    from outrider.training.settings import ClusterSettings

    with Cluster(ClusterSettings()) as opened:
        yield opened


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

    made: dict[int, ForkedRanks] = {}

    def of(size: int) -> ForkedRanks:
        if size in made:
            made[size].call("anew")
        else:
            made[size] = ForkedRanks(folder, size)
        return made[size]

    yield of
    for group in made.values():
        group.close()
