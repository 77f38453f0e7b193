"""What was found out about one family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outpace.audit.families.listing import Kind

Verdict = Literal["identical", "refused", "not built", "not finished", "DIFFERENT"]


@dataclass(frozen=True)
class Finding:
    """A family of models, and what speculation does to its texts.

    ``identical``: every text is the plain one. ``refused``: outpace will not decode the model, and
    ``reason`` says why. ``not built``: no tiny model could be made or run here, and why.
    ``not finished``: decoding took more time or memory than it was given, or its process ended.
    ``DIFFERENT``: a text is another one, or decoding failed: a defect of outpace.
    """

    family: str
    """The ``model_type`` of its configuration."""
    model: str
    """The name of its class."""
    verdict: Verdict
    reason: str = ""
    trees: bool = False
    """Whether drafts may be trees."""
    drafted: int = 0
    """Tokens that the noised copies drafted, in chains and trees."""
    accepted: int = 0
    kind: Kind = "causal"
    dtype: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a text is another one, or did not come to its end."""
        return self.verdict in ("DIFFERENT", "not finished")
