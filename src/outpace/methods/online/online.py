"""A drafter that learns from the target's corrections between rounds.

Liu et al. 2023, "Online speculative decoding" (arXiv 2310.07177).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.proposal import Proposal
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Drafter, Round, Rows
from outpace.draft.state import StateFile
from outpace.errors import ConfigError
from outpace.methods.online.options import ALL, OnlineOptions
from outpace.methods.online.student import OnlineStudent
from outpace.methods.online.traces import Trace, Window, batch_of
from outpace.train.learners import find_learner
from outpace.train.teacher import TOP

BACKLOG = 4
"""Updates that may be due at once, while learning has had its share of time: older text is
dropped."""

LOSSES = 1024
"""Losses of updates that are kept."""


class Online(Drafter):
    """Drafts as another drafter does, whose weights it changes when a round is over.

    Drafts come from the weights of their round, and the distribution that travels with them too, so
    that the text's distribution stays the target's. Entries that the drafter has cached with
    earlier weights stay as they are, those of ended texts, too, for as long as a text goes on from
    them: that costs some acceptance, and nothing else.

    Rows whose text must follow from their own history alone (`Request.reproducible`) are decoded
    plainly: what a learning drafter proposes follows from everybody's texts.
    """

    def __init__(
        self, inner: Drafter, student: OnlineStudent, options: OnlineOptions, width: int = 0
    ) -> None:
        """width: of the target's states of one token, for a head that reads them."""
        if student.depths + 1 >= options.window:
            raise ConfigError(
                f"window in 'online' must be more than {student.depths + 1} tokens for this head, "
                f"not {options.window}."
            )
        self._inner, self._student, self._options = inner, student, options
        self._learner = find_learner(options.learner)(student.network, options.learning_rate)
        self._traces = PerRequest(lambda request: Trace(options.window))
        self._windows: list[Window] = []
        self._begun: float | None = None
        self._learned_for = 0.0
        self.learns = True
        self.updates = 0
        """How many there have been."""
        self.losses: deque[float] = deque(maxlen=LOSSES)
        """The losses of the latest updates, each before its update."""
        # What the engine and the controller ask of a drafter, as the inner one says it.
        self.name, self.sampling_kinds, self.trees = inner.name, inner.sampling_kinds, inner.trees  # type: ignore[misc]
        self.needs = replace(inner.needs, softmax_probs=True)
        self.max_draft_tokens, self.shape = inner.max_draft_tokens, inner.shape
        self.candidate_drafters: Mapping[str, Drafter] = MappingProxyType({})
        self.capabilities = replace(
            inner.capabilities,
            skips_reproducible=True,
            stateless=False,  # it remembers its rounds, to learn from them
            saves=False,  # what it has learned is saved as one of the `learners`
        )
        self.loaded = inner.loaded
        self.aux_per_node, self.aux_per_row = inner.aux_per_node, inner.aux_per_row
        self.weight_bytes = inner.weight_bytes + student.nbytes
        self.pass_bytes = inner.pass_bytes
        self._rehearse(width)

    @classmethod
    def build(cls, setup: Any) -> Drafter:
        raise NotImplementedError("it is built around a drafter with the option 'online'")

    @property
    def random_stream(self) -> int:
        return self._inner.random_stream

    @random_stream.setter
    def random_stream(self, random_stream: int) -> None:
        self._inner.random_stream = random_stream

    @property
    def max_depth(self) -> int | None:
        return self._inner.max_depth

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + self._student.nbytes

    @property
    def compile_seconds(self) -> float:
        return self._inner.compile_seconds

    def networks(self) -> Iterator[nn.Module]:
        yield from self._inner.networks()

    def learners(self) -> Iterator[Drafter]:
        yield self

    def set_learning(self, learns: bool) -> None:
        super().set_learning(learns)
        self._inner.set_learning(learns)

    def files(self) -> Iterator[StateFile]:
        yield from self._inner.files()

    def save(self, folder: Path) -> None:
        self._student.save(folder)

    def _rehearse(self, width: int) -> None:
        """Raises what learning raises: when the drafter is loaded, not in the middle of a text."""
        device = next(self._student.network.parameters()).device
        count, certain = self._student.depths + 2, torch.ones(1, device=device)
        states = [torch.zeros(width, device=device)] * count if width else []
        window = Window([0] * count, states, {count - 1: certain.long()}, {count - 1: certain})
        with torch.enable_grad():  # transformers' generate, which may load it, needs none
            loss = self._student.recipe.compute_loss(batch_of([window], count, device)).loss
            loss.backward()  # type: ignore[no-untyped-call]
        self._student.network.zero_grad()

    # -- rows ----------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        self._inner.check(request)

    def cached_prefix(self, request: Request) -> int:
        return self._inner.cached_prefix(request)

    def begin(self, requests: Sequence[Request]) -> None:
        self._inner.begin(requests)
        self._traces.forget(requests)  # of one that joins again all is read again

    def computed_tokens(self, request: Request) -> Mapping[str, int]:
        return self._inner.computed_tokens(request)

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        self._inner.end(requests, interrupted)
        for request in requests if not interrupted else ():
            self._windows += self._traces[request].cut(ended=True)

    def forget_texts(self) -> None:
        self._inner.forget_texts()

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        self._inner.read(requests, tokens, states)
        for place, request in enumerate(requests):
            own = states[place, : len(tokens[place])]
            self._traces[request].read(tokens[place], own)

    # -- rounds --------------------------------------------------------------------------------

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        budgets = rows.without_reproducible(budgets)
        if not any(budgets):
            return Proposal.empty(len(rows), rows.seeds.device)
        return self._inner.propose(rows, budgets)

    def probs_of(
        self, rows: Rows, tokens: Tensor, wanted: Sequence[bool] | None = None
    ) -> Tensor | None:
        return self._inner.probs_of(rows, tokens, wanted)

    def observe(self, round: Round) -> None:
        self._inner.observe(round)
        if not self.learns:
            return
        if self._begun is None:
            self._begun = time.monotonic()
        if round.scored.softmax_probs is not None:
            self._take(round.scored, round.scored.softmax_probs)
        for request in round.requests:
            self._windows += self._traces[request].cut(ended=False)
        del self._windows[: -BACKLOG * self._options.every]
        if len(self._windows) >= self._options.every and self._may_learn():
            self._learn()

    def _take(self, round: Round, probs: Tensor) -> None:
        """Adds to each row's trace what the round has committed, and the distributions to learn
        there."""
        rows, wrong = round.rows, corrected(round)
        top = probs.topk(min(TOP, probs.shape[-1]), -1)
        for row, (request, outcome) in enumerate(zip(rows.requests, round.outcomes, strict=True)):
            trace, path = self._traces[request], [0, *outcome.path]
            if not self.needs.hidden_layers:
                known = rows.since(row, 0 if not len(trace) else rows.lengths[row] - 1)
                trace.read([*known, *outcome.tokens[:-1]], None)
            places = range(len(path)) if self._options.positions == ALL else [len(path) - 1]
            if self._options.positions == ALL or wrong[row]:
                for at in places:
                    node = path[at]
                    trace.note(len(path) - at, top.indices[row, node], top.values[row, node])

    def _may_learn(self) -> bool:
        """Whether learning has had less than its share of the time so far."""
        assert self._begun is not None
        return self._learned_for <= self._options.share * (time.monotonic() - self._begun)

    def _learn(self) -> None:
        begin = time.monotonic()
        windows, self._windows = self._windows, []
        # The engine's rounds remember no gradients; tensors made there cannot.
        with torch.inference_mode(False), torch.enable_grad():
            device = next(self._student.network.parameters()).device
            text = batch_of(windows, self._options.window, device)
            recipe = self._student.recipe
            self.losses.append(self._learner.learn(lambda: recipe.compute_loss(text).loss))
            self._student.serve()
        self.updates += 1
        self._learned_for += time.monotonic() - begin


def corrected(round: Round) -> list[bool]:
    """Returns for each row whether a drafted token was refused: the last accepted node had
    children, and none of them was taken."""
    if not round.proposal.tree.size:
        return [False] * len(round.proposal.counts)
    parents, valid = round.proposal.tree.parents, round.proposal.valid
    ends = torch.as_tensor(round.verdict.nodes, device=parents.device)
    found: list[bool] = ((parents == ends[:, None]) & valid).any(-1).tolist()
    return found
