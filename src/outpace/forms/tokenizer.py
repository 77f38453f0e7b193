"""The tokenizer for llguidance, which spells no text in special tokens, since answers leave them
out; and the tokens that a grammar in Lark's notation names, between angle brackets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from outpace.errors import ParamsError


def with_token_numbers(grammar: str, words: Mapping[str, int], ends: Mapping[str, int]) -> str:
    """Returns a grammar with the tokens that it names in the form in which llguidance knows them.

    words: the added tokens that are text. They get their numbers, since llguidance knows only
    special ones by name. ends: the tokens that end a text, by name. At the end of ``start`` they
    are left out, since a text ends there anyway; ``ParamsError`` where one stands elsewhere:
    nothing is written after it, so that the text would lack what the grammar goes on with.
    """
    last = _last_ends(grammar, ends)

    def spelt(found: re.Match[str]) -> str:
        if found["token"] is None:
            return found[0]
        if found.start() in last:
            return '""'
        if _is_end(found[0], ends):
            raise ParamsError(
                f"grammar names {found[0]}, which ends the text, elsewhere than at the end of "
                "start, so that nothing would be written after it: leave it out, since a text may "
                "end wherever its grammar is complete."
            )
        return f"<[{words[found[0]]}]>" if found[0] in words else found[0]

    return _ITEMS.sub(spelt, grammar)


def _last_ends(grammar: str, ends: Mapping[str, int]) -> set[int]:
    """Returns where tokens that end a text are the last of what ``start`` may be."""
    found: set[int] = set()
    rule, depth, pending = "", 0, -1
    for item in _statements(grammar):
        kind, text = item.lastgroup, item[0]
        if kind in ("head", "directive") and not depth:
            rule, pending = item["name"] or "", -1
        elif kind == "or" and not depth:
            pending = -1
        elif pending >= 0 and text != "?":
            found.discard(pending)
        elif kind == "token" and rule == "start" and not depth and _is_end(text, ends):
            pending = item.start()
            found.add(pending)
        if kind == "word" and text == "start":  # what follows it may follow its end
            return set()
        depth += (kind == "open") - (kind == "close")
    return found


def _statements(grammar: str) -> Iterator[re.Match[str]]:
    return (item for item in _ITEMS.finditer(grammar) if item.lastgroup != "comment")


def _is_end(mention: str, ends: Mapping[str, int]) -> bool:
    """Whether all tokens that are named so end a text."""
    if mention in ends:
        return True
    if not _NUMBERS.fullmatch(mention):
        return False
    known: Collection[int] = set(ends.values())
    for part in mention[2:-2].split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high - low >= len(known) or any(token not in known for token in range(low, high + 1)):
            return False
    return True


_NUMBERS = re.compile(r"<\[\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*\]>")

_ITEMS = re.compile(
    r"""
    (?P<text>"(?:\\[\s\S]|[^"\\])*(?:"|\\?\Z)|/(?:\\[\s\S]|[^/\\])+(?:/|\\?\Z))
    |(?P<comment>//.*|\#.*)
    |(?P<head>^[ \t]*[?!]*(?P<name>[A-Za-z_]\w*)(?:\.-?\d+)?
        (?:\[(?:"(?:\\.|[^"\\\n])*"|[^\]"\n])*\])?[ \t]*:)
    |(?P<directive>^[ \t]*%(?!json|lark|regex)\w+)
    |(?P<token><[^<>\s]+>)
    |(?P<open>[(\[{])
    |(?P<close>[)\]}])
    |(?P<or>\|)
    |(?P<word>%?\w+)
    |(?P<other>\S)
    """,
    re.VERBOSE | re.MULTILINE,
)
"""What a grammar consists of. Texts, regular expressions and comments may hold anything. What is
not closed goes on to the end of the grammar: were it searched for anew from each mark that may
begin a text, a megabyte of marks would take hours."""


# -- how a text is spelt ---------------------------------------------------------------------------


class GrammarTokenizer:
    """A tokenizer as llguidance asks for one.

    Special tokens are no text, since answers leave them out: what reads like one is spelt in other
    tokens. All others are text, also those that were added to the vocabulary, such as Qwen's
    ``<tool_call>``. llguidance by itself takes these for special, and offers either kind where a
    form demands its text, which the token is not.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int, eos_ids: Sequence[int]) -> None:
        from llguidance.hf import from_tokenizer

        # Without slices, which make masks faster: it makes none.
        self._plain = from_tokenizer(tokenizer, vocabulary, list(eos_ids), slices=[])
        added = tokenizer.added_tokens_decoder
        self._words = {
            token: entry.content
            for token, entry in added.items()
            if not entry.special and token not in eos_ids and token < vocabulary
        }
        names = tokenizer.convert_ids_to_tokens(list(eos_ids))
        self._ends = dict(zip(names, eos_ids, strict=True))
        self.eos_token_id = eos_ids[0]
        self.tokens = [self._plain.decode_bytes([token]) for token in range(vocabulary)]
        self.special_token_ids = [token for token in range(vocabulary) if self._is_special(token)]

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens as which llguidance writes a text that a form demands."""
        found = self._plain.tokenize_bytes(text)
        spelt = [part for token in found for part in self._spelt.get(token, (token,))]
        if self._plain.decode_bytes(spelt) == text:
            return spelt
        return list(self._plain.greedy_tokenize(text.decode(errors="replace")))

    def named(self, grammar: str) -> str:
        """Returns a grammar in Lark's notation with the tokens that it names in llguidance's form
        (`with_token_numbers`)."""
        numbers = {word: token for token, word in self._words.items()}
        return with_token_numbers(grammar, numbers, self._ends)

    @cached_property
    def _spelt(self) -> dict[int, list[int]]:
        """The other tokens that read like a special one."""
        special = self.special_token_ids
        return {token: self._plain.greedy_tokenize(self._read(token)) for token in special}

    def _read(self, token: int) -> str:
        return str(self.tokens[token].decode(errors="replace"))

    def _is_special(self, token: int) -> bool:
        return self._plain.is_special_token(token) and token not in self._words
