"""From a text to token ids, by the tokenizer of a model, for several threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


def tokenized(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of a text.

    tokenizer: transformers' own, or what is called like one.
    """
    # A text longer than the model takes is refused where its length is known. transformers would
    # besides write a warning of its own, about indexing errors that do not come.
    quiet = {"verbose": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, **quiet).input_ids
    return ids


LONG = 1 << 16
"""Characters from which on a text is long: more can take seconds."""


class SharedTokenizer:
    """Makes token ids for several threads, of one text at a time, since tokenizers are not made for
    several threads.

    A text of megabytes takes many seconds, and how many tokens it has is not known before. So long
    texts are left to a copy of the tokenizer, made when it is first needed: they keep each other
    waiting, and nobody else. Only fast tokenizers are copied: any other keeps all threads waiting
    while it works, as it is written in Python.

    lock: is to be held by whoever uses the tokenizer in any other way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._copied = isinstance(tokenizer, PreTrainedTokenizerFast)
        self.lock = threading.Lock()
        self._long_lock = threading.Lock()
        self._copy: Any = None
        self._processor_lock = threading.Lock()
        self._processor: Any = None

    def ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""
        if len(text) < LONG or not self._copied:
            with self.lock:
                return tokenized(self._tokenizer, text, add_special_tokens=add_special_tokens)
        with self._long_lock:
            return tokenized(self._own_copy(), text, add_special_tokens=add_special_tokens)

    @contextmanager
    def processor(self, whole: Any) -> Iterator[Any]:
        """Gives a processor of images and texts to one thread at a time.

        Images take long, too. So a processor that uses this tokenizer is copied, with a tokenizer
        of its own, and others go on using this one.
        """
        shares = whole.tokenizer is self._tokenizer
        with self._processor_lock, nullcontext() if self._copied or not shares else self.lock:
            if self._processor is None:
                made = copy.copy(whole) if shares and self._copied else whole
                if made is not whole:
                    made.tokenizer = self._another()
                self._processor = made
            yield self._processor

    def _own_copy(self) -> Any:
        if self._copy is None:
            self._copy = self._another()
        return self._copy

    def _another(self) -> Any:
        with self.lock:
            return copy.deepcopy(self._tokenizer)
