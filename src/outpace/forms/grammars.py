"""Texts of a given form: JSON, regular expressions, grammars and choices, through llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.logits.masks import TokenMask
from outpace.core.values import shown
from outpace.errors import ConfigError, ParamsError
from outpace.forms.json_schemas import (
    LONGEST,
    check_schema,
    refusal,
    schema_text,
    with_deep_stack,
    without_annotations,
)
from outpace.forms.tokenizer import GrammarTokenizer

STEPS = 5_000
"""Items that a grammar may have open at a token. A mask is made between two rounds of all texts,
and with ten times as many, llguidance's own limit, it takes a tenth of a second."""

AT_ONCE = 2
"""Grammars that are compiled at once; the others wait."""

NO_TEXT = "NoExtension"
"""With what llguidance gives up a grammar that no text follows."""

KEPT = 16
"""Grammars that are kept: the next request often has the same form."""

JSON_WHITESPACE: Any = {"whitespace_pattern": r"[\x20\x0A]{0,16}"}
"""Small models under a JSON grammar like to write blanks without end; a schema may say otherwise
under "x-guidance"."""


class Grammars:
    """Compiles grammars for one tokenizer, in any thread.

    Raises ``ConfigError`` for a tokenizer that is not of the fast kind or has no end of sequence,
    and where llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_ids = [token for token in eos_ids if token < vocabulary]
        self._turns = threading.Semaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # the latest ones last

    def compile(self, kind: str, value: Any) -> Grammar:
        """Returns the grammar of a kind from `params.FORMS`, of which each row takes a copy;
        ``ParamsError`` for one that is not sound."""
        form = _checked(kind, value)
        key = f"{kind} {form}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self._turns:
            made = with_deep_stack(lambda: self._compiled(kind, form))
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def _compiled(self, kind: str, form: str) -> Grammar:
        # The next line says what is missing where llguidance is not installed.
        spelling, tokens = self._tokens
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_max_items=STEPS)
        try:
            source = _source(kind, spelling.named(form) if kind == "grammar" else form)
            problem = LLMatcher.validate_grammar(source, tokens, limits=limits)
            matcher = LLMatcher(tokens, source, limits=limits)
        except ParamsError:
            raise
        except Exception as error:  # of a library whose exceptions are not documented
            problem = str(error) or type(error).__name__
        if not problem or problem.startswith("WARNING"):
            problem = matcher.get_error()
        if problem:
            raise ParamsError(f"{kind} {refusal(problem)}.")
        grammar = Grammar(matcher, self._vocabulary, self._eos_ids)
        # The first mask costs the most, and copies share what it took: made here, it holds up the
        # request that wants it, and no round of all requests.
        try:
            begins = bool(grammar.allowed([], [[]]).any())
        except Exception as error:
            if NO_TEXT not in str(error):
                raise ParamsError(f"{kind} cannot be followed ({error}): simplify it.") from error
            begins = False
        if not begins:
            raise ParamsError(f"{kind} allows no text that the model's tokens spell: correct it.")
        return Grammar(matcher, self._vocabulary, self._eos_ids)

    @cached_property
    def _tokens(self) -> tuple[GrammarTokenizer, Any]:
        """How texts are spelt, and llguidance's own tokenizer that spells like this."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise ConfigError(
                "texts of a given form need llguidance: pip install 'outpace[serve]'."
            ) from error
        if not self._eos_ids:
            raise ConfigError("texts of a given form need a model with an end-of-sequence token.")
        try:
            spelling = GrammarTokenizer(self._tokenizer, self._vocabulary, self._eos_ids)
            tokens = TokenizerWrapper(spelling)
            return spelling, LLTokenizer(tokens, self._vocabulary, self._eos_ids)
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

    ends: the tokens that end a text. They may follow where the grammar is complete, and nowhere
    else: it may hold them inside of a text, as "any token" does, but nothing is written after
    them.
    """

    def __init__(
        self, matcher: Any, vocabulary: int, ends: Sequence[int], unused: Any = None
    ) -> None:
        """unused: a matcher that stays at the beginning, from which another is made when one has
        given up."""
        self._matcher = matcher
        self._unused = matcher.deep_copy() if unused is None else unused
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._at: list[int] = []  # the tokens that the matcher has consumed
        self._moving = False  # whether an interruption has come between the two

    def copy(self) -> Grammar:
        """Returns the same grammar for another row, at its beginning."""
        return Grammar(self._unused.deep_copy(), self._vocabulary, self._ends, self._unused)

    def allowed(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        if self._moving or self._matcher.is_error():
            self._matcher, self._at, self._moving = self._unused.deep_copy(), [], False
        found = np.zeros((len(paths), self._vocabulary), dtype=bool)
        for node, path in enumerate(paths):
            if self._go_to([*output, *path]):
                found[node] = self._mask()
        return torch.from_numpy(found)

    def _go_to(self, text: list[int]) -> bool:
        """Takes the matcher to a text; returns False where the grammar forbids one of its tokens,
        also the end of the text before another token. ``ValueError`` where it gives up."""
        common = _common(self._at, text)
        self._moving = True
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
        taken = self._matcher.try_consume_tokens(text[common:]) if text[common:] else 0
        self._at = text[: common + taken]
        self._moving = False
        self._check()
        return len(self._at) == len(text)

    def _mask(self) -> Any:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        found = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        if found[self._ends].any() and not self._matcher.is_accepting():
            found[self._ends] = False
        return found

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


def _source(kind: str, form: str) -> str:
    """Returns a grammar in llguidance's own notation. form: as `_checked` returns it."""
    from llguidance import LLMatcher

    if kind in ("json", "json_object"):
        return str(LLMatcher.grammar_from_json_schema(without_annotations(form), JSON_WHITESPACE))
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(form))
    return str(LLMatcher.grammar_from_lark(_without_annotations_in(form)))


def _without_annotations_in(grammar: str) -> str:
    """Returns a grammar with the `without_annotations` of its JSON schemas."""
    parts, done = [], 0
    for begin, end, _ in _schemas_in(grammar):
        parts += [grammar[done:begin], without_annotations(grammar[begin:end])]
        done = end
    return "".join([*parts, grammar[done:]])


def _checked(kind: str, value: Any) -> str:
    """Returns a form as a text; ``ParamsError`` for one that is none, or would take too much."""
    if kind == "json_object":
        form = json.dumps({"type": "object"})
    elif kind == "json":
        form = schema_text(value)
    elif kind == "choice":
        # As one terminal: thousands of rules side by side would be more than are followed.
        form = f"start: CHOICE\nCHOICE: {choices_in_lark(value)}"
    elif isinstance(value, str) and value:
        form = value
    else:
        raise ParamsError(f"{kind} must be a text that is not empty, not {shown(value)}.")
    if len(form) > LONGEST:
        raise ParamsError(f"{kind} has {len(form):,} characters, and {LONGEST:,} are the most.")
    if kind == "grammar":
        for _, _, schema in _schemas_in(form):
            check_schema(schema)
    return form


def _schemas_in(grammar: str) -> Iterator[tuple[int, int, Any]]:
    """Yields the JSON schemas in a grammar with their places; what is no JSON is left to llguidance
    to refuse."""
    done = 0
    for found in re.finditer(r"%json\s*", grammar):
        if found.start() < done:  # a text in the schema before
            continue
        with suppress(ValueError, RecursionError):
            schema, done = json.JSONDecoder().raw_decode(grammar, found.end())
            yield found.end(), done, schema


def choices_in_lark(value: Any) -> str:
    """Returns texts of which one is to be chosen, in Lark's notation; ``ParamsError`` for what is
    no list of texts."""
    texts = list(value) if isinstance(value, (list, tuple)) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ParamsError(f"choice must be a list of texts, none empty, not {shown(value)}.")
    return " | ".join(json.dumps(text) for text in texts)
