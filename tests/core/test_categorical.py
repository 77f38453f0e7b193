"""Draws are by the cumulative sum of the distribution, however it is read."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.core.logits.categorical import BLOCK, SMALL, Blocks, Categorical, CumulativeCategorical

SIZES = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 7]
KINDS = [CumulativeCategorical, Blocks]
ENDS = [2.0**-53, 2.0**-30, 0.25, 0.5, 1 - 2.0**-30, 1 - 2.0**-53]


def sparse(size: int, seed: int) -> list[int]:
    """Small whole weights, most of them 0, with some in the first and the last block."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 9, (size,), generator=generator)
    kept = torch.rand(size, generator=generator) < 20 / size
    listed: list[int] = (weights * kept).tolist()
    return listed if any(listed) else [*listed[:-1], 3]


def draw(kind: type[Categorical], distribution: torch.Tensor, u: float) -> int:
    return int(kind(distribution).draw(torch.tensor([u], dtype=torch.float64)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_uniform_draws_where_the_cumulative_sum_passes_it(
    kind: type[Categorical], size: int, dtype: torch.dtype, scale: float
) -> None:
    weights = sparse(size, seed=size)
    distribution = torch.tensor(weights, dtype=dtype) * scale
    total, below, hair = sum(weights), 0, Fraction(1, 10**12)
    for token, weight in enumerate(weights):
        if weight:
            assert draw(kind, distribution, float(Fraction(below, total) + hair)) == token
            assert draw(kind, distribution, float(Fraction(below + weight, total) - hair)) == token
        below += weight


@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES[2:]),
    seed=st.integers(0, 1000),
    u=st.sampled_from(ENDS) | st.floats(2.0**-53, 1 - 2.0**-53),
    tiny=st.sampled_from([1.0, 1e-12, 1e-25, 1e-300]),
)
def test_nothing_without_mass_is_drawn(
    kind: type[Categorical], size: int, seed: int, u: float, tiny: float
) -> None:
    distribution = torch.tensor(sparse(size, seed), dtype=torch.float64)
    distribution[: size // 2] *= tiny  # whole blocks that hardly have a unit
    assert distribution[draw(kind, distribution, u)] > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_an_urn_without_a_token_is_the_urn_of_what_is_left(
    kind: type[Categorical], size: int, dtype: torch.dtype
) -> None:
    distribution = torch.tensor([sparse(size, seed) for seed in range(3)], dtype=dtype)
    left, categorical, u = (
        distribution.clone(),
        kind(distribution),
        torch.rand(3, 4, dtype=torch.float64),
    )
    for _ in range(5):
        drawn = categorical.draw(u)
        assert drawn.equal(kind(left).draw(u)) or bool((left.sum(-1) == 0).any())
        categorical.remove(drawn[:, :1])
        left.scatter_(1, drawn[:, :1], 0.0)


@pytest.mark.parametrize("size", [4, BLOCK + 3, 3 * BLOCK])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_urn_gives_the_first_token(kind: type[Categorical], size: int) -> None:
    distribution = torch.zeros(2, size)
    distribution[0, 1] = distribution[1, size - 1] = 0.5
    distribution[1, 2] = 1e-30
    categorical, u = kind(distribution), torch.full((2, 1), 0.7, dtype=torch.float64)
    assert categorical.draw(u).tolist() == [[1], [size - 1]]
    categorical.remove(torch.tensor([[1], [size - 1]]))
    assert categorical.draw(u).tolist() == [[0], [2]]
    categorical.remove(torch.tensor([[0], [2]]))
    assert categorical.draw(u).tolist() == [[0], [0]]
    assert (
        distribution[0, 1] == distribution[1, size - 1] == 0.5
    )  # the distribution is the caller's


@pytest.mark.parametrize("size", [3, BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_children_without_replacement_have_the_sequential_distribution(
    kind: type[Categorical], size: int
) -> None:
    """Over an even grid of uniforms the shares of pairs are q(a) q(b) / (1 - q(a))."""
    places = [0, 1, size - 1]
    q, grid = torch.zeros(size, dtype=torch.float64), 40
    q[places] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ticks = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    u = torch.cartesian_prod(ticks, ticks)
    categorical = kind(q.expand(len(u), size))
    first = categorical.draw(u[:, :1])
    categorical.remove(first)
    pairs = torch.cat([first, categorical.draw(u[:, 1:])], 1).tolist()
    for a, b in itertools.permutations(places, 2):
        share = pairs.count([a, b]) / len(pairs)
        assert share == pytest.approx(float(q[a] * q[b] / (1 - q[a])), abs=1 / grid)


@given(st.integers(0, 2**32), st.floats(2.0**-53, 1 - 2.0**-53))
def test_both_kinds_draw_the_same(seed: int, u: float) -> None:
    distribution = torch.randn(3, 2000, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    uniforms = torch.full((3, 2), u, dtype=torch.float64)
    assert (
        CumulativeCategorical(distribution)
        .draw(uniforms)
        .equal(Blocks(distribution).draw(uniforms))
    )


def test_the_kind_goes_by_the_vocabulary_alone() -> None:
    assert isinstance(Categorical.of(torch.ones(64, 100)), CumulativeCategorical)
    assert isinstance(Categorical.of(torch.ones(1, SMALL)), CumulativeCategorical)
    assert isinstance(Categorical.of(torch.ones(1, SMALL + 1)), Blocks)
