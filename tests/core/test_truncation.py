"""What is kept of large vocabularies is what transformers' warpers keep, mostly without sorting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TopKLogitsWarper, TopPLogitsWarper

from outpace.core.logits.truncation import NEG_INF, keep_top_k, keep_top_p

WIDE = 20_000


def scores(kind: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``[6, 1, V]``, whose highest scores are spread over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, 1, WIDE, generator=generator, dtype=torch.float64)
    rank = torch.rand(6, 1, WIDE, generator=generator).argsort(-1) + 1.0
    made = {
        "peaked": 10 - 1.6 * rank.log() + 0.3 * noise,
        "wide": -rank.log() + 0.1 * noise,
        "flat": 0.1 * noise,
        "tied": (10 - 1.6 * rank.log() + 0.3 * noise).round(),
        "equal": torch.zeros_like(noise),
        "few": torch.where(rank < 6, noise, NEG_INF),
        "bfloat16": (10 - 1.2 * rank.log() + 0.3 * noise).bfloat16().double(),
    }
    return made[kind].to(dtype)


KINDS = ["peaked", "wide", "flat", "tied", "equal", "few", "bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_top_p_keeps_what_transformers_keeps(kind: str, dtype: torch.dtype) -> None:
    given = scores(kind, dtype)
    wanted = torch.tensor([0.1, 0.5, 0.9, 0.99, 0.999, 1.0], dtype=torch.float64)
    kept = keep_top_p(given, wanted[:, None, None])
    assert kept.equal(keep_top_p(given, wanted[:, None, None], waits=False))
    for row, mass in enumerate(wanted.tolist()):
        stable = _stable(given[row], mass)
        assert kept[row].equal(stable), (kind, mass)
        if kind not in ("tied", "equal", "bfloat16"):  # its own sort leaves ties as they come
            assert kept[row].equal(TopPLogitsWarper(mass)(None, given[row]))


def _stable(given: Tensor, mass: float) -> Tensor:
    """`TopPLogitsWarper` with a stable sort. given: ``[1, V]``."""
    if mass == 1:
        return given
    ascending, order = given.sort(dim=-1, stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= 1 - mass
    drop[..., -1:] = False
    return given.masked_fill(drop.scatter(1, order, drop), NEG_INF)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_keeps_what_transformers_keeps(kind: str, dtype: torch.dtype) -> None:
    given = scores(kind, dtype)
    wanted = [1, 2, 50, 1000, 5000, WIDE]
    kept = keep_top_k(given, torch.tensor(wanted)[:, None, None], 5000)
    assert kept.equal(keep_top_k(given, torch.tensor(wanted)[:, None, None], 5000, waits=False))
    for row, k in enumerate(wanted):
        assert kept[row].equal(TopKLogitsWarper(k)(None, given[row])), (kind, k)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 66])
@pytest.mark.parametrize("mass", [0.25, 0.5, 0.75])
def test_masses_that_meet_top_p_exactly(size: int, mass: float) -> None:
    given = torch.zeros(1, 1, size, dtype=torch.float64)
    kept = keep_top_p(given, torch.full((1, 1, 1), mass, dtype=torch.float64))
    assert kept[0].equal(_stable(given[0], mass))


class Sorted(TorchDispatchMode):
    """Counts the rows of the whole vocabulary that are sorted."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sort" in str(func) and args[0].shape[-1] == WIDE:
            self.rows += args[0][..., 0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["peaked", "tied", "few", "bfloat16"])
def test_what_the_highest_scores_decide_sorts_no_vocabulary(kind: str) -> None:
    given = scores(kind, torch.float64)
    with Sorted() as found:
        keep_top_p(given, torch.full((6, 1, 1), 0.9, dtype=torch.float64))
        keep_top_k(given, torch.full((6, 1, 1), 50), 50)
    assert found.rows == 0


def test_a_row_is_cut_as_it_is_alone() -> None:
    given = torch.cat([scores("peaked", torch.float32)[:1], scores("flat", torch.float32)[:1]])
    mass = torch.tensor([0.8, 0.95])[:, None, None]
    together = keep_top_p(given, mass)
    for row in range(2):
        assert together[row].equal(keep_top_p(given[row, None], mass[row, None])[0])
