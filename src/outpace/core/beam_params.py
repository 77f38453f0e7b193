"""What a user may ask of a beam search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outpace.core.params import LogitsProcessor, SamplingParams
from outpace.core.values import flag_or, number, whole
from outpace.errors import ParamsError, UnknownOption, names_checked

_MOST_BEAMS = 1 << 10  # Each is a row of the model; more can only be a slip.

_DRAWN = "beam search ranks texts and draws none, so that there is nothing for it to act on"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("seed", "top_k", "top_p", "min_p", "typical_p", "do_sample"),
        f"{_DRAWN}: leave it out, or sample with LLM.generate",
    ),
    "logprobs": "a beam search returns the log-probability of each whole text (cum_logprob): "
    "leave it out, or use LLM.generate",
    "speculative": "a rule verifies drafts against the distribution of the next token, and a beam "
    "is kept for its place among all beams, which is known only when all are scored: leave it "
    "out, since beams are decoded plainly",
    "tag": "it tells drafters what a request is about, and nothing is drafted for beams: leave it "
    "out",
    "num_beams": "the number of beams is called beam_width here",
    "num_return_sequences": "the number of texts to return is called n here",
    "max_new_tokens": "the longest text is called max_tokens here",
    "min_new_tokens": "the shortest text is called min_tokens here",
    "num_beam_groups": "outpace has no diverse beam search: leave it out",
    "diversity_penalty": "outpace has no diverse beam search: leave it out",
    "constraints": "outpace has no constrained beam search: leave it out",
    "force_words_ids": "outpace has no constrained beam search: leave it out",
}
"""Names of other libraries, and of `SamplingParams`, that a beam search refuses, and why."""

_SEARCH = frozenset({"beam_width", "n", "length_penalty", "early_stopping"})


@names_checked(UnknownOption, "beam search option")
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Options of `LLM.beam_search`. ``None`` means "as the model's generation_config says".

    Those from max_tokens on mean what they mean in `SamplingParams`. Penalties, bias, forbidden
    words and processors change the log-probabilities, as in transformers, and not the logits.

    Raises ``ParamsError`` for a value outside its range, for an unknown name, and for an option
    that a beam search cannot honour.

    >>> BeamSearchParams(beam_width=5, length_penalty=0.6).beam_width
    5
    """

    beam_width: int = 4
    """How many unfinished texts are kept (transformers' ``num_beams``)."""
    n: int | None = None
    """How many of the best texts are returned (``num_return_sequences``). Unset: beam_width."""
    length_penalty: float | None = None
    """A text's score is its log-probability divided by its length to this power: more than 0
    favours long texts, less than 0 short ones, 0 compares log-probabilities. Unset: the model's,
    else 1."""
    early_stopping: bool | Literal["never"] | None = None
    """When a search ends. True: as soon as beam_width texts have ended. False: when the best
    unfinished text, divided as it is now, is no better than the worst that has ended. "never": when
    no text can become better, taking the most favourable length for granted. Unset: as the model
    says, else False."""
    temperature: float = 0.0
    """Only 0, vLLM's default, since nothing is drawn."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    skip_special_tokens: bool = True

    def __new__(cls, **named: Any) -> BeamSearchParams:
        # Before the names are checked: for these there is more to say than that they are unknown.
        for name in named:
            if name in REFUSED:
                raise ParamsError(f"{name} does not go with a beam search: {REFUSED[name]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        width = whole("beam_width", self.beam_width, least=1, most=_MOST_BEAMS)
        returned = whole("n", width if self.n is None else self.n, least=1)
        if returned > width:
            raise ParamsError(
                f"n={returned} texts cannot come from beam_width={width} beams: raise beam_width, "
                "or lower n."
            )
        penalty, early = self.length_penalty, self.early_stopping
        ends: Any = None if early is None else flag_or("never", "early_stopping", early)
        if penalty is not None:
            penalty = number("length_penalty", penalty, -math.inf, math.inf, closed=True)
        if number("temperature", self.temperature, 0.0, math.inf, closed=True) != 0:
            raise ParamsError(f"temperature must be 0 in a beam search: {_DRAWN}.")
        for name, value in (
            ("beam_width", width),
            ("n", None if self.n is None else returned),
            ("length_penalty", penalty),
            ("early_stopping", ends),
        ):
            object.__setattr__(self, name, value)
        self.of_text()  # refuses what is wrong with the others

    @property
    def returned(self) -> int:
        """How many texts are returned."""
        return self.beam_width if self.n is None else self.n

    def of_text(self) -> SamplingParams:
        """Returns the options that shape each text."""
        fields = (field.name for field in dataclasses.fields(self))
        return SamplingParams(
            **{name: getattr(self, name) for name in fields if name not in _SEARCH}
        )

    def resolve(self, defaults: Mapping[str, Any]) -> BeamSearchParams:
        """Returns the params with how to search taken from ``defaults``, a generation_config, where
        it is unset."""
        found: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
        found |= {name: defaults[name] for name in found if defaults.get(name) is not None}
        unset = {name: value for name, value in found.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **unset)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> BeamSearchParams:
        """Returns the params with these options."""
        return cls(**{str(name): value for name, value in options.items()})
