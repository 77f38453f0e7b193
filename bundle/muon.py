"""Muon for stacks of matrices.

`torch.optim.Muon` takes one matrix at a time and orthogonalises in bfloat16, which most CPUs only
emulate; this one works on whole stacks in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalise(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = gradient.shape[-2] > gradient.shape[-1]
    x = gradient.mT if tall else gradient
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(Optimizer):
    """Momentum whose update is orthogonalised and scaled to AdamW's usual size."""

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, float]) -> None:
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - group["momentum"])
        update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))
        scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["decay"])
        parameter.add_(update, alpha=-group["lr"] * scale)
