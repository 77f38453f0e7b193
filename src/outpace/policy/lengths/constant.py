"""The same number of tokens in every round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from outpace.core.options import Options
from outpace.core.request import Request
from outpace.core.trees.tree_shape import TreeShape
from outpace.policy.lengths.base import LengthPolicy


class Constant(LengthPolicy):
    """The same number for every round. shape: of what is drafted, if the drafter leaves it open."""

    name: ClassVar[str] = "constant"
    usual: ClassVar[int] = 5

    def __init__(
        self,
        count: int,
        options: object = None,
        *,
        shape: TreeShape | None = None,
    ) -> None:
        super().__init__(count, options or Options())
        self._shape = shape

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)
