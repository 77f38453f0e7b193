"""Keyed noise draws from the distribution, and picks the same token where it is made for few of
them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outpace.core import gumbel as module
from outpace.core.gumbel import gumbel, gumbel_sample
from outpace.core.rng import FEW, Role, _unit_, uniform

COUNT = 20_000
UNLIKELY = 1e-4
"""The keys are fixed, so a test passes always or never; sound noise fails one in 10,000."""


def picked(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """What the definition says: noise for all tokens."""
    noise = gumbel(seeds[:, None], positions, probs.shape[-1])
    return (noise + probs.double().log()).argmax(-1)


def test_noise_is_finite_at_both_ends() -> None:
    u = _unit_(torch.tensor([0, -1]), torch.tensor([0, 0]))
    assert bool((-torch.log(-torch.log(u))).isfinite().all())


def test_noise_is_that_of_the_token_role() -> None:
    one = torch.tensor(2), torch.tensor(3)
    u = uniform(*one, Role.TOKEN, 5)
    torch.testing.assert_close(gumbel(*one, 5), -(-u.log()).log())


def test_it_draws_from_the_distribution() -> None:
    distribution = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0], dtype=torch.float64)
    noise = gumbel(torch.tensor(11), torch.arange(COUNT), 5)
    drawn = torch.bincount((distribution.log() + noise).argmax(-1), minlength=5)
    assert drawn[4] == 0
    assert stats.chisquare(drawn[:4].numpy(), distribution[:4].numpy() * COUNT).pvalue > UNLIKELY


@pytest.mark.parametrize("kept", [1, 3, 40, FEW + 500])
def test_noise_for_few_tokens_draws_from_the_distribution(kept: int) -> None:
    """A vocabulary in which only some tokens have mass, or all; grouped, so that each group is
    expected often enough."""
    size, many = FEW + 500, 4_000
    distribution = torch.zeros(size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    distribution[torch.randperm(size, generator=generator)[:kept]] = (
        1.0 / (1 + torch.arange(kept)).double()
    )
    distribution /= distribution.sum()
    drawn = gumbel_sample(
        distribution.expand(1, many, size), torch.tensor([9]), torch.arange(many)[None]
    )[0]
    groups = torch.arange(size) % 7
    seen = torch.bincount(groups[drawn], minlength=7)
    expected = torch.zeros(7, dtype=torch.float64).index_add(0, groups, distribution) * many
    some = expected > 0
    assert int(seen[~some].sum()) == 0
    if some.sum() > 1:
        assert stats.chisquare(seen[some].numpy(), expected[some].numpy()).pvalue > UNLIKELY


@given(
    seed=st.integers(0, 2**62),
    vocabulary=st.sampled_from([1, 2, FEW, FEW + 1, 700, 5_000]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    sharpness=st.sampled_from([0.0, 0.1, 1.0, 8.0, 300.0]),
    share=st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_tokens_are_those_of_noise_for_all(
    seed: int,
    vocabulary: int,
    shape: tuple[int, int],
    sharpness: float,
    share: float,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**32)
    logits = torch.randn(*shape, vocabulary, generator=generator, dtype=dtype) * sharpness
    gone = torch.rand(*shape, vocabulary, generator=generator) > share
    probs = logits.softmax(-1).masked_fill(gone, 0)  # some have no mass left at all
    seeds = torch.arange(shape[0]) + seed
    positions = torch.arange(shape[1]).expand(shape) + seed % 1000
    assert torch.equal(gumbel_sample(probs, seeds, positions), picked(probs, seeds, positions))


def test_few_logarithms_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the whole is for; without this, noise for all tokens would pass the other tests."""
    made = []
    inner = module._gumbel_

    def counted(uniforms: Tensor) -> Tensor:
        made.append(uniforms.numel())
        return inner(uniforms)

    monkeypatch.setattr(module, "_gumbel_", counted)
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(2, 4, 20_000, generator=generator)
    probs *= probs > 0.999
    gumbel_sample(probs, torch.tensor([1, 2]), torch.arange(8).view(2, 4))
    assert sum(made) < probs.numel() / 500
