"""The losses that a draft model may learn by."""

from __future__ import annotations

import math

import pytest
import torch

from outpace.errors import ConfigError
from outpace.train.losses import LOSSES, find_loss


def probs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(7, 5, generator=generator, dtype=torch.float64).log_softmax(-1) * 1.0


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_nothing_between_equal_distributions_and_something_between_others(
    name: str,
) -> None:
    loss = find_loss(name)
    assert float(loss(probs(0), probs(0)).abs().max()) < 1e-12
    assert float(loss(probs(0), probs(1)).min()) > 0


def test_the_losses_are_what_their_papers_say() -> None:
    log_p, log_q = probs(0), probs(1)
    for row in range(len(log_p)):
        p, q = log_p[row].exp().tolist(), log_q[row].exp().tolist()
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

        def kl(a: list[float], b: list[float]) -> float:
            return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

        expected = {
            "forward_kl": kl(p, q),
            "reverse_kl": kl(q, p),
            "jsd": (kl(p, middle) + kl(q, middle)) / 2,
            "tv": 1 - sum(map(min, p, q)),
        }
        for name, value in expected.items():
            found = float(find_loss(name)(log_p, log_q)[row])
            assert found == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_down_the_gradient_brings_the_distributions_closer(name: str) -> None:
    p, logits = probs(0), probs(1).clone().requires_grad_()
    loss = find_loss(name)(p, logits.log_softmax(-1)).mean()
    loss.backward()
    assert logits.grad is not None
    nearer = (logits - 0.5 * logits.grad).detach().log_softmax(-1)
    assert float(find_loss("tv")(p, nearer).mean()) < float(find_loss("tv")(p, probs(1)).mean())


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_without_any_chance_do_no_harm(name: str) -> None:
    p = torch.tensor([0.0, float("-inf")]).requires_grad_()
    q = torch.tensor([0.2, 0.1], requires_grad=True)
    loss = find_loss(name)(p.detach(), q.log_softmax(-1))
    loss.backward()
    assert q.grad is not None
    if name != "reverse_kl":  # which is infinite there, and says so
        assert bool(torch.isfinite(q.grad).all())
        assert math.isfinite(float(loss.detach()))


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'forward_kl'"):
        find_loss("forwardkl")
