"""The figures on held-out text by which a run's checkpoints are compared, and where a run is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.errors import ConfigError


class Metric(ABC):
    """A figure on held-out text, higher being better, and the shares that it is made from."""

    name: ClassVar[str]
    parts: ClassVar[str]
    """What the shares are called in the log."""

    @property
    def key(self) -> str:
        """What the figure is called in the log."""
        return self.name.replace(" ", "_")

    def shares(self, hits: Tensor) -> tuple[float, ...]:
        """Returns the shares of hits ``[..., D]``; one that is NaN does not count."""
        return tuple(hits.flatten(0, -2).nanmean(0).tolist())

    @abstractmethod
    def score(self, hits: Tensor, own: Tensor | None = None) -> float:
        """Returns the figure. own: ``[B, P]`` bool, after which roots the target has written on,
        if not after all."""

    @abstractmethod
    def sentence(self, score: float, shares: Sequence[float]) -> str:
        """Returns what is said at the end of a run."""


class AcceptanceLength(Metric):
    """Tokens per pass of the target that chains of first guesses bring where the target writes the
    text: rounds are run through each text, from its first place on, and each begins after the
    tokens of the one before. A mean over all places would be another figure: a round never begins
    in the middle of what the one before has accepted.
    """

    name: ClassVar[str] = "acceptance length"
    parts: ClassVar[str] = "by_depth"

    def score(self, hits: Tensor, own: Tensor | None = None) -> float:
        """hits: ``[B, P, D]``, by text, place and depth, of all places one after the other. own:
        rounds are run through these parts of the texts only, through each from its first place on.

        >>> AcceptanceLength().score(torch.tensor([[[1, 1], [0, 1], [0, 0], [1, 0]]]))
        2.5
        >>> hits = torch.tensor([[[1, 1], [0, 1], [0, 0], [1, 0]]])
        >>> AcceptanceLength().score(hits, torch.tensor([[False, False, True, True]]))
        1.5
        """
        brought = 1 + hits.cumprod(-1).sum(-1).long()  # [B, P]
        asked = torch.ones_like(brought, dtype=torch.bool) if own is None else own
        first = asked & ~torch.cat([torch.zeros_like(asked[:, :1]), asked[:, :-1]], 1)
        due = torch.zeros_like(brought[:, 0])
        tokens, rounds = torch.zeros_like(due), torch.zeros_like(due)
        for place, here in enumerate(brought.unbind(1)):
            due = due.masked_fill(first[:, place], place)
            begins = (due == place) & asked[:, place]
            due, tokens = due + here * begins, tokens + here * begins
            rounds = rounds + begins
        return float(tokens.sum()) / max(1.0, float(rounds.sum()))

    def sentence(self, score: float, shares: Sequence[float]) -> str:
        by_depth = " ".join(f"{share:.0%}" for share in shares)
        return f"simulated acceptance length {score:.2f}, by depth {by_depth}"


class BalancedAccuracy(Metric):
    """The mean of the shares of both kinds of tokens that are recognised, the right ones and the
    wrong ones: one half for who always gives the same answer."""

    name: ClassVar[str] = "balanced accuracy"
    parts: ClassVar[str] = "by_kind"

    def __init__(self, kinds: tuple[str, str]) -> None:
        """kinds: what the two are called; those of high odds first."""
        self._kinds = kinds

    def shares(self, hits: Tensor) -> tuple[float, ...]:
        for kind, column in zip(self._kinds, hits.unbind(-1), strict=True):
            if bool(column.isnan().all()):
                raise ConfigError(
                    f"none of the {len(hits)} drafted tokens in the held-out text is {kind}, so "
                    "that nothing says how well the two kinds are distinguished: give more text, "
                    "or another text."
                )
        return super().shares(hits)

    def score(self, hits: Tensor, own: Tensor | None = None) -> float:
        shares = self.shares(hits)
        return sum(shares) / len(shares)

    def sentence(self, score: float, shares: Sequence[float]) -> str:
        pairs = zip(shares, self._kinds, strict=True)
        found = " and ".join(f"{share:.0%} of those that are {kind}" for share, kind in pairs)
        return f"balanced accuracy {score:.2f}: of drafted tokens, {found}, are recognised"


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    step: int
    loss: float
    """Mean since the last report, by training text; not a number before the first step."""
    metric: Metric
    """What the next two are: of a drafter the simulated acceptance length."""
    score: float
    """On held-out text; higher is better."""
    shares: tuple[float, ...]
    """What it is made from: of a drafter the share of first guesses that are the target's, by
    depth."""
    tokens: int
    """Tokens of text that were learned from so far."""
    seconds: float

    @property
    def sentence(self) -> str:
        """The same in words."""
        return self.metric.sentence(self.score, self.shares)

    def as_state(self) -> dict[str, Any]:
        """Returns the fields but the metric, which follows from what is trained."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "metric"}

    def as_dict(self) -> dict[str, Any]:
        """Returns it as a line of the log."""
        return {
            "step": self.step,
            "loss": None if math.isnan(self.loss) else self.loss,
            self.metric.key: self.score,
            self.metric.parts: self.shares,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
