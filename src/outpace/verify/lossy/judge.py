"""Judge decoding: a linear head on the target's embedding says whether a token is right as it is.

Bachmann et al. 2025, "Judge decoding: faster speculative sampling requires going beyond model
alignment" (arXiv 2501.19309).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import needed, option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.heads.classifiers.base import Classifier, load_classifier
from outpace.heads.classifiers.judge import Judge
from outpace.heads.classifiers.origin import Origin
from outpace.verify.base import Rule, at_drafted, drafted_mass, first_failure, ratio
from outpace.verify.evidence import RuleNeeds
from outpace.verify.lossless.token import residual_next
from outpace.verify.options import require


@dataclass(frozen=True, eq=False)
class JudgeHead:
    """sigmoid(weight . h + bias): how likely a token with target state h is right as it is."""

    weight: Tensor  # [H]
    bias: float = 0.0
    origin: Origin | None = None
    """The target that it was trained for, where that is known."""

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 1:
            raise ConfigError(
                "the weight of a JudgeHead must be a tensor of one dimension, with a number for "
                f"each of a target's hidden state, not {shown(self.weight)}."
            )

    def score(self, embedding: Tensor) -> Tensor:
        """Returns ``[...]`` in (0, 1). embedding: ``[..., H]``."""
        if len(self.weight) != embedding.shape[-1]:
            raise ConfigError(
                f"the judge reads hidden states of {len(self.weight)} numbers, and those of this "
                f"target have {embedding.shape[-1]}: give a head for this target."
            )
        weight = self.weight.to(embedding)
        return torch.sigmoid((embedding @ weight).double() + self.bias)

    def save(self, path: str) -> None:
        """Writes the head to a file that `load` reads."""
        torch.save({"weight": self.weight, "bias": self.bias}, path)

    @classmethod
    def load(cls, path: str) -> JudgeHead:
        """Returns the head that ``outpace train judge`` wrote to a folder or `save` to a file;
        ``ConfigError`` if there is none."""
        if Path(path).is_dir():
            return cls.of(load_classifier(path, Judge.kind))
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return cls(found["weight"], float(found["bias"]))
        # torch raises all but the first two for files that are empty, cut off or of another kind.
        except (
            OSError,
            ValueError,
            EOFError,
            LookupError,
            RuntimeError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            raise ConfigError(
                f"no judge head in {path!r}: train one with 'outpace train judge'."
            ) from error

    @classmethod
    def of(cls, network: Classifier) -> JudgeHead:
        """Returns a trained judge as it is used."""
        assert isinstance(network, Judge)
        linear = network.linear
        return cls(linear.weight.detach()[0], float(linear.bias.detach()), network.origin)

    @classmethod
    def fit(
        cls, embeddings: Tensor, right: Tensor, ridge: float = 1e-3, steps: int = 100
    ) -> JudgeHead:
        """Returns the head that separates right from wrong tokens, each kind weighing one half,
        however many there are of it.

        embeddings: ``[T, H]``; right: ``[T]`` bool. Logistic regression by Newton's method.
        """
        if not bool(right.any()) or bool(right.all()):
            raise ConfigError("a judge head can only be fitted to tokens both right and wrong.")
        x = torch.cat([embeddings.double(), torch.ones_like(embeddings[:, :1]).double()], 1)
        y = right.double()
        each = torch.where(right, 0.5 / y.sum(), 0.5 / (1 - y).sum())  # [T]
        found = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
        penalty = ridge * torch.eye(len(found), dtype=x.dtype, device=x.device)
        for _ in range(steps):
            chance = torch.sigmoid(x @ found)
            gradient = x.T @ (each * (chance - y)) + ridge * found
            curve = (x * (each * chance * (1 - chance))[:, None]).T @ x + penalty
            move = torch.linalg.solve(curve, gradient)
            found = found - move
            if float(move.abs().max()) < 1e-9:
                break
        return cls(found[:-1], float(found[-1]))


@dataclass(frozen=True)
class JudgeRule(Rule):
    """Accept a token if the judge does, or if the token rule does.

        a_i = 1 if score(h_i) > threshold, else min(1, p_i(x_i) / q_i(x_i))
        next = norm([p - q]_+) after a failure, p after the last token

    h_i is the target's last hidden state at the drafted token (the paper takes it before the final
    norm, transformers gives it after). Lossy; exact with threshold 1, because the judge then
    accepts nothing. `outpace train judge` writes the head to a folder, which is what is given here;
    one of another target is refused. `JudgeHead.fit` makes one from states and labels of your own,
    to be given as it is or as a file that `JudgeHead.save` wrote.
    """

    head: JudgeHead | str | os.PathLike[str] | None = needed(
        "The folder that 'outpace train judge' wrote for this target."
    )
    threshold: float = option(
        0.5, "A token passes if the judge's score is above this; 1 is lossless."
    )

    name: ClassVar[str] = "judge"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "threshold", self.threshold, 0, 1, above=False)
        if isinstance(self.head, (str, os.PathLike)):
            object.__setattr__(self, "head", JudgeHead.load(os.fspath(self.head)))
        elif not isinstance(self.head, JudgeHead):
            raise ConfigError(
                "verify='judge' needs head: the folder that 'outpace train judge' wrote for this "
                "target, or a JudgeHead."
            )

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(states=(-1,))

    def recognise(self, model: Callable[[], Origin]) -> None:
        assert isinstance(self.head, JudgeHead)
        if self.head.origin is not None:
            self.head.origin.check(model(), "the judge")

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        assert isinstance(self.head, JudgeHead)
        if self.evidence.states is None:
            raise ConfigError(
                "verify='judge' needs evidence.states in every round: rule.given(...)."
            )
        judged = self.head.score(self.evidence.states)[:, 1:] > self.threshold  # [B, N]
        accept = ratio(at_drafted(p, proposal), drafted_mass(proposal, torch.float64))
        return first_failure(torch.where(judged, 1.0, accept), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)
