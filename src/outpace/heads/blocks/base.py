"""What heads that guess a whole block of tokens in one pass have in common.

Such a head is a small decoder over the text and a block of masks behind it. Entry i of a text is
made of the target's states at token i and stays as it is. The block, the root and as many masks as
tokens are guessed, attends to the entries before the root and, in both directions, to itself. What
comes out at a mask says which token stands there, whatever stands at the others: the distributions
of a block follow from the text alone.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from outpace.heads.attending.base import Entries
from outpace.heads.base import Head, Shared


class BlockHead(Head):
    """Guesses all tokens behind the root at once, from all of a text."""

    recipe: ClassVar[str] = "block"

    @property
    def depths_at_once(self) -> int:
        return self.config.depths

    @abstractmethod
    def begin(self, rows: int) -> Entries:
        """Returns no entries of n rows."""

    @abstractmethod
    def entries(self, states: Tensor, positions: Tensor) -> Entries:
        """Returns the entries of a text, to which blocks attend.

        states: ``[B, W, len(layers) H]``, the target's at W tokens; positions: ``[B, W]``, the
        numbers of the tokens in their texts, from 0.
        """

    @abstractmethod
    def block(
        self, roots: Tensor, positions: Tensor, before: Entries, visible: Tensor, shared: Shared
    ) -> Tensor:
        """Returns the logits ``[B, A, K, V']`` of the K tokens behind each of A roots, K being
        ``config.depths``.

        roots: ``[B, A]``, tokens of the target; positions: ``[B, A]``, their numbers in their
        texts. visible: ``[B, A, L]`` bool, which of the L entries before each of them attends to.
        """
