"""A fork server, and one group of ranks per size, for all tests of the folder."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import save_tiny_model

if TYPE_CHECKING:
    from outrider.distributed.learner import RankGroup
    from outrider.distributed.processes import Cluster

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
def ranks_of(folder: Path) -> "Iterator[Callable[[int], RankGroup]]":
    """Ranks with their first weights; a group that an error has ended is started again.

    Each size has a fork server of its own: tests kill the processes of the shared one and change its limits,
    and two groups of one cluster have processes of the same names.
    """
    from outrider.distributed.learner import RankGroup
    from outrider.distributed.processes import Cluster
    from outrider.training.settings import ClusterSettings
    from tests.distributed.probe import rank_group

    groups: dict[int, RankGroup] = {}
    clusters: dict[int, Cluster] = {}

    def ranks_of(size: int) -> RankGroup:
        if size not in clusters:
            clusters[size] = Cluster(ClusterSettings())
        if size in groups and groups[size]._ranks:
            groups[size].call("anew")
        else:
            groups[size] = rank_group(clusters[size], folder, size)
        return groups[size]

    yield ranks_of
    for each in clusters.values():
        each.close()
