"""The options of a request's texts: sampling parameters and stop conditions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from outpace.core.options import Off, Reads, options_of, read_options
from outpace.core.trees.tree_shape import MAX_TREE_NODES
from outpace.core.unicode import check_unicode
from outpace.core.values import (
    flag,
    integer,
    items,
    number,
    plain,
    shown,
    texts,
    token_ids,
)
from outpace.errors import ParamsError, UnknownOption, names_checked

LogitsProcessor = Callable[[Any, Any], Any]
"""``processor(ids [R, T], scores [R, V]) -> scores [R, V]``, as in transformers."""


_COLDEST = 1e-6  # Below this the scores of an ordinary model, divided by it, leave float32.

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_BIAS = {"type": "object", "additionalProperties": {"type": "number"}}
_STOP = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ]
}


def _temperature(name: str, value: Any) -> float:
    found = number(name, value, 0.0, math.inf, closed=True)
    if 0 < found < _COLDEST:
        raise ParamsError(f"{name} must be 0 (greedy) or at least {_COLDEST:g}, not {found}.")
    return found


def _allowed(name: str, value: Any) -> tuple[int, ...]:
    found = token_ids(name, value)
    if not found:
        raise ParamsError(f"{name} is empty: no token could be generated.")
    return found


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParamsError(f"{name} must be a dict of token id and number, not {shown(value)}.")
    return {
        token: _bias_of(name, token, bias)
        for token, bias in zip(token_ids(name, list(value)), value.values(), strict=True)
    }


def _bias_of(name: str, token: int, value: Any) -> float:
    if isinstance(value, Real) and value == -math.inf:
        return -math.inf
    try:
        return number(name, value, -math.inf, math.inf, closed=True)
    except ParamsError as error:
        raise ParamsError(
            f"{name} of token {token} must be a number or -inf (never), not {shown(value)}."
        ) from error


def _words_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = items(name, value, "lists of token ids")
    if any(not isinstance(plain(word), (list, tuple)) for word in words):
        raise ParamsError(f"{name} must be a list of lists of token ids, not {shown(value)}.")
    found = tuple(token_ids(name, word) for word in words)
    if () in found:
        raise ParamsError(f"{name} holds an empty list, which would forbid every token.")
    return found


def _stop(name: str, value: Any) -> str | tuple[str, ...]:
    try:
        found = texts(name, [value] if isinstance(value, str) else value)
    except ParamsError as error:
        raise ParamsError(
            f"{name} must be a string or a list of strings, none of them empty, not {shown(value)}."
        ) from error
    return found[0] if isinstance(value, str) else found


def _prediction(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        check_unicode(name, value, error=ParamsError)
        return value
    return token_ids(name, value)


FORMS = ("json", "json_object", "regex", "choice", "grammar")
"""What ``structured_outputs`` may name, as in vLLM."""


def _form(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in FORMS:
        raise ParamsError(
            f"{name} must be an object with one of {', '.join(FORMS)}, not {shown(value)}."
        )
    if "json_object" in value and value["json_object"] is not True:
        raise ParamsError(
            f"json_object must be true, not {shown(value['json_object'])}: for a text without a "
            f"form leave {name} out."
        )
    return dict(value)


def _processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    found = items(name, value, "functions of (ids, scores)")
    if not all(callable(processor) for processor in found):
        raise ParamsError(f"{name} must be functions of (ids, scores), not {shown(value)}.")
    return found


@dataclass(frozen=True, kw_only=True)
class TextParams:
    """What may be asked of the texts of a request, drawn or searched for."""

    n: Annotated[int | None, Ge(1)] = None
    """How many texts are returned."""
    temperature: Annotated[float | None, Reads(_temperature, {"type": "number", "minimum": 0})] = (
        None
    )
    """0 is greedy. Unset and without ``do_sample`` in the model's config: greedy."""
    logit_bias: Annotated[Mapping[int, float] | None, Reads(_bias, _BIAS)] = dataclasses.field(
        default=None, hash=False
    )
    """Add to the logits of tokens, by token id."""
    allowed_token_ids: Annotated[Sequence[int] | None, Reads(_allowed, _TOKENS)] = None
    """Forbid all other tokens."""
    repetition_penalty: Annotated[float | None, Gt(0), Off(1.0)] = None
    """Divide positive and multiply negative logits of tokens in prompt or output."""
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Subtract from the logit of each token in the output."""
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    """Subtract from a token's logit once for each time it is in the output."""
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated, tokenised with and without a leading space."""
    bad_words_ids: Annotated[Sequence[Sequence[int]] | None, Reads(_words_ids)] = None
    """The same as lists of token ids."""
    logits_processors: Annotated[Sequence[LogitsProcessor], Reads(_processors)] = ()
    """Called for each drafted position with that position's own history."""
    max_tokens: Annotated[int | None, Ge(1)] = None
    """Longest text. Unset: the model's max_new_tokens, or what its max_length leaves after the
    prompt, else 256; never past the context."""
    min_tokens: Annotated[int | None, Ge(0)] = None
    """No end-of-sequence or stop token before this many tokens. More than max_tokens is refused; a
    minimum of the model's own gives way to max_tokens."""
    stop: Annotated[str | Sequence[str] | None, Reads(_stop, _STOP)] = None
    """End the text before this string, or before the first of several. One that is the name of a
    special token ends it at that token; one that holds such a name among other text is refused,
    unless skip_special_tokens is False."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text. None is taken as none, as for logits_processors."""
    include_stop_str_in_output: bool = False
    """Whether the stop string is part of the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        read_options(self)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ParamsError(
                f"min_tokens={shown(self.min_tokens)} is more than max_tokens="
                f"{shown(self.max_tokens)}: lower the first, or raise the second."
            ).about("min_tokens")


@names_checked(UnknownOption, "sampling option")
@dataclass(frozen=True, kw_only=True)
class SamplingParams(TextParams):
    """Options of one request. ``None`` means "as the model's generation_config says".

    The distribution of each token is made in this order: logit_bias, allowed_token_ids, repetition
    / presence / frequency penalty, bad_words, min_tokens, logits_processors, structured_outputs,
    temperature, top_k, top_p, min_p, typical_p. Penalties, min_tokens and structured_outputs see
    the history of each drafted position.

    Numbers of numpy are taken like Python's, and lists are kept as tuples. Raises ``ParamsError``
    (a ``ValueError``) for a value outside its range, and ``UnknownOption``, which is a
    ``TypeError`` too, for an unknown name.

    >>> SamplingParams(temperature=0.8, top_p=0.9, seed=1).top_p
    0.9
    """

    n: Annotated[int, Ge(1), Le(1 << 14)] = 1
    """How many texts to make from the prompt, each with a seed of its own derived from ``seed``."""
    top_k: Annotated[int | None, Ge(-1), Off(0)] = None
    """Keep the k most probable tokens (and those that tie with the last). 0 or -1 keeps all."""
    top_p: Annotated[float | None, Gt(0), Le(1), Off(1.0)] = None
    """Keep the fewest most probable tokens whose mass reaches top_p."""
    min_p: Annotated[float | None, Ge(0), Le(1), Off(0.0)] = None
    """Keep the tokens with at least min_p times the mass of the most probable one."""
    typical_p: Annotated[float | None, Gt(0), Le(1), Off(1.0)] = None
    """Locally typical sampling (Meister et al. 2022). 1 keeps all."""
    seed: Annotated[int | None, Ge(-(2**63)), Le(2**63 - 1)] = None
    """The same seed and options give the same text, up to rounding in other company
    (``batch_invariant``). Unset: drawn from the operating system;
    `CompletionOutput.seed` reports it where it gives the text again."""
    logprobs: Annotated[int | None, Ge(0)] = None
    """Report the log-probability of each token, and of this many most probable ones, under the
    distribution that it was drawn from. A greedy sequence reports the distribution before the
    argmax (temperature 1)."""
    speculative: Annotated[Literal["auto", "off"] | int | None, Ge(0), Le(MAX_TREE_NODES)] = None
    """For this request: "off" decodes plainly; K drafts K tokens in each round, fewer where the
    drafter has no more to say or a length policy ends its chains, and never more than 256. "auto",
    as unset: as the engine was configured."""
    tag: str | None = None
    """What the request is about, such as its task or language, for drafters that go by it (methods
    "tagged" and "task"). It changes no distribution."""
    prediction: Annotated[str | Sequence[int] | None, Reads(_prediction)] = None
    """The text, or the token ids, that you expect, such as the file that is to be edited: where
    look-ups search first ("suffix" and "ngram", and so "auto"). It changes no distribution.

    A method without a look-up refuses it."""
    structured_outputs: Annotated[Mapping[str, Any] | None, Reads(_form)] = dataclasses.field(
        default=None, hash=False
    )
    """What the text has to look like, one of: ``json``, a JSON schema; ``json_object``, true: any
    JSON object; ``regex``; ``choice``, a list of texts; ``grammar``, in Lark's notation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structured_outputs is not None and self.ignore_eos:
            raise ParamsError(
                "ignore_eos and structured_outputs exclude each other: drop one."
            ).about("ignore_eos")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or several, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with each unset option taken from ``defaults``, else switched off.

        defaults: as a generation_config spells them (``do_sample``, ``max_new_tokens``, ...).
        Raises ``ParamsError`` for a default outside its range, and for a min_tokens that the
        default of max_tokens does not allow.
        """
        off = {one.name: one.off for one in options_of(SamplingParams) if one.off is not None}
        found: dict[str, Any] = {**off, "max_new_tokens": 256, "min_new_tokens": 0}
        found |= {k: v for k, v in defaults.items() if v is not None}
        if not flag("do_sample", found.get("do_sample", False)):
            found["temperature"] = 0.0
        found.setdefault("temperature", 1.0)
        found["max_tokens"] = found.pop("max_new_tokens")
        found["min_tokens"] = found.pop("min_new_tokens")
        names = {f.name for f in dataclasses.fields(self)}
        unset = {k: v for k, v in found.items() if k in names and getattr(self, k) is None}
        most = integer("max_tokens", unset.get("max_tokens", self.max_tokens), least=1)
        if "max_tokens" in unset and defaults.get("max_new_tokens") is None:
            # Of a max_length the prompt leaves some part, which is known later.
            room = integer("max_length", defaults.get("max_length") or most, least=1)
            unset["max_tokens"] = most = max(most, min(self.min_tokens or 0, room))
        if self.min_tokens is None:
            least = integer("min_tokens", unset["min_tokens"], least=0)
            unset["min_tokens"] = min(least, most)
        elif self.min_tokens > most:
            raise ParamsError(
                f"min_tokens={shown(self.min_tokens)} is more than the {most} tokens that a text "
                "may have here where max_tokens is not given: give max_tokens, too."
            ).about("min_tokens")
        return dataclasses.replace(self, **unset)

    def shortened(self, most: int) -> SamplingParams:
        """Returns the same params for a text that can have ``most`` tokens only, whatever they
        allow: a min_tokens beyond that can forbid no end."""
        longest = min(self.max_tokens or most, most)
        least = None if self.min_tokens is None else min(self.min_tokens, longest)
        return dataclasses.replace(self, max_tokens=longest, min_tokens=least)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with these options, as ``SamplingParams(**options)`` does."""
        if not isinstance(options, Mapping):
            raise ParamsError(f"sampling options must be a dict, not {shown(options)}.")
        return cls(**{str(name): value for name, value in options.items()})
