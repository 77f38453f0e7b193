"""The names that ``--method`` and ``--verify`` take, with a line for help texts on each.

The registries of drafters and rules know the names only, and a line in the drafter's or rule's own
file would cost the seconds in which that imports torch. A test compares the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from outpace.heads.registry import HEADS

_OTHERS: Mapping[str, str] = {
    "auto": "look-ups, a smaller model (--draft) or nothing, as it pays",
    "consensus": "what the other samples of a prompt said after the same tokens (n > 1)",
    "dflash2": "a published head: a block of tokens, chosen among candidates for each",
    "draft_model": "a smaller model (--draft)",
    "draft_tree": "a smaller model that drafts several candidates at each depth (--draft)",
    "early_exit": "the model's first layers, for models that were trained for it",
    "ensemble": "several drafters at once: the first that proposes, one tree of all, or a vote",
    "gemma4_assistant": "Gemma 4's assistant, which reads what the model has cached",
    "hedge": "of several drafters the one that would have done best lately",
    "layer_skip": "the model itself with some layers left out (`outpace tune layers`)",
    "lookahead": "n-grams that the target writes ahead in the same pass",
    "ngram": "what followed the same tokens earlier in the text",
    "none": "nothing: plain decoding",
    "recycling": "what the target lately found most probable after each token",
    "retrieval": "what followed the longest match in a corpus (outpace datastore build)",
    "staged": "a smaller model, for which a look-up drafts (--draft)",
    "suffix": "what most often followed the longest match in this and earlier texts",
    "tagged": "a drafter for each tag of requests",
    "task": "a drafter for each task, as a classifier says (`outpace tune router`)",
    "ucb": "a bandit over several drafters",
}

METHODS: Mapping[str, str] = dict(
    sorted({**_OTHERS, **{name: what for name, (_, what) in HEADS.items()}}.items())
)

LOSSLESS: Mapping[str, str] = {
    "token": "speculative sampling, token by token",
    "match": "go on while what the target draws had been drafted",
    "coupled": "the same text with any drafter and with none",
    "block": "a whole chain at once",
    "recursive": "siblings of a tree, one after the other",
    "kseq": "several independent chains",
    "traversal": "a tree, from its leaves to its root",
    "canonical": "the best choice of several drafts",
}

LOSSY: Mapping[str, str] = {
    "lenient": "accept more by a fixed factor",
    "ears": "more tolerant where the target is uncertain",
    "typical": "keep what the target finds plausible",
    "joint": "the longest prefix that is likely enough as a whole",
    "bild": "roll back where the target disagrees strongly",
    "confidence": "a threshold that follows the drafter's confidence",
    "judge": "a trained head says whether a token is right",
    "reflective": "look at the draft twice",
    "cascade": "sample from a mixture of the two models",
    "lud": "no verification where the drafter is sure (lexical units)",
}


def complete_method(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yields the methods that begin so, with their help, for the shell."""
    return _beginning(incomplete, {**METHODS, **installed("outpace.drafters")})


def complete_rule(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yields the rules that begin so, with their help, for the shell."""
    lossy = {name: f"lossy: {what}" for name, what in LOSSY.items()}
    return _beginning(incomplete, {**LOSSLESS, **lossy, **installed("outpace.rules")})


def installed(group: str) -> dict[str, str]:
    """Returns the names that other packages register, without importing these."""
    return {entry.name: f"from {entry.value}" for entry in entry_points(group=group)}


def _beginning(incomplete: str, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, what) for name, what in known.items() if name.startswith(incomplete))
