"""A corpus of tokens that can be searched for any context: what the retrieval drafter reads.

A folder with a description and three arrays, which are mapped into memory and not read whole:

    datastore.json   sizes, checksums, and which tokenizer the tokens are of
    tokens.bin       all texts, a separator after each
    order.bin        the places of the tokens, sorted by what stands there
    starts.bin       for each token, where in that order its places begin
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.draft.lookup.continuations import Texts
from outpace.draft.lookup.occurrences import NOTHING
from outpace.draft.lookup.suffix_order import suffix_order
from outpace.errors import ConfigError, VocabularyMismatch

FORMAT = 1
DESCRIPTION = "datastore.json"
DEPTH = 32
"""Tokens by which places are sorted: a context, and some of what follows it."""

LARGEST = 2**32 - 1
"""Tokens that a datastore can hold, separators included."""

Array = NDArray[Any]


def fingerprint_of(tokenizer: Any) -> str:
    """Returns a short text that two tokenizers share only if each token has the same number."""
    listed = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(listed).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a datastore says of itself."""

    tokens: int
    """Tokens of all texts, without separators."""
    texts: int
    vocabulary: int
    """Every token is below this number, which is the separator."""
    tokenizer: str = ""
    """The name of the tokenizer."""
    fingerprint: str | None = None
    """What `fingerprint_of` says of the tokenizer; None where token ids were given."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of each file."""


class Datastore:
    """Texts, and the order of all their suffixes (a suffix array)."""

    def __init__(
        self, description: Description, tokens: Array, order: Array, starts: Array
    ) -> None:
        """tokens: ``[n]``, separators included; order: ``[n]`` without those of the separators;
        starts: ``[V + 1]``."""
        self.description = description
        self._arrays = {"tokens.bin": tokens, "order.bin": order, "starts.bin": starts}
        self._tokens, self._order, self._starts = tokens, order, starts

    # -- making and keeping --------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int] | Array],
        vocabulary: int,
        tokenizer: str = "",
        fingerprint: str | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Datastore:
        """Returns the datastore of some texts, each as token ids below ``vocabulary``.

        progress: called with the share of the sorting that is done. Raises ``ConfigError`` where
        there is no text.
        """
        kind = np.uint16 if vocabulary <= np.iinfo(np.uint16).max else np.uint32
        end, parts = np.array([vocabulary], kind), []
        for text in texts:
            if len(text):
                parts += [np.asarray(text).astype(kind), end]
        if not parts:
            raise ConfigError("there is no text to build a datastore of: name files with text.")
        tokens = np.concatenate(parts)
        if len(tokens) > LARGEST:
            raise ConfigError(
                f"{len(tokens)} tokens are too many for one datastore: leave files out until there "
                f"are {LARGEST} or fewer."
            )
        order = suffix_order(tokens, DEPTH, progress)
        order = order[: len(tokens) - len(parts) // 2].astype(np.uint32)  # separators sort last
        starts = np.searchsorted(tokens[order], np.arange(vocabulary + 1)).astype(np.int64)
        about = Description(
            tokens=len(order),
            texts=len(parts) // 2,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
        )
        return cls(about, tokens, order, starts)

    def save(self, folder: Path) -> None:
        """Writes the files; the description is written last, so that a folder with one is whole."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in self._arrays.items():
                array.tofile(folder / name)
            arrays = self._arrays.items()
            about = {
                **asdict(self.description),
                "sizes": {name: array.nbytes for name, array in arrays},
                "checksums": {name: zlib.crc32(array.data) for name, array in arrays},
            }
            text = json.dumps({"format": FORMAT, **about}, indent=1)
            (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the datastore to {str(folder)!r}: {error.strerror}."
            ) from error

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Datastore:
        """Returns the datastore of a folder, whose files are checked against its description.

        Raises ``ConfigError`` for what is no datastore, or a damaged one.
        """
        path = Path(folder)
        about = describe(path)
        kind = np.uint16 if about.vocabulary <= np.iinfo(np.uint16).max else np.uint32
        tokens = _mapped(path, "tokens.bin", about, kind)
        order = _mapped(path, "order.bin", about, np.uint32)
        starts = _mapped(path, "starts.bin", about, np.int64)
        sizes = (len(tokens), len(order), len(starts))
        if sizes != (about.tokens + about.texts, about.tokens, about.vocabulary + 1):
            raise _damaged(path, "its files and its description say different sizes")
        return cls(about, tokens, order, starts)

    def check(self, fingerprint: str | None, vocabulary: int) -> None:
        """Raises ``VocabularyMismatch`` unless its tokens mean the same to a target.

        fingerprint: of the target's tokenizer, None if it has none; vocabulary: of its head.
        """
        own = self.description
        if own.fingerprint is not None and fingerprint is None:
            raise VocabularyMismatch(
                "the target has no tokenizer, so that nothing tells whether the datastore's tokens "
                "are its own: give the tokenizer."
            )
        if own.fingerprint is not None and own.fingerprint != fingerprint:
            raise VocabularyMismatch(
                f"the datastore was built with another tokenizer ({own.tokenizer or 'unnamed'}) "
                "than the target's: build it again with --model set to the target."
            )
        if own.vocabulary > vocabulary:
            raise VocabularyMismatch(
                f"the datastore has tokens up to {own.vocabulary - 1} and the target {vocabulary} "
                "tokens: build it again with the target's tokenizer."
            )

    # -- looking up ----------------------------------------------------------------------------

    def matches(self, context: Sequence[int], shortest: int, longest: int) -> tuple[range, int]:
        """Returns where in the order those places are that begin with the longest suffix of the
        context that stands anywhere, and how long it is: at most ``longest``, and an empty range
        where not even ``shortest`` tokens stand anywhere."""
        low, high = shortest, min(longest, len(context), DEPTH)
        if low > high or not (found := self._range(context[-low:])):
            return range(0), 0
        while low < high:  # a match of some length has all shorter ones
            middle = (low + high + 1) // 2
            if wider := self._range(context[-middle:]):
                low, found = middle, wider
            else:
                high = middle - 1
        return found, low

    def continuations(self, found: range, match: int, most: int, length: int) -> Texts:
        """Returns what follows at some of these places, `NOTHING` where a text has ended before.

        match: tokens that matched; most: places that are looked at, evenly in their order; length:
        tokens of each continuation.
        """
        count = min(most, len(found))
        chosen = found.start + np.arange(count, dtype=np.int64) * len(found) // max(1, count)
        places = self._order[chosen].astype(np.int64) + match
        index = (places[:, None] + np.arange(length)).clip(max=len(self._tokens) - 1)
        texts = self._tokens[index].astype(np.int64)
        texts[texts == self.description.vocabulary] = NOTHING
        listed: Texts = texts.tolist()
        return listed

    def _range(self, pattern: Sequence[int]) -> range:
        """The places that begin with a pattern, in their order."""
        first, size, tokens = pattern[0], len(pattern), self._tokens
        if not 0 <= first < self.description.vocabulary:
            return range(0)
        bounds = int(self._starts[first]), int(self._starts[first + 1])

        def here(place: Any) -> list[int]:
            found: list[int] = tokens[place : int(place) + size].tolist()
            return found

        wanted = list(pattern)
        begin = bisect_left(self._order, wanted, *bounds, key=here)
        return range(begin, bisect_right(self._order, wanted, begin, bounds[1], key=here))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, in memory or mapped into it."""
        return sum(array.nbytes for array in self._arrays.values())


def describe(folder: Path) -> Description:
    """Returns what a datastore says of itself; ``ConfigError`` if the folder holds none."""
    file = folder / DESCRIPTION
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        version = known.pop("format")
        about = Description(**known) if version == FORMAT else None
    except OSError as error:
        raise ConfigError(
            f"{str(folder)!r} is no datastore ({DESCRIPTION}: {error.strerror}): build one with "
            "`outpace datastore build`."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{DESCRIPTION} cannot be read") from error
    if about is None:
        raise ConfigError(
            f"the datastore {str(folder)!r} has format {version!r} and this outpace reads "
            f"{FORMAT}: build it again."
        )
    numbers = (about.tokens, about.texts, about.vocabulary)
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise _damaged(folder, f"{DESCRIPTION} says impossible sizes")
    return about


def _mapped(folder: Path, name: str, about: Description, kind: Any) -> Array:
    """A file as an array, mapped; checked against the description."""
    file = folder / name
    try:
        size = file.stat().st_size
        if size != about.sizes.get(name) or size % np.dtype(kind).itemsize:
            raise _damaged(folder, f"{name} has {size} bytes, not {about.sizes.get(name)}")
        mapped = np.memmap(file, kind, "r")
    except OSError as error:
        raise _damaged(folder, f"{name}: {error.strerror}") from error
    if zlib.crc32(mapped.data) != about.checksums.get(name):
        raise _damaged(folder, f"{name} has changed since it was written")
    return np.asarray(mapped)  # plain arrays are indexed several times as fast


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"the datastore {str(folder)!r} is damaged ({what}): build it again.")
