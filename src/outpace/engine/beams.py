"""Beam search: the groups of several prompts, side by side in the rows of one target."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.beam_params import BeamSearchParams
from outpace.core.faults import Contradiction, RowFault
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline
from outpace.core.proposal import Proposal
from outpace.core.stats import Metrics
from outpace.engine.request import EngineRequest
from outpace.errors import PromptError, UnsupportedModel
from outpace.targets.base import PromptInputs, ScoreInputs, Target


@dataclass(frozen=True, eq=False)
class Beam:
    """An unfinished text: what was written, and how likely it is."""

    output_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The sum over its tokens."""
    parent: int = 0
    """The number, among the beams of the step before, of the one that it continues."""


@dataclass(frozen=True, eq=False)
class FinishedBeam:
    """A text that has ended, and its place among the others."""

    request: EngineRequest
    logprob: float
    """The sum over its tokens."""
    score: float
    """The same, divided by the text's length to the power of the length penalty."""


class BeamHypotheses:
    """At most ``beam_width`` ended texts, the best first.

    The rules are those of transformers' ``generate``, whose three values of ``early_stopping``
    they implement.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int) -> None:
        """params: resolved. max_tokens: that a text of this prompt can have."""
        self._params = params
        self._penalty = 1.0 if params.length_penalty is None else params.length_penalty
        self._max_tokens = max_tokens
        self.texts: list[FinishedBeam] = []

    @property
    def full(self) -> bool:
        """Whether as many texts have ended as are kept."""
        return len(self.texts) == self._params.beam_width

    def add(self, request: EngineRequest, logprob: float) -> None:
        """Adds an ended text, if it is one of the best."""
        score = self._score(logprob, len(request.output_ids))
        self.texts.append(FinishedBeam(request, logprob, score))
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


class BeamGroup:
    """The beams of one prompt, from the prompt alone to the best texts.

    A step takes the most likely continuations of all beams, puts aside those that have ended, and
    goes on with the ``beam_width`` best of the others.
    """

    def __init__(self, request: EngineRequest, params: BeamSearchParams, vocabulary: int) -> None:
        """request: the prompt and the options of its texts; it is not run itself."""
        self.request = request
        self.beams = [Beam()]
        self.best = BeamHypotheses(params, request.max_tokens)
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
            self._advance(logprobs)
        except RowFault as error:
            self.fail(error)

    # -- inside --------------------------------------------------------------------------------

    def _logprobs(self, beam: Beam, logits: Tensor) -> Tensor:
        """The log-probabilities ``[V]`` of a beam's next token, as its options change them. They
        are not made to sum to 1 again, as in transformers."""
        wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
        known = logits.to(wide).log_softmax(-1)
        pipeline = LogitsPipeline([self.request.options], self._vocabulary, logits.device)
        history = History([self.request.prompt_ids], [list(beam.output_ids)])
        try:
            scores = pipeline.process_logits(
                known[None, None], Branches.root(1, logits.device), history
            )
            _ = pipeline.dead_ends  # on a GPU, this is what raises a fault
        except Contradiction:
            return torch.full_like(known[: self._vocabulary], -torch.inf)  # the others go on
        return scores[0, 0]

    def _continuations(self, logprobs: Tensor, most: int) -> list[Beam]:
        """The ``most`` likeliest continuations, the best first. logprobs: ``[beams, V]``."""
        before = torch.tensor([beam.logprob for beam in self.beams], dtype=logprobs.dtype)
        total = (logprobs + before.to(logprobs.device)[:, None]).flatten()
        found = total.topk(min(most, total.numel()))
        beams = []
        for value, index in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            parent, token = divmod(index, self._vocabulary)
            ids = (*self.beams[parent].output_ids, token)
            beams.append(Beam(ids, value, parent))
        return [beam for beam in beams if beam.logprob > -torch.inf]

    def _advance(self, logprobs: Tensor) -> None:
        """Takes the next beams out of the likeliest continuations. logprobs: ``[beams, V]``.

        Of a beam's continuations one for each end token ends it. Any number may end with a stop
        string: then more are looked at until as many go on as there are beams. At the limit of
        tokens all end.
        """
        width = self._params.beam_width
        most = max(2, 1 + len(self._ends)) * width
        last = len(self.beams[0].output_ids) + 1 >= self.request.max_tokens
        while True:
            found = self._continuations(logprobs, most)
            texts = [self._ended(beam) for beam in found]
            going = [beam for beam, text in zip(found, texts, strict=True) if text is None]
            broken = any(text is not None and text.error is not None for text in texts)
            if last or broken or len(going) >= width or len(found) < most:
                break
            most *= 2
        if not found and not self.best.texts:
            raise Contradiction(0)
        for place, (beam, text) in enumerate(zip(found, texts, strict=True)):
            if text is None:
                continue
            if text.error is not None:
                return self.fail(text.error)
            if place < width:
                self.best.add(text, beam.logprob)
        going = going[:width]
        on = bool(going) and self.best.improvable(going[0].logprob, len(going[0].output_ids))
        self.beams = going if on else []
        return None

    def _ended(self, beam: Beam) -> EngineRequest | None:
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


@dataclass(frozen=True, eq=False)
class _Row:
    """What a row of the target holds: all tokens of a beam but the last."""

    group: BeamGroup
    beam: Beam


class BeamSearch:
    """Searches for the texts of several prompts, as many at once as the target has rows for.

    A prompt is read once, in one row. When a beam goes on in several ways, the row that it has is
    forked; what one beam alone goes on with stays where it is. The rows of a beam that nothing
    goes on from, and those of a prompt whose search is over, are free at once.
    """

    def __init__(
        self, target: Target, groups: Iterable[BeamGroup], width: int, tokens_at_once: int
    ) -> None:
        """target: nobody else uses its rows. width: rows that one prompt may need.
        tokens_at_once: about this many tokens of prompts are read before the next pass is begun."""
        self._target = target
        self._width = width
        self._tokens_at_once = tokens_at_once
        self._waiting = deque(groups)
        self._rows: list[_Row] = []

    @torch.inference_mode()
    def step(self) -> None:
        """Reads a part of the prompts that are not read yet or, if all are, goes one token further
        in all texts."""
        with self._target.step_context():
            self._step()

    def _step(self) -> None:
        self._admit()
        if self._target.num_ready_rows < self._target.num_rows:
            self._target.prefill(self._tokens_at_once)
        if self._rows and self._target.num_ready_rows == self._target.num_rows:
            logits, scored = self._score(), self._by_group()
            for group, rows in scored.items():
                group.step(logits[rows])
            self._follow(scored)

    def _admit(self) -> None:
        """Lets waiting prompts in, as long as there is room for all the beams that they may get."""
        running = len(self._by_group())
        while self._waiting and (running + 1) * self._width <= self._target.max_rows:
            group = self._waiting.popleft()
            request = group.request
            inputs = PromptInputs(request.prompt_ids, source=request.source, media=request.media)
            try:
                self._target.admit(inputs)
            except (PromptError, UnsupportedModel) as error:
                group.fail(error)
                continue
            self._rows.append(_Row(group, group.beams[0]))
            running += 1

    def _by_group(self) -> dict[BeamGroup, list[int]]:
        """The rows of each group, in the order of its beams."""
        found: dict[BeamGroup, dict[Beam, int]] = {}
        for number, row in enumerate(self._rows):
            found.setdefault(row.group, {})[row.beam] = number
        return {group: [at[beam] for beam in group.beams] for group, at in found.items()}

    def _score(self) -> Tensor:
        """The logits ``[rows, V']`` of the token after each beam."""
        lengths = self._target.lengths
        pending = [
            row.group.tokens_of(row.beam)[length:]
            for row, length in zip(self._rows, lengths, strict=True)
        ]
        nothing = Proposal.empty(len(pending), self._target.device)
        scores = self._target.score(ScoreInputs(pending, nothing.tokens, nothing.tree))
        self._target.commit([()] * len(pending))
        return scores.logits[:, -1]

    def _follow(self, scored: Mapping[BeamGroup, Sequence[int]]) -> None:
        """Gives each of the new beams a row with what the beam that it continues has cached.

        scored: the rows that each group had, in the order of its former beams.
        """
        heirs: dict[int, list[_Row]] = {}  # by row
        for group, rows in scored.items():
            for beam in group.beams:
                heirs.setdefault(rows[beam.parent], []).append(_Row(group, beam))
        staying = sorted(heirs)
        if len(staying) < len(self._rows):
            self._target.retain(staying)
        self._rows = [heirs[row][0] for row in staying]
        for number, row in enumerate(staying):
            for heir in heirs[row][1:]:
                self._target.fork(number, with_output=True)
                self._rows.append(heir)
