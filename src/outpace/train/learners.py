"""Online learning algorithms, which update a drafter's weights from its errors while it is used.

Liu et al. 2023, "Online speculative decoding" (OSD, arXiv 2310.07177): one step of distillation for
each buffer of corrected positions. Qian et al. 2026, "When drafts evolve" (OnlineSPEC, arXiv
2603.12617), sees this as online learning, and takes two more of its algorithms.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, did_you_mean

CLIP = 1.0
"""Largest norm of a gradient."""
RATES = (0.25, 1.0, 4.0)
"""Learning rates of an ensemble, as multiples of the given one."""
MEMORY = 0.8
"""How much of the past losses of an ensemble counts after each update: what was best long ago may
not be any more."""

Loss = Callable[[], Tensor]
"""Computes the loss of a buffer with the weights that the network has."""


class Learner(ABC):
    """Updates the weights of a network, which between two calls has those that are to be used."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        self._weights = [weight for weight in network.parameters() if weight.requires_grad]

    @abstractmethod
    def learn(self, loss: Loss) -> float:
        """Makes one update and returns the loss before it. Gradients that are not finite change
        nothing: the drafter is in use, and one step with them would leave it without a
        distribution."""

    def _optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._weights, learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def _step(self, optimizer: torch.optim.Optimizer, loss: Loss) -> tuple[float, bool]:
        """Makes a step, if the gradients are finite; returns the loss and whether it did."""
        for weight in self._weights:
            weight.grad = None
        found = loss()
        found.backward()  # type: ignore[no-untyped-call]
        finite = bool(torch.nn.utils.clip_grad_norm_(self._weights, CLIP).isfinite())
        if finite:
            optimizer.step()
        for weight in self._weights:
            weight.grad = None
        return float(found.detach()), finite

    def _copied(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for weight, value in zip(self._weights, values, strict=True):
            weight.copy_(value)


class Osd(Learner):
    """One step of AdamW for each buffer."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__(network, learning_rate)
        self._own = self._optimizer(learning_rate)

    def learn(self, loss: Loss) -> float:
        return self._step(self._own, loss)[0]


class Optimistic(Learner):
    """Uses weights that are one step ahead: the next gradient will be like the last one.

    The step itself begins from the weights before that step ahead, with the gradient at the weights
    that were used. So a wrong guess about the next gradient is taken back.
    """

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__(network, learning_rate)
        self._own = self._optimizer(learning_rate)
        self._hint = [torch.zeros_like(weight) for weight in self._weights]

    def learn(self, loss: Loss) -> float:
        used = self._copied()
        before = [value - hint for value, hint in zip(used, self._hint, strict=True)]
        value, made = self._step(self._own, loss)
        if not made:
            return value
        with torch.no_grad():
            self._hint = [new - old for new, old in zip(self._weights, used, strict=True)]
            self._set([old + 2 * hint for old, hint in zip(before, self._hint, strict=True)])
        return value


class Ensemble(Learner):
    """Several learners of different rates; what is used is the mean of their weights.

    Each counts as much as its losses say, on buffers that it had not learned from yet (Hedge): a
    fast one where the text changes, a slow one where it does not.
    """

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__(network, learning_rate)
        self._learners = [self._optimizer(learning_rate * rate) for rate in RATES]
        self._own = [self._copied() for _ in RATES]
        self._losses = [0.0] * len(RATES)

    @property
    def shares(self) -> list[float]:
        """How much each learner counts, the slowest first."""
        best = min(self._losses)
        chances = [math.exp(best - loss) for loss in self._losses]
        return [chance / sum(chances) for chance in chances]

    def learn(self, loss: Loss) -> float:
        shares, losses, used = self.shares, [], self._copied()
        try:
            for number, optimizer in enumerate(self._learners):
                self._set(self._own[number])
                losses.append(self._step(optimizer, loss)[0])
                self._own[number] = self._copied()
        except BaseException:  # also Ctrl-C: drafts go on with what was used
            self._set(used)
            raise
        if not any(map(math.isfinite, losses)):
            self._set(used)
            return math.nan
        worst = max(filter(math.isfinite, losses))  # in the place of no number
        pairs = zip(self._losses, losses, strict=True)
        self._losses = [
            MEMORY * before + (now if math.isfinite(now) else worst) for before, now in pairs
        ]
        columns = zip(*self._own, strict=True)
        self._set([_mean(values, self.shares) for values in columns])
        return sum(share * value for share, value in zip(shares, losses, strict=True))


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    parts = [share * value for share, value in zip(shares, values, strict=True)]
    return torch.stack(parts).sum(0)


LEARNERS: Mapping[str, type[Learner]] = {
    "osd": Osd,
    "optimistic": Optimistic,
    "ensemble": Ensemble,
}


def find_learner(name: str) -> type[Learner]:
    """Returns the learner of this name; ``ConfigError`` with a suggestion if there is none."""
    if name not in LEARNERS:
        raise ConfigError(f"unknown learner {name!r}{did_you_mean(name, LEARNERS)}.")
    return LEARNERS[name]
