"""The datastore that look-ups draft from: texts that can be searched for any context (a suffix
array), and the table of the likeliest successors of their n-grams.

A folder with a description, the table, and three arrays, which are mapped into memory and not read
whole:

    datastore.json   sizes, checksums, and which tokenizer the tokens are of
    table.bin        the likeliest successors of contexts of a few tokens, compressed (`NgramTable`)
    tokens.bin       all texts, a separator after each
    order.bin        the places of the tokens, sorted by what stands there
    starts.bin       for each token, where in that order its places begin

One that is to be small has the table alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outpace.core.values import shown
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.files import replacing
from outpace.methods.lookup.continuations import Texts
from outpace.methods.lookup.occurrences import SEPARATOR
from outpace.methods.lookup.suffix_order import suffix_order
from outpace.methods.lookup.table import ENTRIES, NgramTable
from outpace.targets.hf.loading.loaded import LoadedModel

FORMAT = 1
DESCRIPTION = "datastore.json"
TABLE = "table.bin"
DEPTH = 32
"""Tokens by which places are sorted: a context, and some of what follows it."""

LARGEST = 2**32 - 1
"""Tokens that a datastore can hold, separators included."""

Array = NDArray[Any]
_NONE: Array = np.empty(0, np.uint32)


def fingerprint_of(tokenizer: Any) -> str:
    """Returns a short text that two tokenizers share only if each token has the same number."""
    listed = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.sha256(listed).hexdigest()[:32]


def identity(target: LoadedModel) -> tuple[int, str, str | None]:
    """Returns whose tokens a target's are, as `Datastore.of` takes it: how many there are, the
    tokenizer's name and its fingerprint."""
    tokenizer = target.tokenizer
    fingerprint = None if tokenizer is None else fingerprint_of(tokenizer)
    return target.vocabulary, Path(str(target.name)).name, fingerprint


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a datastore says of itself."""

    tokens: int
    """Tokens of all texts, without separators. They may have been left out since."""
    texts: int
    vocabulary: int
    """Every token is below this number, which is the separator."""
    tokenizer: str = ""
    """The name of the tokenizer."""
    fingerprint: str | None = None
    """What `fingerprint_of` says of the tokenizer; None where token ids were given."""
    entries: int = 0
    """Entries of the table that is saved."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of each file."""


class Datastore:
    """Texts with the order of all their suffixes (a suffix array), and the table of what mostly
    follows their n-grams; or the table alone."""

    def __init__(
        self,
        description: Description,
        tokens: Array,
        order: Array,
        starts: Array,
        table: NgramTable | None = None,
    ) -> None:
        """tokens: ``[n]``, separators included; order: ``[n]`` without those of the separators;
        starts: ``[V + 1]``. All three are empty where the texts are left out. table: unset, it is
        made of the texts when it is needed."""
        self.description, self._table = description, table
        self._arrays = {"tokens.bin": tokens, "order.bin": order, "starts.bin": starts}
        self._tokens, self._order, self._starts = tokens, order, starts

    @property
    def has_texts(self) -> bool:
        """Whether texts are there, and not their table alone."""
        return len(self._tokens) > 0

    @property
    def table(self) -> NgramTable:
        """The table of what mostly follows the n-grams of its texts."""
        if self._table is None:
            ids = self._tokens.astype(np.int64)
            self._table = NgramTable.of(np.where(ids < self.description.vocabulary, ids, SEPARATOR))
        return self._table

    def texts(self) -> Iterator[Array]:
        """Yields the texts as token ids."""
        ends = (self._tokens == self.description.vocabulary).nonzero()[0]
        begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield self._tokens[begin:end]

    # -- making and keeping --------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int] | Array],
        vocabulary: int,
        tokenizer: str = "",
        fingerprint: str | None = None,
        progress: Callable[[float], None] | None = None,
        *,
        with_texts: bool = True,
    ) -> Datastore:
        """Returns the datastore of some texts, each as token ids below ``vocabulary``.

        with_texts: whether it keeps them, and not their table alone. progress: called with the
        share of the sorting that is done. Raises ``ConfigError`` where there is no text. The same
        texts in the same order give the same datastore.
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
        texts_read = len(parts) // 2
        about = Description(
            tokens=len(tokens) - texts_read,
            texts=texts_read,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
        )
        if not with_texts:
            return cls(about, _NONE, _NONE, _NONE, cls(about, tokens, _NONE, _NONE).table)
        order = suffix_order(tokens, DEPTH, progress)
        order = order[: about.tokens].astype(np.uint32)  # separators sort last
        starts = np.searchsorted(tokens[order], np.arange(vocabulary + 1)).astype(np.int64)
        return cls(about, tokens, order, starts)

    def without_texts(self) -> Datastore:
        """Returns its table alone."""
        return Datastore(self.description, _NONE, _NONE, _NONE, self.table)

    def with_table(self, table: NgramTable) -> Datastore:
        """Returns its texts with another table."""
        return Datastore(self.description, self._tokens, self._order, self._starts, table)

    @classmethod
    def of_table(
        cls, table: NgramTable, vocabulary: int, tokenizer: str, fingerprint: str | None
    ) -> Datastore:
        """Returns a datastore that never had texts."""
        about = Description(
            tokens=0,
            texts=0,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
        )
        return cls(about, _NONE, _NONE, _NONE, table)

    def save(self, folder: Path) -> None:
        """Writes the files; the description is written last, so that a folder with one is whole."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / DESCRIPTION).unlink(missing_ok=True)
            files = {TABLE: np.frombuffer(self.table.to_bytes(), np.uint8)}
            files |= self._arrays if self.has_texts else {}
            for name in self._arrays.keys() - files.keys():
                (folder / name).unlink(missing_ok=True)
            for name, array in files.items():
                with replacing(folder / name) as part:  # who has mapped the former one keeps it
                    array.tofile(part)
            about = {
                **asdict(self.description),
                "entries": len(self.table),
                "sizes": {name: array.nbytes for name, array in files.items()},
                "checksums": {name: zlib.crc32(array.data) for name, array in files.items()},
            }
            text = json.dumps({"format": FORMAT, **about}, indent=1)
            with replacing(folder / DESCRIPTION) as part:
                part.write_text(text + "\n", encoding="utf-8")
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
        table = _table(path, about) if TABLE in about.sizes else None
        if set(about.sizes) == {TABLE}:
            return cls(about, _NONE, _NONE, _NONE, table)
        kind = np.uint16 if about.vocabulary <= np.iinfo(np.uint16).max else np.uint32
        tokens = _mapped(path, "tokens.bin", about, kind)
        order = _mapped(path, "order.bin", about, np.uint32)
        starts = _mapped(path, "starts.bin", about, np.int64)
        sizes = (len(tokens), len(order), len(starts))
        if sizes != (about.tokens + about.texts, about.tokens, about.vocabulary + 1):
            raise _damaged(path, "its files and its description say different sizes")
        return cls(about, tokens, order, starts, table)

    @classmethod
    def for_target(cls, given: Any, loaded: LoadedModel) -> Datastore:
        """Returns a datastore, which may be given as its folder, for a target with its tokens.

        Raises ``ConfigError`` for what is no datastore, and ``VocabularyMismatch``.
        """
        found = given if isinstance(given, Datastore) else cls.open(given)
        known = loaded.tokenizer is not None and found.description.fingerprint is not None
        fingerprint = fingerprint_of(loaded.tokenizer) if known else None
        found.check(fingerprint, int(loaded.config.vocab_size))
        return found

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
        """Returns what follows at some of these places, `SEPARATOR` where a text has ended before.

        match: tokens that matched; most: places that are looked at, evenly in their order; length:
        tokens of each continuation.
        """
        count = min(most, len(found))
        chosen = found.start + np.arange(count, dtype=np.int64) * len(found) // max(1, count)
        places = self._order[chosen].astype(np.int64) + match
        index = (places[:, None] + np.arange(length)).clip(max=len(self._tokens) - 1)
        texts = self._tokens[index].astype(np.int64)
        texts[texts == self.description.vocabulary] = SEPARATOR
        listed: Texts = texts.tolist()
        return listed

    def _range(self, pattern: Sequence[int]) -> range:
        """The places that begin with a pattern, in their order."""
        first, size, tokens = pattern[0], len(pattern), self._tokens
        if not self.has_texts or not 0 <= first < self.description.vocabulary:
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
        """Bytes of all arrays, in memory or mapped into it."""
        table = 0 if self._table is None else self._table.nbytes
        return table + sum(array.nbytes for array in self._arrays.values())


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
    numbers = (about.tokens, about.texts, about.vocabulary, about.entries)
    if (
        not (isinstance(about.sizes, dict) and isinstance(about.checksums, dict))
        or not all(isinstance(number, int) and number >= 0 for number in numbers)
        or not about.vocabulary
        or not ((about.texts and about.tokens) or about.entries)
        or about.entries > ENTRIES
    ):
        raise _damaged(folder, f"{DESCRIPTION} says impossible sizes")
    return about


def read_datastore(name: str, value: Any) -> Any:
    """Reads the option that names a datastore."""
    if not isinstance(value, (str, os.PathLike, Datastore)):
        raise ConfigError(
            f"{name!r} must be the folder that `outpace datastore build` has written, not "
            f"{shown(value)}."
        )
    return value


def _table(folder: Path, about: Description) -> NgramTable:
    """The table of a folder."""
    data = _mapped(folder, TABLE, about, np.uint8).tobytes()
    try:
        table = NgramTable.from_bytes(data, about.entries)
    except ValueError as error:
        raise _damaged(folder, f"{TABLE}: {error}") from error
    if table.largest >= about.vocabulary:
        raise _damaged(folder, f"{TABLE} holds tokens that its description excludes")
    return table


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
