"""The options of a beam search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from outpace.core.options import Reads
from outpace.core.params import SamplingParams, TextParams
from outpace.core.values import number
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
    "prediction": "it is what look-ups draft from, and nothing is drafted for beams: leave it out",
    "structured_outputs": "beams are ranked among all continuations, and a grammar would have to "
    "follow each: leave it out, or use LLM.generate",
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


def _only_zero(name: str, value: Any) -> float:
    if number(name, value, 0.0, math.inf, closed=True) != 0:
        raise ParamsError(f"{name} must be 0 in a beam search: {_DRAWN}.")
    return 0.0


@names_checked(UnknownOption, "beam search option")
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(TextParams):
    """Options of `LLM.beam_search`. ``None`` means "as the model's generation_config says".

    Those that `SamplingParams` has, too, mean the same here. Penalties, bias, forbidden words and
    processors change the log-probabilities, as in transformers, and not the logits.

    Raises ``ParamsError`` for a value outside its range, for an unknown name, and for an option
    that a beam search cannot honour.

    >>> BeamSearchParams(beam_width=5, length_penalty=0.6).beam_width
    5
    """

    beam_width: Annotated[int, Ge(1), Le(_MOST_BEAMS)] = 4
    """Search for the most likely texts, of which this many unfinished ones are kept (transformers'
    ``num_beams``)."""
    n: Annotated[int | None, Ge(1)] = None
    """How many of the best texts are returned (``num_return_sequences``). Unset: beam_width."""
    length_penalty: float | None = None
    """A text's score is its log-probability divided by its length to this power: more than 0
    favours long texts, less than 0 short ones, 0 compares log-probabilities. Unset: the model's,
    else 1."""
    early_stopping: Literal["never"] | bool | None = None
    """When a search ends. True: once as many texts have ended as there are beams. False: when the
    best unfinished text, divided as it is now, is no better than the worst that has ended. "never":
    when no text can become better, taking the most favourable length for granted. Unset: as the
    model says, else False."""
    temperature: Annotated[float, Reads(_only_zero)] = 0.0
    """Only 0, vLLM's default, since nothing is drawn."""

    def __new__(cls, **named: Any) -> BeamSearchParams:
        # Before the names are checked: for these there is more to say than that they are unknown.
        for name in named:
            if name in REFUSED:
                raise ParamsError(f"{name} does not go with a beam search: {REFUSED[name]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.returned > self.beam_width:
            raise ParamsError(
                f"n={self.n} texts cannot come from beam_width={self.beam_width} beams: raise "
                "beam_width, or lower n."
            )

    @property
    def returned(self) -> int:
        """How many texts are returned."""
        return self.beam_width if self.n is None else self.n

    def of_text(self) -> SamplingParams:
        """Returns the options that shape each text."""
        names = (one.name for one in dataclasses.fields(TextParams) if one.name != "n")
        return SamplingParams(**{name: getattr(self, name) for name in names})

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
