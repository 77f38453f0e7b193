"""The beams of one prompt: what one step makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.beam_params import BeamSearchParams
from outpace.core.faults import Contradiction, RowFault
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline
from outpace.core.stats import Metrics
from outpace.engine.beams.beam import Beam
from outpace.engine.beams.best import Best
from outpace.engine.request import Request


class Group:
    """The beams of one prompt, from the prompt alone to the best texts.

    A step takes the most likely continuations of all beams, puts aside those that have ended, and
    goes on with the ``beam_width`` best of the others.
    """

    def __init__(self, request: Request, params: BeamSearchParams, vocabulary: int) -> None:
        """request: the prompt and the options of its texts; it is not played itself."""
        self.request = request
        self.beams = [Beam()]
        self.best = Best(params, request.max_tokens)
        self.error: Exception | None = None
        """Why the search could not go on."""
        self._params = params
        self._vocabulary = vocabulary
        ends = set(request.params.stop_token_ids)
        self._ends = ends if request.params.ignore_eos else ends | set(request.eos_ids)

    @property
    def done(self) -> bool:
        """Whether the search has come to its end."""
        return not self.beams

    def tokens_of(self, beam: Beam) -> list[int]:
        """Returns the tokens of the prompt and of what was written after it."""
        return [*self.request.prompt_ids, *beam.output_ids]

    def fail(self, error: Exception) -> None:
        """Ends the search with an error."""
        self.error, self.beams = error, []

    def step(self, logits: Tensor) -> None:
        """Goes one token further. logits: ``[beams, V']``, of the token after each beam."""
        try:
            logprobs = torch.stack(
                [self._logprobs(beam, row) for beam, row in zip(self.beams, logits, strict=True)]
            )
            self._advance(self._continuations(logprobs))
        except RowFault as error:
            self.fail(error)

    # -- inside --------------------------------------------------------------------------------

    def _logprobs(self, beam: Beam, logits: Tensor) -> Tensor:
        """The log-probabilities ``[V]`` of a beam's next token, as its options change them. They
        are not made to sum to 1 again, as in transformers."""
        wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
        known = logits.to(wide).log_softmax(-1)
        maker = LogitsPipeline([self.request.options], self._vocabulary, logits.device)
        history = History([self.request.prompt_ids], [list(beam.output_ids)])
        try:
            scores = maker.adjusted(known[None, None], Branches.root(1, logits.device), history)
            _ = maker.dead_ends  # on a GPU, this is what raises a fault
        except Contradiction:
            return torch.full_like(known[: self._vocabulary], -torch.inf)  # the others go on
        return scores[0, 0]

    def _continuations(self, logprobs: Tensor) -> list[Beam]:
        """The most likely continuations, the best first: so many that, whichever of them end, as
        many are left as there are beams. logprobs: ``[beams, V]``."""
        before = torch.tensor([beam.logprob for beam in self.beams], dtype=logprobs.dtype)
        total = (logprobs + before.to(logprobs.device)[:, None]).flatten()
        wanted = max(2, 1 + len(self._ends)) * self._params.beam_width
        found = total.topk(min(wanted, total.numel()))
        beams = []
        for value, index in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            parent, token = divmod(index, self._vocabulary)
            ids = (*self.beams[parent].output_ids, token)
            beams.append(Beam(ids, value, parent))
        return [beam for beam in beams if beam.logprob > -torch.inf]

    def _advance(self, found: Sequence[Beam]) -> None:
        """Takes the next beams out of the continuations, which stand in order."""
        if not found and not self.best.texts:
            raise Contradiction(0)
        width, going = self._params.beam_width, []
        for place, beam in enumerate(found):
            text = self._ended(beam)
            if text is None:
                going.append(beam)
            elif text.error is not None:
                return self.fail(text.error)
            elif place < width:
                self.best.add(text, beam.logprob)
        going = going[:width]
        on = bool(going) and self.best.improvable(going[0].logprob, len(going[0].output_ids))
        self.beams = going if on else []
        return None

    def _ended(self, beam: Beam) -> Request | None:
        """The text of a beam, if it has ended."""
        ids = beam.output_ids
        ended = ids[-1] in self._ends or len(ids) >= self.request.max_tokens
        if not ended and not self._may_hold_a_stop_string(beam):
            return None
        text = dataclasses.replace(self.request, output_ids=[], logprobs=[], metrics=Metrics())
        text.extend(ids)
        return text if text.finished else None

    def _may_hold_a_stop_string(self, beam: Beam) -> bool:
        """Whether a beam's text has to be looked at token by token: that takes longer."""
        strings = self.request.params.stop_strings
        if not strings or self.request.decoder is None:
            return False
        text = self.request.decode(beam.output_ids)
        return any(string in text for string in strings)
