"""Tokens are drawn exactly from the distribution, and rounding hardly ever
moves a draw.
"""

import numpy as np
import pytest
import torch
from benchmarks.sampling import example_logits, inverse_cdf, num_changed
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.local.sampling import exponentials, request_stream, sample

BLOCK = 256


def drawn(logits_V: torch.Tensor, num: int, *, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
    """``num`` ids from one distribution, one stream after the other."""
    stream, size = request_stream(seed), 500
    ids: list[int] = []
    for _ in range(num // size):
        ids += sample(logits_V.expand(size, -1), [temperature] * size, [stream] * size)[0]
    return np.array(ids)


def check_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Within four standard deviations of the statistic's mean; cells that expect fewer than 8 are one
    cell.
    """
    expected = probabilities / probabilities.sum() * counts.sum()
    small = expected < 8
    counts, expected = (np.append(cells[~small], cells[small].sum()) for cells in (counts, expected))
    kept = expected >= 8
    degrees = kept.sum() - 1
    statistic = float(((counts - expected) ** 2 / expected.clip(1e-300))[kept].sum())
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5 + 4


@pytest.mark.parametrize("size", [1, 2, 97, 255, 256, 257, 511, 512, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_draws_follow_the_distribution_for_any_size_of_the_vocabulary(size: int, temperature: float) -> None:
    logits_V = 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    ids = drawn(logits_V, 4_000, temperature=temperature, seed=size)
    probabilities = torch.softmax(logits_V.double() / temperature, dim=-1).numpy()
    check_chi_square(np.bincount(ids, minlength=size), probabilities)


def test_draws_follow_the_distribution_between_blocks_and_within_them() -> None:
    """A large vocabulary in cells: every block, every place in a block, and ids in the order of their
    probability.
    """
    size = 11 * BLOCK + 50
    logits_V = 3.0 * torch.randn(size, generator=torch.Generator().manual_seed(5))
    probabilities = torch.softmax(logits_V.double(), dim=-1).numpy()
    counts = np.bincount(drawn(logits_V, 12_000), minlength=size)
    rank = np.argsort(np.argsort(probabilities)) // 97
    for cells in (np.arange(size) // BLOCK, np.arange(size) % BLOCK, rank):
        check_chi_square(np.bincount(cells, weights=counts), np.bincount(cells, weights=probabilities))


def test_rare_ids_come_as_often_as_they_should() -> None:
    """One id has nearly everything; 1,000 others, in its own and in other blocks, share one percent."""
    logits_V = torch.full((1001,), 0.0)
    logits_V[300] = float(np.log(99_000.0))
    ids = drawn(logits_V, 20_000)
    rare = ids[ids != 300]
    assert 200 - 4 * 200**0.5 < len(rare) < 200 + 4 * 200**0.5
    near = (rare // BLOCK == 1).mean()  # ids of the likely one's block: 255 of 1,000
    assert abs(near - 0.255) < 4 * (0.255 * 0.745 / len(rare)) ** 0.5


@given(
    data=st.data(),
    size=st.integers(1, 1100),
    seed=st.integers(0, 2**63 - 1),
    spread=st.sampled_from([0.0, 1.0, 8.0, 40.0]),
)
def test_every_draw_is_the_one_of_the_two_level_race_in_float64(
    data: st.DataObject, size: int, seed: int, spread: float
) -> None:
    """An independent reference: no other block, and no other id of the block, has a key that is larger by
    more than rounding.
    """
    temperature = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    logits_V = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed % 2**31))
    (chosen,) = sample(logits_V[None], [temperature], [request_stream(seed)])[0]
    weights = np.exp((logits_V.double().numpy() - float(logits_V.max())) / temperature)
    num_blocks = -(-size // BLOCK)
    uniforms = np.random.Generator(np.random.PCG64(seed)).random(num_blocks + BLOCK)
    draws = -np.log(1.0 - uniforms)
    padded = np.append(weights, np.zeros(num_blocks * BLOCK - size)).reshape(num_blocks, BLOCK)
    blocks = padded.sum(axis=1) / draws[:num_blocks]
    inside = padded[chosen // BLOCK] / draws[num_blocks:]
    assert blocks[chosen // BLOCK] >= blocks.max() * (1 - 1e-4)
    assert inside[chosen % BLOCK] >= inside.max() * (1 - 1e-4)


def test_a_row_s_draws_are_its_own_whichever_rows_are_beside_it() -> None:
    """Other rows, places, temperatures and greedy rows; the request's fourth token as well as its first."""
    logits_BV = example_logits(40, size=700)
    temperatures = [(0.0, 0.7, 1.0, 1.3)[i % 4] for i in range(40)]
    together = [request_stream(i) for i in range(40)]
    steps = [sample(logits_BV, temperatures, together) for _ in range(4)]
    for row in (0, 1, 2, 3, 17, 39):
        stream = request_stream(row)
        for ids, logprobs, entropies in steps:
            alone = sample(logits_BV[row : row + 1], [temperatures[row]], [stream])
            assert alone == ([ids[row]], [logprobs[row]], [entropies[row]])


def test_greedy_takes_the_likeliest_and_an_impossible_id_is_never_drawn() -> None:
    logits_V = torch.full((300,), float("-inf"))
    logits_V[torch.tensor([7, 290])] = torch.tensor([0.0, 0.1])
    assert sample(logits_V[None], [0.0], [request_stream(0)])[0] == [290]
    assert set(drawn(logits_V, 1_000)) == {7, 290}


class _Zeros(np.random.Generator):
    """A stream of nothing but the smallest uniform draw."""

    def random(  # type: ignore[override]
        self, *arguments: object, out: np.ndarray, **options: object
    ) -> np.ndarray:
        out[:] = 0.0
        return out


@pytest.mark.parametrize("size", [256, 300])
def test_a_draw_of_zero_divides_nothing_and_ties_go_to_the_first(size: int) -> None:
    """Equal keys everywhere: the first id of all wins, never one behind the end of the last block."""
    stream = _Zeros(np.random.PCG64(0))
    assert bool((exponentials([stream], size) > 0).all())
    ids, logprobs, _ = sample(torch.zeros(1, size), [1.0], [stream])
    assert ids == [0] and logprobs == pytest.approx([-np.log(size)])
    only_last = torch.full((1, size), -200.0)  # probabilities of all others underflow to 0
    only_last[0, -1] = 0.0
    assert sample(only_last, [1.0], [stream])[0] == [size - 1]


def test_noise_of_the_size_of_rounding_hardly_ever_changes_a_draw() -> None:
    """The rule before crosses one of 49,152 borders in four of a hundred draws; an argmax has none to
    cross.
    """
    logits_BV = example_logits(32)
    before, now = (num_changed(rule, logits_BV, noise=1e-5, num_rounds=12) for rule in (inverse_cdf, sample))
    assert before >= 8 and now <= 1


def reference_truncation(weights: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The distribution after top-k and then top-p, in float64, from the definitions."""
    kept = np.zeros_like(weights)
    share, order = 0.0, sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:top_k]
    total = sum(weights[i] for i in order)
    for i in order:
        if top_p is not None and share >= top_p:
            break
        kept[i] = weights[i]
        share += weights[i] / total
    return np.asarray(kept / kept.sum())


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(3, None), (None, 0.7), (4, 0.6), (1, None), (None, 0.01), (99, 1.0)]
)
def test_top_k_and_top_p_limit_what_is_drawn_and_change_no_logprob(
    top_k: int | None, top_p: float | None
) -> None:
    num, temperature = 1_000, 0.7
    logits_V = torch.tensor([0.3, 1.0, -0.5, 1.0, 0.9, -2.0, 0.31])
    stream = request_stream(5)
    rows, cuts = logits_V.expand(num, -1), [(top_k, top_p)] * num
    ids, logprobs, entropies = sample(rows, [temperature] * num, [stream] * num, cuts)
    weights = np.exp(logits_V.double().numpy() / temperature)
    expected = reference_truncation(weights, top_k, top_p)
    counts = np.bincount(ids, minlength=len(expected))
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    error = np.sqrt(expected * (1 - expected) / num)
    assert (np.abs(counts / num - expected) <= 4.5 * error + 1e-12).all()
    # of the whole vocabulary, as without truncation
    whole = np.log(weights / weights.sum())
    assert np.allclose(logprobs, whole[ids], atol=1e-5)
    assert entropies[0] == sample(logits_V[None], [temperature], [request_stream(1)])[2][0]


def test_a_row_without_a_cut_is_drawn_as_before() -> None:
    logits_BV = example_logits(6, size=700)
    temperatures = [0.7, 1.0] * 3
    plain = sample(logits_BV, temperatures, [request_stream(i) for i in range(6)])
    cuts = [(None, None)] * 5 + [(1, None)]
    mixed = sample(logits_BV, temperatures, [request_stream(i) for i in range(6)], cuts)
    assert [column[:5] for column in mixed] == [column[:5] for column in plain]
    assert mixed[0][5] == int(logits_BV[5].argmax())
