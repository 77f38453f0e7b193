"""The best texts of one prompt that have ended, and whether better ones can still come."""

from __future__ import annotations

import math

from outpace.core.beam_params import BeamSearchParams
from outpace.engine.beams.beam import Ended
from outpace.engine.request import Request


class Best:
    """At most ``beam_width`` ended texts, the best first.

    The rules are those of transformers' ``generate``, whose three values of ``early_stopping``
    they implement.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int) -> None:
        """params: resolved. max_tokens: that a text of this prompt can have."""
        self._params = params
        self._penalty = 1.0 if params.length_penalty is None else params.length_penalty
        self._max_tokens = max_tokens
        self.texts: list[Ended] = []

    @property
    def full(self) -> bool:
        """Whether as many texts have ended as are kept."""
        return len(self.texts) == self._params.beam_width

    def add(self, request: Request, logprob: float) -> None:
        """Adds an ended text, if it is one of the best."""
        score = self._score(logprob, len(request.output_ids))
        self.texts.append(Ended(request, logprob, score))
        self.texts.sort(key=lambda text: -text.score)
        del self.texts[self._params.beam_width :]

    def improvable(self, logprob: float, length: int) -> bool:
        """Returns whether the search goes on. logprob, length: of the best unfinished text."""
        if not self.full:
            return True
        if self._params.early_stopping is True:
            return False
        if self._params.early_stopping == "never" and self._penalty > 0:
            length = self._max_tokens
        return self._score(logprob, length) > self.texts[-1].score

    def _score(self, logprob: float, length: int) -> float:
        try:
            weight: float = float(length) ** self._penalty
            return logprob / weight
        except OverflowError:  # so long a text has no weight at all
            return -0.0
        except ZeroDivisionError:  # the same with the opposite sign
            return -math.inf
