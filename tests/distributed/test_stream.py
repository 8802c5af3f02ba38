"""Requests of two workers that go to one engine process one by one: the tokens of rounds, and an engine that
dies is replaced.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.distributed.test_remote_faults import Crew, crew_of

if TYPE_CHECKING:
    from outrider.distributed.ray_session import Session

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def crew(session: "Session", folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    place = tmp_path_factory.mktemp("stream")
    with crew_of(session, folder, place, num_engines=1, batching="stream") as made:
        yield made


def tokens(crew: Crew) -> list[list[tuple[int, ...]]]:
    return [[node.token_ids for node in trace.nodes] for trace in crew.play().traces]


def test_every_request_has_its_own_draws_whatever_batch_it_is_in(crew: Crew) -> None:
    """The random tiny model's distribution is far from ties, so the tokens are the same in any batch."""
    first = tokens(crew)
    assert first == tokens(crew) and sum(map(len, first)) == 12
    assert crew.remote.busy_s() > 0.0
    versions = {n.weight_version for trace in crew.play().traces for n in trace.nodes if n.trainable}
    assert versions == {crew.remote.engine.weight_version}


def test_new_weights_are_those_of_the_next_batch(crew: Crew) -> None:
    engine = crew.remote.engine
    engine.load(engine.weight_version + 1)
    versions = {n.weight_version for trace in crew.play().traces for n in trace.nodes if n.trainable}
    assert versions == {engine.weight_version}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_gone_is_replaced(crew: Crew, how: signal.Signals) -> None:
    before = tokens(crew)
    os.kill(crew.remote.engine_pids[0], how)
    assert tokens(crew) == before
    counts = crew.remote.repairs.pop_counts()
    assert counts["cluster/engine_deaths"] + counts["cluster/engine_hangs"] == 1.0
    assert counts["rollout/num_groups_replayed"] == 4.0
