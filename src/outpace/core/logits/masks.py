"""The interface of token masks, such as grammars: which tokens may follow each node of a draft."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from torch import Tensor


class TokenMask(ABC):
    """Says for each node of a draft which tokens may follow it.

    The answer depends on the tokens of the text alone, never on what was asked before. So the
    distribution under a mask is the same in plain decoding and at every node of every draft. A mask
    may remember where it was asked last, to be faster; so each row has one of its own.
    """

    def copy(self) -> Self:
        """Returns the mask for another row."""
        return copy.copy(self)

    @abstractmethod
    def allowed(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Returns ``[M, V]`` bool on the host: what may follow each node.

        output: the committed tokens of the text, without its prompt; paths: the drafted tokens that
        lead to each of M nodes. After a token that it forbids, a mask allows nothing. Where it
        raises an exception it must be able to answer for other texts afterwards.
        """
