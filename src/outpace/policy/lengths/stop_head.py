"""A chain ends once a trained head finds it likely that something in it will be rejected.

Huang et al. 2024, "SpecDec++: boosting speculative decoding via adaptive candidate lengths" (arXiv
2405.19715).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from outpace.core.options import Options, Reads
from outpace.core.proposal import DraftingTerms
from outpace.core.request import Request
from outpace.core.values import shown
from outpace.draft.base import Drafter
from outpace.errors import ConfigError
from outpace.heads.classifiers import Classifier, load_classifier
from outpace.policy.lengths.base import LengthPolicy


def _head(name: str, value: Any) -> Classifier:
    if isinstance(value, (str, os.PathLike)):
        return load_classifier(value, "stop_head")
    if not isinstance(value, Classifier):
        raise ConfigError(
            f"{name} must be the folder that 'outpace train stop_head' wrote for this draft model, "
            f"not {shown(value)}."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class StopHeadOptions(Options):
    """What a user may set."""

    head: Annotated[Any, Reads(_head)]
    """The folder that 'outpace train stop_head' wrote."""
    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    """The chance of any rejection so far above which nothing more is drafted."""


class StopHead(LengthPolicy):
    """Ends a chain once the chance that any of its tokens is rejected is above ``threshold``.

    A token's chance of acceptance comes from the draft model's state at it, which is there when the
    distribution of the next token is. It is looked at before that token is drawn, and all tokens
    that were drawn stay in the draft.
    """

    name: ClassVar[str] = "stop_head"
    stops: ClassVar[bool] = True
    usual: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = StopHeadOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        self._head: Classifier = options.head

    def meet(self, drafter: Drafter) -> None:
        model = drafter.origin()
        if model is None:
            raise ConfigError(
                f"length='stop_head' looks at the hidden states of a draft model, and "
                f"method={drafter.name!r} shows none: use 'draft_model' with a model that has the "
                "target's tokenizer and does not learn online, or another length."
            )
        self._head.origin.check(model, "the stop head")
        if drafter.loaded is not None:
            self._head = self._head.to(drafter.loaded.device)

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        return replace(terms, goes_on=self._watching())

    def _watching(self) -> Callable[[Tensor], Tensor]:
        """What decides in one round, from the states of one token after another."""
        least = 1 - self.options.threshold
        safe: Tensor | None = None  # [B], the chance that nothing was rejected

        @torch.no_grad()
        def goes_on(states: Tensor) -> Tensor:
            nonlocal safe
            if safe is None:  # at the root, which is no part of the draft
                safe = torch.ones_like(states[:, 0], dtype=torch.float64)
            else:
                safe = safe * self._head(states.float()).double().sigmoid()
            return torch.ge(safe, least)

        return goes_on
