"""Texts of a given form: JSON, regular expressions, grammars and choices, through llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.laws.masks import TokenMask
from outpace.core.values import shown
from outpace.errors import ConfigError, ParamsError

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""What ``structured_outputs`` may name, as in vLLM: a JSON schema, any JSON object, a regular
expression, a list of texts, and a grammar in Lark's notation."""


_JSON: Any = {"whitespace_pattern": r"[\x20\x0A]{0,16}"}
"""Small models under a JSON grammar like to write blanks without end; a schema may say otherwise
under "x-guidance"."""


class Grammars:
    """Compiles grammars for one tokenizer.

    Raises ``ConfigError`` for a tokenizer that is not of the fast kind or has no end of sequence,
    and where llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_ids = [token for token in eos_ids if token < vocabulary]

    def compile(self, kind: str, value: Any) -> Grammar:
        """Returns the grammar of a kind from `KINDS`; ``ParamsError`` for one that is not sound."""
        from llguidance import LLMatcher

        tokens = self._tokens
        try:
            source = _source(kind, value)
            problem = LLMatcher.validate_grammar(source, tokens)
            matcher = LLMatcher(tokens, source)
        except ParamsError:
            raise
        except Exception as error:  # of a library whose exceptions are not documented
            problem = str(error) or type(error).__name__
        if not problem or problem.startswith("WARNING"):
            problem = matcher.get_error()
        if problem:
            reason = " ".join(problem.split())[:300]
            raise ParamsError(f"{kind} cannot be made a grammar ({reason}): correct it.")
        grammar = Grammar(matcher, self._vocabulary)
        # The first mask costs the most, and copies share what it took: made here, it holds up the
        # request that wants it, and no round of all requests.
        try:
            grammar.allowed([], [[]])
        except Exception as error:
            raise ParamsError(f"the grammar cannot be followed ({error}): simplify it.") from error
        return grammar

    @cached_property
    def _tokens(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                "texts of a given form need llguidance: pip install 'outpace[serve]'."
            ) from error
        if not self._eos_ids:
            raise ConfigError("texts of a given form need a model with an end-of-sequence token.")
        try:
            return from_tokenizer(self._tokenizer, self._vocabulary, self._eos_ids)
        except Exception as error:  # of a library whose exceptions are not documented
            raise ConfigError(
                f"the model's tokenizer cannot be used for texts of a given form ({error}): leave "
                "the form out."
            ) from error


class Grammar(TokenMask):
    """One row's place in a grammar: which tokens may follow the text and each node of a draft.

    It keeps llguidance's matcher at the last text that it was asked about. From there it goes back
    to what two texts have in common, and on along the other. So a node costs one token and one
    mask.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._at: list[int] = []  # the tokens that the matcher has consumed

    def copy(self) -> Grammar:
        """Returns the same grammar for another row, at its beginning."""
        matcher = self._matcher.deep_copy()
        if self._at:
            matcher.rollback(len(self._at))
        return Grammar(matcher, self._vocabulary)

    def allowed(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        found = np.zeros((len(paths), self._vocabulary), dtype=bool)
        for node, path in enumerate(paths):
            if self._go_to([*output, *path]):
                found[node] = self._mask()
        return torch.from_numpy(found)

    def _go_to(self, text: list[int]) -> bool:
        """Takes the matcher to a text; returns False where the grammar forbids one of its tokens,
        also the end of the text before another token. ``ValueError`` where it gives up."""
        common = _common(self._at, text)
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
        taken = self._matcher.try_consume_tokens(text[common:]) if text[common:] else 0
        self._at = text[: common + taken]
        self._check()
        return len(self._at) == len(text)

    def _mask(self) -> Any:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)

    def _check(self) -> None:
        """Raises ``ValueError`` for a matcher that gave up, as it does over its limits: what it
        allows from there on, nothing, is not what the grammar says."""
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().split("\n")[0][:200])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns how many tokens two texts begin with alike."""
    if list(left) == list(right[: len(left)]):  # the usual case, without a loop
        return len(left)
    return next(at for at, token in enumerate(left) if at == len(right) or token != right[at])


def _source(kind: str, value: Any) -> str:
    """Returns a grammar in llguidance's own notation."""
    from llguidance import LLMatcher

    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, _JSON))
    if kind == "json":
        return str(LLMatcher.grammar_from_json_schema(_schema(value), _JSON))
    if kind == "choice":
        return str(LLMatcher.grammar_from_lark(f"start: {_choices(value)}"))
    if not isinstance(value, str) or not value:
        raise ParamsError(f"{kind} must be a text that is not empty, not {shown(value)}.")
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    return str(LLMatcher.grammar_from_lark(value))


def _schema(value: Any) -> Any:
    """Returns a JSON schema, which may be given as a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParamsError(f"json must be a JSON schema, and is no JSON ({error}).") from error
    if not isinstance(value, (Mapping, bool)):
        raise ParamsError(f"json must be a JSON schema: an object, not {shown(value)}.")
    return json.dumps(value)


def _choices(value: Any) -> str:
    texts = list(value) if isinstance(value, (list, tuple)) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ParamsError(f"choice must be a list of texts, none empty, not {shown(value)}.")
    return " | ".join(json.dumps(text) for text in texts)
