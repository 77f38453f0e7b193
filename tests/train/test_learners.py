"""Learners: what one update makes of a network's weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from outpace.train.learners import LEARNERS, Ensemble


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(name: str, wrong: float) -> None:
    net, untouched = network(), network()
    learner, other = (LEARNERS[name](each, 0.1) for each in (net, untouched))
    x = torch.ones(4, 3)
    learner.learn(lambda: (net(x) * wrong).sum())
    assert torch.equal(net.weight, untouched.weight)
    for _ in range(3):
        learner.learn(lambda: net(x).square().mean())
        other.learn(lambda: untouched(x).square().mean())
    assert torch.allclose(net.weight, untouched.weight)
    assert not torch.equal(net.weight, network().weight)
    learned = net.weight.detach().clone()
    learner.learn(lambda: (net(x) * wrong).sum())
    assert torch.equal(net.weight, learned)


def test_an_interrupted_update_leaves_the_weights_that_were_used() -> None:
    net, calls = network(), itertools.count()
    learner = Ensemble(net, 0.1)
    learner.learn(lambda: net(torch.ones(4, 3)).square().mean())
    used = net.weight.detach().clone()

    def interrupted() -> torch.Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return net(torch.ones(4, 3)).square().mean()

    with pytest.raises(KeyboardInterrupt):
        learner.learn(interrupted)
    assert torch.equal(net.weight, used)


def test_the_shares_of_an_ensemble_stay_shares() -> None:
    net = network()
    learner = Ensemble(net, 0.1)
    learner.learn(lambda: net(torch.ones(4, 3)).sum() * math.nan)
    assert learner.shares == pytest.approx([1 / 3] * 3)
