"""Components of a run whose engines and rollout workers are other processes, without a training."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from outrider.distributed import start_rollout_processes
from outrider.distributed.processes import Cluster
from outrider.training.components import Components
from outrider.training.settings import RunSettings
from outrider.training.setup import build, local_learner


@contextmanager
def components_on(cluster: Cluster, settings: RunSettings, folder: Path) -> Iterator[Components]:
    parts = build(
        settings,
        buffer_path=folder / "buffer.sqlite",
        resumed=False,
        on_tokens=lambda num: None,
        note=lambda line: None,
        start_learner=local_learner,
        start_remote=partial(start_rollout_processes, cluster=cluster, folder=folder),
    )
    assert parts.remote is not None
    try:
        yield parts
    finally:
        parts.remote.close()
        parts.factory.close()
