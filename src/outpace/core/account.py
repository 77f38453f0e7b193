"""Each drafter's rounds and tokens, and why it drafted no more: the line shown with every speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    """What decides how much is drafted."""

    NONE = "none"
    """There is no drafter."""
    OFF = "off"
    """The request asks for none."""
    FIXED = "fixed"
    """A number of tokens that was given, or a length policy."""
    MEASURED = "measured"
    """Measured times and acceptance rates."""
    NOMINAL = "nominal"
    """The text's own acceptance rate and nominal costs: its drafts must repeat themselves."""


class Reason(StrEnum):
    """Why a drafter drafts or does not."""

    UNMEASURED = "unmeasured"
    """Plain rounds, with which all others are compared, were not measured yet."""
    UNTRIED = "untried"
    """Nothing is known of it, and a trial would have cost more than trials may."""
    READING = "reading"
    """It would have to read the text first, which the rest of the text would not repay."""
    NO_GAIN = "no gain"
    """Its drafts are not expected to bring more tokens per second than plain decoding."""
    GAIN = "gain"
    """They are."""


@dataclass(frozen=True)
class DrafterAccount:
    """What came of one drafter."""

    name: str
    look_up: bool = False
    """Whether it runs no model."""
    asked: int = 0
    """Rounds in which it was asked for a draft."""
    found: int = 0
    """Rounds in which it had one, whether or not that was scored."""
    rounds: int = 0
    """Rounds in which its draft was scored."""
    drafted: int = 0
    """Tokens."""
    accepted: int = 0
    reason: Reason | None = None
    """The most frequent one of the rounds in which it drafted nothing; None where nothing was
    decided about it."""
    cost: float | None = None
    """What each drafted token adds to a round, in passes of the target; None while unknown."""
    chance: float | None = None
    """That its first token is accepted, as far as it was tried in any text; None before."""
    reading: float | None = None
    """What reading the text would have cost, in passes of the target."""

    def __add__(self, later: DrafterAccount) -> DrafterAccount:
        """Returns the account of both; what is known is taken from the later one."""
        known = later if later.reason is not None else self
        return replace(
            known,
            asked=self.asked + later.asked,
            found=self.found + later.found,
            rounds=self.rounds + later.rounds,
            drafted=self.drafted + later.drafted,
            accepted=self.accepted + later.accepted,
        )

    def sentence(self, rounds: int) -> str:
        """Returns what came of it and why. rounds: of the texts.

        >>> model = DrafterAccount("draft_model", reason=Reason.NO_GAIN, cost=0.4, chance=0.55)
        >>> model.sentence(rounds=60)
        'draft model: a token costs 0.40 of a pass, 55% accepted: no gain'
        >>> DrafterAccount("suffix", look_up=True, asked=60).sentence(rounds=60)
        'look-up (suffix) found nothing'
        """
        label = self.name.replace("_", " ")
        label = f"look-up ({label})" if self.look_up else label
        if self.drafted:
            return f"{label}: {self._what_came(rounds)}"
        if self.look_up and not self.found:
            return f"{label} found nothing" if self.asked else f"{label} was not asked"
        return f"{label}: {self._why_nothing}"

    def _what_came(self, rounds: int) -> str:
        parts = [
            f"{_count(self.drafted, 'token')} in {self.rounds:,} of {_count(rounds, 'round')}",
            f"{self.accepted / self.drafted:.0%} accepted",
        ]
        if self.cost is not None:
            parts.append(f"a token costs {self.cost:.2f} of a pass")
        if self.reason is Reason.NO_GAIN and self.rounds < rounds:
            parts.append("no gain expected in most others")
        return ", ".join(parts)

    @property
    def _why_nothing(self) -> str:
        reading = f"reading the text would cost {self.reading or 0:.1f} passes"
        if self.reason is Reason.UNMEASURED:
            return "not tried before plain rounds were measured"
        if self.reason is Reason.UNTRIED:
            return f"not tried: {reading}" if self.reading else "not tried"
        if self.reason is Reason.READING:
            return f"{reading}, which the rest of it would not repay"
        if self.reason is Reason.NO_GAIN and self.cost is not None and self.chance is not None:
            return f"a token costs {self.cost:.2f} of a pass, {self.chance:.0%} accepted: no gain"
        if self.reason is Reason.NO_GAIN:
            return "no gain"
        return "others promised more" if self.reason is Reason.GAIN else "nothing drafted"


@dataclass(frozen=True)
class Account:
    """What texts were drafted with, and why not with more. ``str()`` is one line."""

    mode: Mode
    rounds: int = 0
    drafters: tuple[DrafterAccount, ...] = ()

    @classmethod
    def merged(cls, accounts: Iterable[Account | None]) -> Account | None:
        """Returns the account of several texts together; None where there is none."""
        known = [account for account in accounts if account is not None]
        if not known:
            return None
        drafters: dict[str, DrafterAccount] = {}
        for one in (drafter for account in known for drafter in account.drafters):
            drafters[one.name] = drafters[one.name] + one if one.name in drafters else one
        return cls(known[-1].mode, sum(one.rounds for one in known), tuple(drafters.values()))

    @property
    def drafted(self) -> int:
        """Drafted tokens."""
        return sum(drafter.drafted for drafter in self.drafters)

    @property
    def sentence(self) -> str:
        """Returns what was drafted with, and why not with more."""
        if self.mode is Mode.NONE:
            return "there is no drafter"
        if not self.rounds:
            return "no round was played"
        told = "; ".join(drafter.sentence(self.rounds) for drafter in self.drafters)
        if self.mode is Mode.OFF:
            return told or "drafting was switched off"
        if self.mode is Mode.NOMINAL:
            return f"{told} (seeded: by nominal costs)"
        return told or f"nothing was proposed in {_count(self.rounds, 'round')}"

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> Mapping[str, Any]:
        """Returns the account for JSON, with its sentence."""
        return {
            "sentence": self.sentence,
            "mode": str(self.mode),
            "rounds": self.rounds,
            "drafters": [
                {
                    name: str(value) if isinstance(value, Reason) else value
                    for name, value in vars(drafter).items()
                }
                for drafter in self.drafters
            ],
        }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
