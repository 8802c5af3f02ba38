"""The tiny real model learns a tool call by tag and natively, in the same harness: from calling one time in
five to nearly always, and in a form that can be read.
"""

from pathlib import Path

import pytest

from outrider.training.policy import set_threads
from tests.learning.native_calls import Learned, Protocol, learn

PROTOCOLS: tuple[Protocol, ...] = ("tags", "hermes")


def told(protocol: Protocol, seed: int, learned: Learned) -> str:
    return f"{protocol} {seed}: {learned}"


@pytest.mark.parametrize(
    "protocol", [pytest.param("tags", marks=pytest.mark.slow), pytest.param("hermes", marks=pytest.mark.long)]
)
def test_a_call_is_learned(protocol: Protocol, tmp_path: Path) -> None:
    set_threads(1)
    learned = learn(tmp_path, protocol, num_steps=8)
    print(told(protocol, 0, learned))
    assert learned.after > learned.before + 0.25
    assert learned.calls_last > learned.calls_first + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_learned_to_the_end_on_every_seed(protocol: Protocol, seed: int, tmp_path: Path) -> None:
    set_threads(1)
    learned = learn(tmp_path, protocol, num_steps=30, seed=seed)
    print(told(protocol, seed, learned))
    assert learned.before < 0.45 and learned.after > 0.75
    assert learned.calls_last > 0.85 and learned.invalid_last < learned.invalid_first
