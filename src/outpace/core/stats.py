"""Counters of one request, and what they are called.

acceptance rate          accepted / drafted; None where nothing was drafted
mean acceptance length   emitted tokens / target passes that emitted (bonus or correction included)
acceptance per position  accepted at depth i / rounds that drafted to depth i or deeper

A token that was cut off by a stop condition is neither emitted nor accepted. Passes over the prompt
that emit nothing are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.core.account import Account


@dataclass(frozen=True)
class Seconds:
    """What the parts of one round took: drafting, scoring the draft, and everything else."""

    draft: float
    score: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.score + self.rest


@dataclass
class Metrics:
    """What one request cost. Times are seconds of the rounds the request took part in, and of the
    passes that read prompts until its own was read; what serves several requests counts whole for
    each."""

    num_target_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Accepted tokens of drafts from `SamplingParams.prediction`, where a look-up made them alone:
    what several drafters make of it together is not counted."""
    rejected_prediction_tokens: int = 0
    """Their other drafted tokens."""
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    judged_per_position: list[int] = field(default_factory=list)
    """By depth of the draft, the rounds that drafted there and accepted all before it."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """The target's passes, those that read the prompt included."""
    sample_seconds: float = 0.0
    """Everything else of a round: distributions, the verdict, the commit, and what is emitted."""
    total_seconds: float = 0.0
    """All of these together."""
    account: Account | None = None
    """What the text was drafted with, and why not with more; None until the text has ended."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per drafted token; None where nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else None

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per target pass; 0 before the first."""
        passes = self.num_target_passes
        return self.num_emitted_tokens / passes if passes else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """By depth of the draft, the share of rounds that were accepted to that depth."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of ``total_seconds``, in which the prompt was read, too."""
        return self.num_emitted_tokens / self.total_seconds if self.total_seconds else 0.0

    def count_round(self, drafted: int, accepted: int, emitted: int) -> None:
        """Adds one verified round. drafted: nodes of the draft."""
        self.num_target_passes += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += emitted

    def count_prediction(self, drafted: int, accepted: int) -> None:
        """Adds a round whose draft was from the text that was predicted."""
        self.accepted_prediction_tokens += accepted
        self.rejected_prediction_tokens += drafted - accepted

    def count_positions(self, depth: int, accepted: int, ended: bool = False) -> None:
        """Adds a round that drafted ``depth`` levels, of which the first ``accepted`` were kept.
        ended: whether the text ended with the last of these, so that none after it was judged."""
        missing = depth - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        self.judged_per_position += [0] * missing
        for level in range(depth):
            self.drafted_per_position[level] += 1
            self.accepted_per_position[level] += level < accepted
            self.judged_per_position[level] += level < accepted + (not ended)

    def as_dict(self) -> dict[str, object]:
        """Returns the published names, as in the ``--json`` output."""
        return {
            "num_target_passes": self.num_target_passes,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_per_position": self.acceptance_per_position,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "sample_seconds": self.sample_seconds,
            "total_seconds": self.total_seconds,
            "tokens_per_second": self.tokens_per_second,
            "account": None if self.account is None else self.account.as_dict(),
        }
