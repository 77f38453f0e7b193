"""The optimum by prefixes is the optimum over all sets, and over all rules."""

import itertools

import pytest
import torch
from torch import Tensor

from outpace.audit.gate.oracle import best_acceptance, deterministic_acceptance
from outpace.audit.gate.world import make_world


def by_brute_force(p: Tensor, q: Tensor, drafts: int, replacement: bool) -> float:
    """min over all sets S of p(S) + 1 - P(all drafts in S)."""
    vocabulary = range(len(p))
    best = 1.0
    for size in range(len(p) + 1):
        for chosen in itertools.combinations(vocabulary, size):
            inside = 0.0
            for tokens in itertools.product(chosen, repeat=drafts):
                chance, left = 1.0, q.clone()
                for token in tokens:
                    total = float(left.sum())
                    chance *= float(left[token]) / total if total else 1 / len(chosen)
                    if not replacement:
                        left[token] = 0
                inside += chance
            best = min(best, float(p[list(chosen)].sum()) + 1 - inside)
    return best


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("replacement", [True, False])
def test_prefixes_are_enough(drafts: int, replacement: bool) -> None:
    world = make_world(20, 4, 0, seed=3)
    found = best_acceptance(world.p[:, 0], world.q[:, 0], drafts, replacement=replacement)
    for pair in range(world.pairs):
        p, q = world.p[pair, 0], world.q[pair, 0]
        if not replacement and int((q > 0).sum()) < drafts:
            continue  # the brute force does not know what an exhausted q draws
        assert found[pair].item() == pytest.approx(by_brute_force(p, q, drafts, replacement))


def test_one_draft_is_the_overlap() -> None:
    world = make_world(20, 5, 0, seed=4)
    p, q = world.p[:, 0], world.q[:, 0]
    overlap = torch.minimum(p, q).sum(-1)
    assert torch.allclose(best_acceptance(p, q, 1), overlap)
    assert torch.allclose(best_acceptance(p, q, 1, replacement=False), overlap)


def test_points_are_accepted_at_most_as_often_as_the_target_says_them() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    assert deterministic_acceptance(p, torch.tensor([[0, 2]])).item() == pytest.approx(0.7)
    assert deterministic_acceptance(p, torch.tensor([[1, 1]])).item() == pytest.approx(0.3)
