"""Nodes without a distribution: no token is left, or scores are no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outpace.core.faults import Contradiction, ModelFault, NotFinite, RowFault
from outpace.core.logits.branches import Branches
from outpace.core.logits.constraints import RowOptions
from outpace.core.logits.truncation import NEG_INF

_OFF: Mapping[str, Sequence[float | None]] = {
    "temperature": (0, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Numbers that leave the scores as they are."""


class DeadEnds:
    """The nodes of a round's distributions that have none, and why.

    A drafted node may be such an end if the target never reaches it, as after a token that a
    grammar does not know. A root that is one is the row's fault, which is raised.
    """

    def __init__(self, rows: Sequence[RowOptions], vocabulary: int, waits: bool) -> None:
        """waits: whether scores are looked at as soon as they are there. Elsewhere than on a CPU
        that would wait for the device, and they are looked at when somebody asks (`found`)."""
        self._rows, self._vocabulary, self._waits = rows, vocabulary, waits
        self._found: dict[int, dict[int, RowFault]] = {}
        self._silent: set[int] | None = None
        """While distributions are a drafter's: the rows in which its root has none. None: they are
        not."""
        self._unread: list[tuple[Tensor, Tensor, Branches]] = []
        """Distributions that nobody has looked at: the highest scores, the logits and the nodes of
        each."""

    def begin(self) -> None:
        """Forgets those of earlier distributions."""
        self._unread, self._found = [], {}

    def found(self) -> dict[int, dict[int, RowFault]]:
        """Returns, by row, the drafted nodes without a distribution, each with the reason; raises
        the `RowFault` of a root that has none."""
        unread, self._unread = self._unread, []
        for given in unread:
            self._look(*given)
        # Drafters ask for further distributions in the same round: what was found must not change
        # by that.
        return {row: dict(nodes) for row, nodes in self._found.items()}

    def unread(self) -> Tensor | None:
        """Returns whether some node of distributions that nobody has looked at has none: a bool on
        the device; None where that need not be asked, because some are known or all have been
        looked at."""
        if self._found or not self._unread:
            return None
        return torch.stack([(~peaks.isfinite()).any() for peaks, _, _ in self._unread]).any()

    def note(self, node: int, fault: RowFault, at_root: bool) -> None:
        """Enters a node that has no distribution; raises the fault of a root, unless it is a
        drafter's that has no token to offer."""
        if at_root:
            if self._silent is None or isinstance(fault, NotFinite):
                raise fault
            self._silent.add(fault.row)
        self._found.setdefault(fault.row, {}).setdefault(node, fault)

    def check(self, peaks: Tensor, logits: Tensor, branches: Branches) -> bool:
        """Raises the fault of a row whose committed text has no distribution; returns whether
        drafted nodes may have none.

        peaks: ``[B, M]``, the highest score of each node. It is a finite number where there is a
        distribution, since it is not a number where any score is not.
        """
        if not self._waits:
            self._unread.append((peaks, logits, branches))
            return True
        if math.isfinite(float(peaks if peaks.numel() == 1 else peaks.sum())):
            return False
        self._look(peaks, logits, branches)
        return True

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Takes the distributions made inside for one drafter's.

        Its vocabulary may lack every token that a row's options allow. That is no fault of the row:
        the target can go on, and the row has nothing to draft (`limit_draft_counts`).
        """
        before, self._silent = self._silent, set()
        try:
            yield
        finally:
            self._silent = before

    def limit_draft_counts(self, counts: Sequence[int]) -> list[int]:
        """Returns how many tokens each row drafts: ``counts``, but 0 where the drafter's root has
        no distribution, as far as that is known without waiting for the device."""
        silent = self._silent or ()
        return [0 if row in silent else count for row, count in enumerate(counts)]

    def _look(self, peaks: Tensor, logits: Tensor, branches: Branches) -> None:
        for row, node in (~peaks.isfinite()).nonzero().tolist():
            fault = self._fault(row, float(peaks[row, node]), logits[row, node])
            self.note(node, fault, at_root=not bool(branches.valid[row, node].any()))

    def _fault(self, row: int, peak: float, logits: Tensor) -> RowFault:
        """Why a node has no distribution. logits: ``[V']``, what the model made of it."""
        top = float(logits[: self._vocabulary].amax())
        if not math.isfinite(top):
            if self._silent is not None:
                return ModelFault(
                    row,
                    "the drafter's scores of the next token are not finite numbers (the highest is "
                    f"{top}): its weights, or those of the target that it drafts with, are "
                    "damaged, or a dtype overflows; try dtype='float32', or another drafter.",
                )
            return ModelFault(
                row,
                f"the model's scores of the next token are not finite numbers (the highest is "
                f"{top}): its weights are damaged, or its dtype overflows; try dtype='float32'.",
            )
        if peak == NEG_INF:
            return Contradiction(row)
        params = self._rows[row].params
        values = {name: getattr(params, name) for name in _OFF}
        given = [f"{name}={value}" for name, value in values.items() if value not in _OFF[name]]
        given += [name for name in ("logit_bias", "logits_processors") if getattr(params, name)]
        return NotFinite(
            row,
            "the scores of the next token are not finite numbers under these options: choose "
            f"milder values of {', '.join(given)}.",
        )
