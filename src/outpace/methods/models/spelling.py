"""The bytes that a tokenizer's tokens spell, by which two vocabularies are compared.

Byte-level vocabularies write bytes as printable characters ("Ġthe"), those in the manner of
SentencePiece mark spaces ("▁the") and name single bytes ("<0x0A>"). Others are taken as written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from outpace.core.token_bytes import byte_level, named_byte
from outpace.draft.vocab_mapping import VocabMapping
from outpace.targets.hf.loading.loaded import LoadedModel

SPACE_OF_BYTES = "\u0120"
SPACE_OF_PIECES = "\u2581"
MARKED = 0.02
"""Share of the tokens that carry a mark for the space, from which it is taken to be one."""

OFFSET = 2.7
"""The offset in Zipf's distribution as Mandelbrot wrote it: the token of rank r is met about
1 / (r + OFFSET) times."""


def spellings(tokenizer: Any) -> dict[int, bytes]:
    """Returns what each ordinary token spells. Special tokens spell nothing."""
    written: Mapping[str, int] = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    spell = _speller(written)
    ordinary = ((number, text) for text, number in written.items() if number not in special)
    return {number: spell(text) for number, text in sorted(ordinary)}


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that stand for something else than text."""
    return frozenset(getattr(tokenizer, "all_special_ids", None) or ())


def _speller(written: Iterable[str]) -> Any:
    """How tokens are spelt in a vocabulary, known by how it marks spaces."""
    tokens = list(written)
    least = max(1, int(MARKED * len(tokens)))
    if sum(token.startswith(SPACE_OF_BYTES) for token in tokens) >= least:
        return _of_bytes
    if sum(token.startswith(SPACE_OF_PIECES) for token in tokens) >= least:
        return _of_pieces
    return str.encode


def _of_bytes(token: str) -> bytes:
    spelt = byte_level(token)
    return token.encode() if spelt is None else spelt  # added to the vocabulary, as it is


def _of_pieces(token: str) -> bytes:
    return named_byte(token) or token.replace(SPACE_OF_PIECES, " ").encode()


def shared_tokens(target: LoadedModel, drafter: LoadedModel, device: torch.device) -> VocabMapping:
    """Returns the map between the tokens that spell the same, and those that end a text.

    Of several that spell the same in one vocabulary, the first counts that is not the name of a
    byte.
    """
    ours, theirs = _by_spelling(target), _by_spelling(drafter)
    pairs = {theirs[spelt]: number for spelt, number in ours.items() if spelt in theirs}
    ends = target.eos_ids[:1], drafter.eos_ids[:1]
    if all(ends) and ends[0][0] < target.vocabulary:
        pairs = {own: number for own, number in pairs.items() if number != ends[0][0]}
        pairs[ends[1][0]] = ends[0][0]
    own_ids = torch.tensor(list(pairs), dtype=torch.long, device=device)
    target_ids = torch.tensor(list(pairs.values()), dtype=torch.long, device=device)
    return VocabMapping(target_ids, target.vocabulary, own_ids)


def _by_spelling(model: LoadedModel) -> dict[bytes, int]:
    written = {number: text for text, number in model.tokenizer.get_vocab().items()}
    found: dict[bytes, int] = {}
    for number, spelt in spellings(model.tokenizer).items():
        better = spelt not in found or named_byte(written[found[spelt]])
        if number < model.vocabulary and spelt and better:
            found[spelt] = number
    return found


def coverage(target: LoadedModel, shared: VocabMapping) -> float:
    """Returns about which share of a text's tokens are shared ones.

    Tokenizers number their tokens by how frequent they were in training. So the tokens of two
    characters or more are weighed by Zipf's distribution, in the order of their numbers.
    """
    ordinary = [n for n, spelt in spellings(target.tokenizer).items() if len(spelt) > 1]
    known = shared.to_draft(torch.tensor(ordinary, dtype=torch.long, device=shared.device)) >= 0
    weights = 1 / (torch.arange(len(ordinary), dtype=torch.float64) + OFFSET)
    return float(weights[known.cpu()].sum() / weights.sum()) if ordinary else 0.0
