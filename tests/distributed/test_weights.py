"""Weights on their way: what arrives is what was sent, and whoever has other weights serves nobody. Without
Ray, with a carrier that is a dictionary.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import validate
from outrider.distributed.engines import EngineActor
from outrider.distributed.ray_session import Recipe
from outrider.distributed.weights import Carrier, Folder, drop, pack, pieces, unpack
from outrider.engines.base import Request
from outrider.errors import ClusterFault, ConfigError
from outrider.plugins import registry
from outrider.training.settings import RunSettings


class Shelf:
    """Pieces by number, and which of them are still there."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.num_put = 0

    def put(self, piece: bytes) -> int:
        self.num_put += 1
        self.held[self.num_put] = piece
        return self.num_put

    def get(self, handle: int) -> bytes:
        return self.held[handle]

    def drop(self, handle: int) -> None:
        del self.held[handle]


def weights() -> dict[str, torch.Tensor]:
    """Views, half precision, and what no number is equal to."""
    dice = torch.Generator().manual_seed(3)
    whole = torch.randn(8, 6, generator=dice)
    return {
        "view": whole[2:5].t(),
        "half": torch.randn(5, generator=dice).bfloat16(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "whole": whole,
    }


def empty(like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full(one.shape, 7.0, dtype=one.dtype) for name, one in like.items()}


@pytest.mark.parametrize("kind", ["shelf", "folder"])
def test_weights_arrive_bit_for_bit(kind: str, tmp_path: Path) -> None:
    carrier: Carrier = Shelf() if kind == "shelf" else Folder(tmp_path / "deep" / "engine")
    sent = weights()
    parcel = pack(sent, version=4, carrier=carrier)
    for _ in range(2):  # several engines read it
        arrived = empty(sent)
        assert unpack(parcel, arrived, carrier=carrier) == parcel.checksum
        for name, one in sent.items():
            same = arrived[name].contiguous().view(torch.uint8), one.contiguous().view(torch.uint8)
            assert torch.equal(*same), name
    drop(parcel.pieces, carrier)
    assert not list(tmp_path.rglob("*.safetensors")) and not getattr(carrier, "held", None)


def test_the_folder_removes_files_of_a_killed_run(tmp_path: Path) -> None:
    killed = Folder(tmp_path)
    pack(weights(), version=1, carrier=killed)
    assert list(tmp_path.glob("weights-*"))
    Folder(tmp_path)
    assert not list(tmp_path.glob("weights-*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parcel: {"checksum": parcel.checksum + 1}, "did not arrive as they were sent"),
        (lambda parcel: {"names": (*parcel.names, "more")}, "did not arrive as they were sent"),
        (lambda parcel: {"pieces": ()}, "did not arrive as they were sent"),
    ],
    ids=["other bytes", "a name too few", "no piece"],
)
def test_other_weights_than_those_sent_are_refused(change: Any, message: str) -> None:
    shelf = Shelf()
    parcel = pack(weights(), version=4, carrier=shelf)
    with pytest.raises(ClusterFault, match=message):
        unpack(replace(parcel, **change(parcel)), empty(weights()), carrier=shelf)
    with pytest.raises(ClusterFault, match="another model"):
        unpack(parcel, {**empty(weights()), "half": torch.zeros(6)}, carrier=shelf)


def test_a_failed_transfer_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterFault, match=r"disk: .*Not a directory"):
        pack(weights(), version=1, carrier=Folder(tmp_path / "file" / "below"))
    with pytest.raises(ClusterFault, match="all machines share"):
        Folder(tmp_path).get(str(tmp_path / "nowhere"))


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_pieces_hold_every_name_once_in_order_and_have_room(sizes: list[int], room: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    found = list(pieces(named, room=room))
    assert [name for one in found for name in one] == list(named)
    for one in found:
        assert one and (len(one) == 1 or sum(named[name] for name in one) <= room)
    for one, after in pairwise(found):  # none could have taken the next name too
        assert sum(named[name] for name in one) + named[after[0]] > room


@pytest.fixture(scope="module")
def settings(folder: Path) -> RunSettings:
    return validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo"},
            "model": {"name": str(folder), "precision": "float32"},
            "num_threads": 1,
        },
    )


def test_an_engine_serves_one_version_and_no_older_one(settings: RunSettings, tmp_path: Path) -> None:
    shelf = Shelf()
    actor = EngineActor(Recipe.from_settings(settings), 0, str(tmp_path), shelf)
    actor.build()
    asked = [Request(request_id="g/0/0", token_ids=(5, 6, 7), max_tokens=4, seed=1, cache_key="g/0")]
    with pytest.raises(ClusterFault, match="engine 0 has no weights yet, and version 0 was requested"):
        actor.generate("one", asked, 0)
    model = actor._model.model  # type: ignore[union-attr]
    own = {name: one.detach().clone() for name, one in model.named_parameters()}
    actor.load(pack(own, version=0, carrier=shelf))
    [first] = actor.generate("one", asked, 0)
    assert first.weight_version == 0
    actor.load(pack({name: 1.5 * one for name, one in own.items()}, version=1, carrier=shelf))
    [other] = actor.generate("one", asked, 1)
    assert other.weight_version == 1 and other.logprobs != first.logprobs
    with pytest.raises(ClusterFault, match="weights of version 1, and version 0 was requested"):
        actor.generate("one", asked, 0)
    with pytest.raises(ClusterFault, match="weights of version 1, and was sent 0"):
        actor.load(pack(own, version=0, carrier=shelf))
    # no cached key or value of version 1 is seen under version 2
    actor.load(pack(own, version=2, carrier=shelf))
    [again] = actor.generate("one", asked, 2)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    # half of a transfer is served to nobody
    with pytest.raises(ClusterFault, match="did not arrive"):
        actor.load(replace(pack(own, version=3, carrier=shelf), checksum=1))
    with pytest.raises(ClusterFault, match="has no weights yet"):
        actor.generate("one", asked, 2)


class Tasks:
    """An environment as an object has its methods."""

    def tasks(self, split: str) -> tuple[()]:
        return ()

    def make(self) -> None:
        """None is asked for."""


def test_an_object_instead_of_a_name_is_refused(settings: RunSettings) -> None:
    with (
        registry.substitute({"environments": Tasks()}),
        pytest.raises(ConfigError, match="an object was given for environments"),
    ):
        Recipe.from_settings(settings)
