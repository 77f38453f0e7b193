"""Keyed streams are functions, uniform and independent; drawing from a distribution never leaves
it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outpace.core.rng import (
    FEW,
    Role,
    _unit_,
    inverse_cdf,
    seeds_of_stream,
    uniform,
    uniforms,
)
from outpace.input_processor import SEED_STEP

UNLIKELY = 1e-4
"""The keys are fixed, so each test passes always or never; a sound stream fails one in 10,000."""


def stream(seed: int, position: int, role: Role, count: int) -> Tensor:
    return uniform(torch.tensor(seed), torch.tensor(position), role, count)


# -- functions of the key ------------------------------------------------------------------------


def test_the_same_key_draws_the_same() -> None:
    first = stream(3, 5, Role.DRAFT, 8)
    torch.rand(10)
    assert torch.equal(first, stream(3, 5, Role.DRAFT, 8))


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state()
    stream(3, 5, Role.DRAFT, 8)
    stream(3, 5, Role.TOKEN, FEW + 1)
    assert torch.equal(before, torch.get_rng_state())


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20)), min_size=1))
def test_a_row_draws_what_it_draws_alone(keys: list[tuple[int, int]]) -> None:
    seeds, positions = torch.tensor(keys).T
    together = uniform(seeds, positions, Role.STOP, 3)
    alone = torch.stack([stream(seed, position, Role.STOP, 3) for seed, position in keys])
    assert torch.equal(together, alone)


def test_seeds_and_positions_broadcast() -> None:
    seeds, positions = torch.tensor([[1], [2]]), torch.tensor([[10, 11, 12]])
    table = uniform(seeds, positions, Role.NEXT, 2)
    assert table.shape == (2, 3, 2)
    for row, column in itertools.product(range(2), range(3)):
        assert torch.equal(table[row, column], stream(row + 1, column + 10, Role.NEXT, 2))


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_no_two_texts_of_a_request_have_a_stream_in_common_in_any_lane(seed: int) -> None:
    """What one drafter draws for one of the n texts, no drafter draws for another of them."""
    texts = [(seed + index * SEED_STEP) % 2**63 for index in range(40)]
    streams = [
        seeds_of_stream(torch.tensor(texts), random_stream).tolist() for random_stream in range(5)
    ]
    assert len(set(itertools.chain(*streams))) == 40 * 5


def test_asking_for_more_draws_does_not_change_the_first() -> None:
    assert torch.equal(stream(1, 2, Role.DRAFT, 100)[:7], stream(1, 2, Role.DRAFT, 7))


@pytest.mark.parametrize("roles", [(Role.DRAFT,), (Role.STOP, Role.NEXT)])
@pytest.mark.parametrize("rows", [1, 3])
def test_few_numbers_are_those_of_many(roles: tuple[Role, ...], rows: int) -> None:
    seeds, positions = torch.tensor([7, -3, 1 << 62])[:rows], torch.tensor([3, 1, 100_000])[:rows]
    count = FEW // (rows * len(roles))
    more = uniforms(seeds, positions, roles, count + 1)
    assert uniforms(seeds, positions, roles, count).equal(more[..., :count])
    assert uniforms(seeds[0], positions[0], roles, 2).equal(more[0, :, :2])


def test_the_streams_are_those_of_every_release() -> None:
    # A text with a seed is a promise. Change these only with a note to users.
    drawn = [
        float(stream(seed, 17, role, 2)[1]) for seed, role in ((0, Role.DRAFT), (9, Role.NEXT))
    ]
    assert drawn == [0.028214587486368736, 0.6228115652955993]


@pytest.mark.parametrize("bits", [0, -1, 2**63 - 1, -(2**63), 1, 2**62])
def test_uniforms_are_strictly_inside(bits: int) -> None:
    assert 0 < float(_unit_(torch.tensor([bits]), torch.tensor([0]))) < 1


# -- uniform and independent ---------------------------------------------------------------------

COUNT = 20_000


def along(what: str) -> Tensor:
    """Returns many draws that differ in one part of the key only."""
    many, one = torch.arange(COUNT), torch.tensor(1)
    if what == "index":
        return uniform(one, one, Role.DRAFT, COUNT)
    if what == "position":
        return uniform(one, many, Role.DRAFT, 1)[..., 0]
    return uniform(many, one, Role.DRAFT, 1)[..., 0]


@pytest.mark.parametrize("what", ["index", "position", "seed"])
def test_draws_are_uniform_along_each_part_of_the_key(what: str) -> None:
    assert stats.kstest(along(what).numpy(), "uniform").pvalue > UNLIKELY


@pytest.mark.parametrize("what", ["index", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 8])
def test_neighbours_along_the_key_are_independent(what: str, lag: int) -> None:
    draws = along(what)
    assert_independent(draws[:-lag], draws[lag:])


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(Role, 2)])
def test_roles_are_independent(one: Role, other: Role) -> None:
    seeds, positions = torch.arange(200)[:, None], torch.arange(100)
    pair = [uniform(seeds, positions, role, 1).flatten() for role in (one, other)]
    assert_independent(*pair)


def test_the_next_position_does_not_repeat_another_role() -> None:
    # Position and role share one word of the key: none of the pairs may collide.
    keys = itertools.product(range(40), Role)
    drawn = torch.stack([stream(1, position, role, 1) for position, role in keys])
    assert drawn.unique().numel() == drawn.numel()


def test_seed_and_position_are_not_interchangeable() -> None:
    seeds, positions = torch.arange(150)[:, None], torch.arange(150)
    table = uniform(seeds, positions, Role.DRAFT, 1)[..., 0]
    assert table.unique().numel() == table.numel()
    upper = torch.triu_indices(150, 150, 1)
    assert_independent(table[upper[0], upper[1]], table[upper[1], upper[0]])


def assert_independent(x: Tensor, y: Tensor) -> None:
    """Fails for pairs that are correlated or not spread evenly over an 8 x 8 grid."""
    correlation = stats.pearsonr(x.numpy(), y.numpy())
    assert correlation.pvalue > UNLIKELY, f"correlation {correlation.statistic:.4f}"
    cell = (x * 8).long() * 8 + (y * 8).long()
    observed = torch.bincount(cell, minlength=64)
    grid = stats.chisquare(observed.numpy())
    assert grid.pvalue > UNLIKELY, f"chi-square {grid.statistic:.1f} with 63 degrees of freedom"


# -- drawing from a distribution -------------------------------------------------------------------


def pick(distribution: list[float], u: float, dtype: torch.dtype = torch.float64) -> int:
    return int(
        inverse_cdf(torch.tensor(distribution, dtype=dtype), torch.tensor(u, dtype=torch.float64))
    )


ENDS = [2.0**-53, 2.0**-30, 0.25, 0.5, 1 - 2.0**-30, 1 - 2.0**-53]
MASSES = st.lists(
    st.sampled_from([0.0, 0.0, 1.0, 0.1, 1e-3, 1e-9, 3.7, 1e-300, 1e8]), min_size=1, max_size=12
).filter(any)


@given(MASSES, st.sampled_from(ENDS) | st.floats(2.0**-53, 1 - 2.0**-53))
def test_a_token_of_no_mass_is_never_drawn(distribution: list[float], u: float) -> None:
    assert distribution[pick(distribution, u)] > 0


@given(MASSES, st.sampled_from(ENDS))
def test_a_float32_distribution_never_draws_a_token_of_no_mass(
    distribution: list[float], u: float
) -> None:
    single = torch.tensor([0.0, *distribution, 1e-20, 0.0], dtype=torch.float32)
    assert float(single[pick(single.tolist(), u, torch.float32)]) > 0


@pytest.mark.parametrize("u", ENDS)
@pytest.mark.parametrize("mass", [1e-30, 1.0, 1e30])
def test_the_only_token_is_drawn_between_zeros(u: float, mass: float) -> None:
    assert pick([0.0, 0.0, mass, 0.0], u) == 2


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.sampled_from([1.0, 0.125, 3.0, 1e-20]),
)
def test_the_share_of_uniforms_that_draw_a_token_is_its_mass(
    weights: list[int], scale: float
) -> None:
    # The draw is a step function of u with steps at the partial sums: so look just inside each.
    total, below, hair = sum(weights), 0, 1e-12
    for token, weight in enumerate(weights):
        if weight:
            distribution = [w * scale for w in weights]
            assert pick(distribution, below / total + hair) == token
            assert pick(distribution, (below + weight) / total - hair) == token
        below += weight


def test_distributions_of_any_leading_shape_are_drawn_row_by_row() -> None:
    probs = torch.rand(3, 4, 6, dtype=torch.float64)
    u = torch.rand(3, 4, dtype=torch.float64)
    drawn = inverse_cdf(probs, u)
    assert drawn.shape == (3, 4)
    for row, column in itertools.product(range(3), range(4)):
        assert int(drawn[row, column]) == pick(probs[row, column].tolist(), float(u[row, column]))


def test_the_distribution_is_left_as_it_was() -> None:
    distribution = torch.rand(5, dtype=torch.float64)
    kept = distribution.clone()
    inverse_cdf(distribution, torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(distribution, kept)
