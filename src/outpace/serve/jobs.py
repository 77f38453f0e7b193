"""The texts of one call in the making, and what is new about them after a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outpace.engine.request import FinishReason, Logprob, Request


@dataclass(frozen=True)
class Delta:
    """What one text has got since the last delta. Joined together, deltas are the whole text."""

    index: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finish_reason: FinishReason | None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """The texts of one call. ``deliver`` is called in the engine's thread, once a round at most.

    client: who asks, as far as it is known. Times are those of ``perf_counter``; None until it
    happens. first_counts: how many tokens each text had when the first one came: a round may
    bring several. last_seen: when the engine last looked at the job.
    """

    requests: Sequence[Request]
    deliver: Callable[[list[Delta]], None]
    seconds: float
    client: Hashable = None
    arrived: float = field(default_factory=perf_counter)
    began: float | None = None
    first_token: float | None = None
    first_counts: Sequence[int] = ()
    last_seen: float | None = None
    _sent: list[int] = field(default_factory=list)
    _done: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sent = [0] * len(self.requests)
        self._done = [False] * len(self.requests)
        for request in self.requests:
            request.client = self.client

    @property
    def finished(self) -> bool:
        """Whether the end of every text was delivered."""
        return all(self._done)

    @property
    def longest(self) -> int:
        """The index of the text with the most tokens."""
        return max(range(len(self.requests)), key=lambda at: len(self.requests[at].output_ids))

    @property
    def tokens(self) -> int:
        """Tokens generated so far, in all texts."""
        return sum(len(request.output_ids) for request in self.requests)

    def failed(self, error: Exception) -> list[Delta]:
        """Returns the last deltas of texts that cannot be told."""
        self._done = [True] * len(self.requests)
        return [Delta(index, "", [], [], "error", error) for index in range(len(self.requests))]

    def news(self) -> list[Delta]:
        """Returns what has not been delivered yet."""
        deltas = (self._delta(index, one) for index, one in enumerate(self.requests))
        return [delta for delta in deltas if delta is not None]

    def _delta(self, index: int, request: Request) -> Delta | None:
        if self._done[index] or not (request.streaming or request.finished):
            return None
        text = request.new_text()
        begin, end = self._sent[index], len(request.output_ids)
        if not (text or request.finished):
            return None
        self._sent[index], self._done[index] = end, request.finished
        return Delta(
            index,
            text,
            request.output_ids[begin:end],
            request.logprobs[begin:end],
            request.finish_reason,
            request.error,
        )
