"""Checks before generation whether a request's options contradict its structured output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outpace.core.faults import MaskFault
from outpace.core.logits.constraints import Constraints, History, RowOptions
from outpace.errors import ParamsError

BEGINNINGS = 32
"""Beginnings of texts that are looked at, at most. Each costs a mask of the form, and where there
are more of them, most forms have a text that goes on."""


def check(options: RowOptions, prompt: Sequence[int], vocabulary: int, most: int) -> None:
    """Raises ``ParamsError`` where every text of the form comes to a place at which the options
    forbid all that may follow, as far as few texts are to be looked at.

    most: tokens of the text at most. What is not found here ends its text when it comes to that
    (`outpace.core.logits.dead_ends`).
    """
    given = _given(options)
    if options.mask is None or not given or options.params.logits_processors:
        return  # nothing to contradict, or functions that may allow what is forbidden
    length = _longest(options, prompt, vocabulary, most)
    if length is None:
        return
    alone = [
        name
        for name in given
        if _longest(_without(options, name), prompt, vocabulary, most) is None
    ]
    name = alone[0] if alone else "structured_outputs"
    raise ParamsError(_sentence(name, given, length, options)).about(name)


def _sentence(name: str, given: Sequence[str], length: int, options: RowOptions) -> str:
    tokens = "1 token" if length == 1 else f"{length} tokens"
    if name == "min_tokens":
        return (
            f"min_tokens={options.params.min_tokens} cannot be reached, since a text of this form "
            f"ends after {tokens} at the latest: lower it, or change the form."
        )
    where = f"go on after {tokens}" if length else "begin"
    names = ", ".join(given) if name not in given else name
    return (
        f"{names} and the form of the text together leave no token with which it could {where}: "
        "relax one of them."
    )


def _given(options: RowOptions) -> list[str]:
    """Returns the names of the options that forbid tokens."""
    params = options.params
    found = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "logit_bias": -math.inf in (params.logit_bias or {}).values(),
        "bad_words": bool(options.bad_words_ids) and bool(params.bad_words),
        "bad_words_ids": bool(options.bad_words_ids) and not params.bad_words,
        "min_tokens": bool(params.min_tokens),
    }
    return [name for name, forbids in found.items() if forbids]


def _without(options: RowOptions, name: str) -> RowOptions:
    """Returns the options without one of those that forbid tokens."""
    if name.startswith("bad_words"):
        return replace(options, bad_words_ids=())
    unset: dict[str, Any] = {name: 0 if name == "min_tokens" else None}
    return replace(options, params=replace(options.params, **unset))


def _longest(options: RowOptions, prompt: Sequence[int], vocabulary: int, most: int) -> int | None:
    """Returns how many tokens texts can have before nothing may follow any of them; None where one
    can come to its end, or too many would have to be looked at."""
    constraints = Constraints(0, options, vocabulary, torch.device("cpu"))
    allowed = _always_allowed(options, vocabulary)
    ends = [token for token in options.end_ids if token < vocabulary]
    history = History([prompt], [[]])
    texts: list[list[int]] = [[]]
    seen = 1
    for length in range(most):
        try:
            left = allowed & ~constraints.banned(texts, history)  # [M, V]
        except MaskFault:
            return None
        count = int(left.sum())
        if not count:
            return length
        seen += count
        if seen > BEGINNINGS or bool(left[:, ends].any()):
            return None
        if options.params.stop_strings and length + 1 >= (options.params.min_tokens or 0):
            return None  # the next token may bring one, which ends the text
        texts = [[*texts[at], token] for at, token in left.nonzero().tolist()]
    return None


def _always_allowed(options: RowOptions, vocabulary: int) -> torch.Tensor:
    """Returns ``[V]`` bool: what allowed_token_ids and logit_bias leave at every place."""
    params = options.params
    found = torch.ones(vocabulary, dtype=torch.bool)
    if params.allowed_token_ids is not None:
        found = torch.zeros(vocabulary, dtype=torch.bool)
        found[list(params.allowed_token_ids)] = True
    never = [token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf]
    found[never] = False
    return found
