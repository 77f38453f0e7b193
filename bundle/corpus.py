"""The training text: which documents there are, and in which shares they are mixed.

`--data DIR` names a folder with `corpus/`, `corpus_heldout/` and `prompts/`. Python source comes
from the standard library of the interpreter that runs the training.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizer import ASSISTANT, END, END_OF_TEXT, USER, Tokenizer

SHARES = {
    "books_children": 0.20,
    "dialogues_sgd": 0.15,
    "tinystories_sample": 0.14,
    "fairytales": 0.13,
    "stdlib": 0.13,
    "gsm8k_train": 0.08,
    "mbpp_train": 0.05,
    "fairytaleqa_train": 0.03,
    "oasst_en100": 0.02,
    "wikitext2_valid": 0.02,
    "books_fiction": 0.01,
    "onestop_english": 0.01,
    "peps": 0.01,
    "selfinstruct_seed": 0.01,
    "us_speeches": 0.01,
}
HELDOUT = ("fairytales_heldout", "tinystories_heldout", "wikitext2_test")

SEPARATOR = f"\n{END_OF_TEXT}\n"
TURN = re.compile(r"^(User|Assistant): ", re.MULTILINE)
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data",
           "turtledemo", "ensurepip", "__pycache__", "unicodedata"}  # fmt: skip
LARGEST_SOURCE = 120_000
GOLDEN = 0.6180339887498949
SILVER = 0.4142135623730951


def chat(turns: list[tuple[str, str]]) -> str:
    """The turns in the layout that the chat template produces."""
    marks = {"User": USER, "Assistant": ASSISTANT}
    return "".join(f"{marks[role]}\n{text.strip()}{END}\n" for role, text in turns)


def split_turns(text: str) -> list[tuple[str, str]]:
    """`User: ...` and `Assistant: ...` lines as (role, text) pairs."""
    parts = TURN.split(text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def from_pair(row: dict[str, str]) -> str:
    """A chat document from an instruction, its context and its response."""
    before: list[tuple[str, str]] = []
    question = row["instruction"]
    if row["source"] == "mbpp":
        question += f"\nYour code should pass these tests:\n{row['context']}"
    elif TURN.match(row["context"]):
        before = split_turns(row["context"])
    elif row["context"]:
        question += f"\n\n{row['context']}"
    return chat([*before, ("User", question), ("Assistant", row["response"].replace("\r", ""))])


def from_dialogue(number: int, text: str) -> str:
    """Every third dialogue as chat, the others as the plain lines they are."""
    return chat(split_turns(text)) if number % 3 == 0 else text


def stdlib() -> Iterator[str]:
    """The standard library's modules, without tests and without large tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if SKIPPED.isdisjoint(inside) and path.stat().st_size < LARGEST_SOURCE:
            yield path.read_text(encoding="utf-8", errors="ignore")


def documents(data: Path, source: str) -> list[str]:
    """All documents of one source, as the models are to see them."""
    if source == "stdlib":
        return list(stdlib())
    folder = data / ("corpus_heldout" if source in HELDOUT else "corpus")
    pairs = folder / f"{source}.jsonl"
    if pairs.exists():
        lines = pairs.read_text(encoding="utf-8").splitlines()
        return [from_pair(json.loads(line)) for line in lines]
    texts = (folder / f"{source}.txt").read_text(encoding="utf-8").split(SEPARATOR)
    if source == "dialogues_sgd":
        return [from_dialogue(number, text) for number, text in enumerate(texts)]
    return texts


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of tokens, each document preceded by the separator."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts):
        stream.append(separator)
        stream.extend(encoding.ids)
    stream.append(separator)
    return np.array(stream, dtype=np.uint16)


def streams(data: Path, tokenizer: Tokenizer, cache: Path) -> dict[str, np.ndarray]:
    """The token streams of all sources, kept in `cache` between runs."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in [*SHARES, *HELDOUT]:
        path = cache / f"{source}.npy"
        if not path.exists():
            np.save(path, encode(tokenizer, documents(data, source)))
        found[source] = np.load(path)
    return found


class Mix:
    """Draws training rows so that shares hold and every stream is covered evenly.

    Sources and positions follow additive recurrences, which spread more evenly than random draws
    and need no state beyond the counters.
    """

    def __init__(self, found: dict[str, np.ndarray], seed: int) -> None:
        self.sources = list(SHARES)
        self.streams = [found[source] for source in self.sources]
        self.edges = np.cumsum([SHARES[source] for source in self.sources])
        self.edges /= self.edges[-1]
        self.phases = np.random.default_rng(seed).random(len(self.sources) + 1)
        self.rows = 0
        self.drawn = dict.fromkeys(SHARES, 0)
        self.tokens = dict.fromkeys(SHARES, 0)

    def batch(self, rows: int, length: int) -> np.ndarray:
        """`rows` crops of `length + 1` tokens."""
        return np.stack([self._row(length) for _ in range(rows)])

    def _row(self, length: int) -> np.ndarray:
        place = (self.phases[-1] + self.rows * SILVER) % 1.0
        which = int(np.searchsorted(self.edges, place, side="right"))
        source, stream = self.sources[which], self.streams[which]
        start = (self.phases[which] + self.drawn[source] * GOLDEN) % 1.0
        first = int(start * (len(stream) - length - 1))
        self.rows += 1
        self.drawn[source] += 1
        self.tokens[source] += length
        return stream[first : first + length + 1].astype(np.int64)

    def state(self) -> dict[str, object]:
        """The counters, for a checkpoint."""
        return {"rows": self.rows, "drawn": self.drawn, "tokens": self.tokens}

    def restore(self, state: dict[str, object]) -> None:
        """The inverse of `state`."""
        vars(self).update(state)
