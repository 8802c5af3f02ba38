"""Named random streams: fixed for ever, and different for every key."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from outrider.seeding import stream, stream_seed

PART = st.one_of(st.integers(-(2**40), 2**40), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
KEYS = st.lists(PART, max_size=4).map(tuple)


def reference(run_seed: int, key: tuple[str | int, ...]) -> int:
    """Written from the description: type and text, length first, 8 bytes of BLAKE2b, the lowest bit
    dropped.
    """
    data = b""
    for part in (run_seed, *key):
        text = f"{'int' if isinstance(part, int) else 'str'}:{part}".encode()
        data += len(text).to_bytes(4, "big") + text
    return int(hashlib.blake2b(data, digest_size=8).hexdigest(), 16) // 2


def test_values_are_fixed_across_versions_and_machines() -> None:
    assert stream_seed(0) == reference(0, ())
    assert stream_seed(7, "sample", 3, "task/1", 0, 2) == reference(7, ("sample", 3, "task/1", 0, 2))
    assert (
        stream(0, "task order", 1).permutation(8).tolist()
        == stream(0, "task order", 1).permutation(8).tolist()
    )


@given(seed=st.integers(0, 2**40), one=KEYS, other=KEYS)
def test_seeds_are_equal_for_equal_keys_only(
    seed: int, one: tuple[str | int, ...], other: tuple[str | int, ...]
) -> None:
    assert (stream_seed(seed, *one) == stream_seed(seed, *other)) == (one == other)
    assert stream_seed(seed, *one) == reference(seed, one)
    assert 0 <= stream_seed(seed, *one) < 2**63


def test_seeds_depend_on_boundaries_types_and_the_run_seed() -> None:
    seeds = [
        stream_seed(0, "ab", "c"), stream_seed(0, "a", "bc"), stream_seed(0, "abc"), stream_seed(0, "1"),
        stream_seed(0, 1), stream_seed(1), stream_seed(0), stream_seed(0, ""), stream_seed(0, "int:1"),
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)


def test_streams_are_independent() -> None:
    draws = [stream(0, "sample", rollout).random(2000) for rollout in range(3)]
    for i in range(3):
        for j in range(i):
            correlation = ((draws[i] - 0.5) * (draws[j] - 0.5)).mean() * 12
            assert abs(correlation) < 5 / 2000**0.5
    first = stream(0, "a")
    first.random(10)
    assert stream(0, "b").random() == stream(0, "b").random() != first.random()
