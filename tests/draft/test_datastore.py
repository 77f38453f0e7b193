"""Datastores: the order of suffixes, look-ups, files that are whole, damaged or somebody else's."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.words import word_tokenizer
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.methods.lookup.corpus import answer_files, answers, tokenised
from outpace.methods.lookup.datastore import DESCRIPTION, Datastore, describe, fingerprint_of
from outpace.methods.lookup.occurrences import SEPARATOR
from outpace.methods.lookup.suffix_order import suffix_order
from outpace.train.data import documents

VOCABULARY = 4
TEXTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=20), min_size=1, max_size=6)
SOME = TEXTS.filter(any)


@given(st.lists(st.integers(0, 3), max_size=60), st.sampled_from([1, 2, 8, 32]))
def test_suffixes_are_in_order(text: list[int], depth: int) -> None:
    order = suffix_order(np.array(text, np.int64), depth).tolist()
    expected = sorted(range(len(text)), key=lambda place: text[place : place + depth])
    assert order == expected  # both sorts keep what is equal in its order


def test_equal_suffixes_are_sorted_in_few_rounds() -> None:
    done: list[float] = []
    order = suffix_order(np.zeros(1000, np.int64), 32, done.append)
    assert order.tolist()[:31] == list(range(999, 968, -1))
    assert done == [0.2, 0.4, 0.6, 0.8, 1.0]


@given(
    SOME, st.lists(st.integers(-1, VOCABULARY), max_size=7), st.integers(1, 3), st.integers(0, 4)
)
def test_matches_are_those_of_a_plain_search(
    texts: list[list[int]], context: list[int], shortest: int, more: int
) -> None:
    store = Datastore.of(texts, VOCABULARY)
    places: dict[int, list[list[int]]] = {}
    for size in range(1, min(shortest + more, len(context)) + 1):
        pattern = context[-size:]
        places[size] = [
            text[begin + size :]
            for text in texts
            for begin in range(len(text))
            if text[begin : begin + size] == pattern
        ]
    longest = max((size for size, found in places.items() if found), default=0)
    found, match = store.matches(context, shortest, shortest + more)
    if longest < shortest:
        assert (len(found), match) == (0, 0)
        return
    assert match == longest
    follow = store.continuations(found, match, 1000, 3)
    expected = [(text[:3] + [SEPARATOR] * 3)[:3] for text in places[longest]]
    cut = [text[: text.index(SEPARATOR)] if SEPARATOR in text else text for text in follow]
    assert sorted(cut) == sorted([t for t in text if t != SEPARATOR] for text in expected)


def test_of_many_places_some_are_looked_at_evenly() -> None:
    store = Datastore.of([[0, 1]] * 600 + [[0, 2]] * 200, VOCABULARY)
    found, match = store.matches([0], 1, 4)
    firsts = [text[0] for text in store.continuations(found, match, 100, 1)]
    assert (len(found), len(firsts), firsts.count(1), firsts.count(2)) == (800, 100, 75, 25)


@pytest.mark.parametrize("vocabulary", [9, 70_000])
def test_a_saved_datastore_is_the_same(tmp_path: Path, vocabulary: int) -> None:
    texts = [[1, 2, 3, 8], [2, 3, vocabulary - 1]]
    store = Datastore.of(texts, vocabulary, "mine", "abc")
    store.save(tmp_path / "d")
    again = Datastore.open(tmp_path / "d")
    assert again.nbytes == store.nbytes
    sizes = describe(tmp_path / "d").sizes
    assert sizes == {file: (tmp_path / "d" / file).stat().st_size for file in sizes}
    found, match = again.matches([7, 2, 3], 1, 8)
    assert (len(found), match) == (2, 2)
    assert again.continuations(found, match, 9, 2) == store.continuations(found, match, 9, 2)
    about = again.description
    assert (about.tokens, about.texts, about.tokenizer, about.fingerprint) == (7, 2, "mine", "abc")


def saved(folder: Path) -> Path:
    Datastore.of([[1, 2, 3], [2, 3, 1, 2]], VOCABULARY).save(folder)
    return folder


@pytest.mark.parametrize(
    "name", ["tokens.bin", "order.bin", "starts.bin", "table.bin", DESCRIPTION]
)
@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "empty", "gone"])
def test_damaged_files_are_refused(tmp_path: Path, name: str, damage: str) -> None:
    file = saved(tmp_path / "d") / name
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = bytes([data[0] ^ 1]) + data[1:]
        file.write_bytes(
            {"cut": data[:-3], "longer": data + b"\0" * 8, "changed": changed, "empty": b""}[damage]
        )
    with pytest.raises(ConfigError, match=r"damaged|is no datastore") as raised:
        Datastore.open(tmp_path / "d")
    assert str(raised.value).endswith("build it again.") or "outpace datastore build" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"format": 2}, "format 2"), ({"tokens": 6}, "sizes"), ({"vocabulary": "4"}, "sizes"),
     ({"texts": -1}, "impossible"), ({"more": 1}, "cannot be read"),
     ({"checksums": {}}, "changed")],
)  # fmt: skip
def test_false_descriptions_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    file = saved(tmp_path / "d") / DESCRIPTION
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=said):
        Datastore.open(tmp_path / "d")


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no datastore"):
        Datastore.open(tmp_path)
    with pytest.raises(ConfigError, match="no text"):
        Datastore.of([[], []], VOCABULARY)


def test_another_tokenizer_is_refused() -> None:
    tokenizer = word_tokenizer()
    own = fingerprint_of(tokenizer)
    assert own == fingerprint_of(word_tokenizer(template=None))  # a template is no token
    store = Datastore.of([[1, 2]], 64, "words", own)
    store.check(own, 64)
    tokenizer.add_tokens(["w64"])
    for fingerprint, vocabulary in ((fingerprint_of(tokenizer), 65), (None, 64), (own, 63)):
        with pytest.raises(VocabularyMismatch):
            store.check(fingerprint, vocabulary)
    Datastore.of([[1, 2]], 64).check(None, 64)


# -- files -----------------------------------------------------------------------------------------


def words(found: list[int]) -> str:
    return str(word_tokenizer().decode(found))


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "array.json"])
def test_records_of_all_kinds_are_read(name: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "w3"}, {"role": "system", "content": "w4"}]
    shared = [{"from": "human", "value": "w5"}]
    records: list[Any] = [
        "w6 w7",
        {"text": "w8", "prompt": "w9"},
        {"messages": turns},
        {"conversations": shared},
        {"prompt": "w10", "completion": "w11"},
        {"instruction": "w12"},
        {"messages": [{"role": "odd", "content": "w13"}]},  # the template refuses it
        {"instruction": "w14", "input": "w15"},
    ]
    file = tmp_path / name
    lines = "\n\n".join(map(json.dumps, records)) + "\n"
    file.write_text(json.dumps(records, indent=1) if name == "array.json" else lines)
    found = [words(ids) for ids in tokenised([file], word_tokenizer())]
    assert found[:4] == ["w6 w7", "w8", "user w3 system w4", "user w5"]
    assert found[4].startswith("user w10")
    assert found[4].endswith("w11")
    assert found[5:] == ["w12", "w13", "w14 w15"]
    plain = [words(ids) for ids in tokenised([file], word_tokenizer(template=None))]
    assert plain[2:5] == ["w3 w4", "w5", "w10 w11"]


@pytest.mark.parametrize(
    "record",
    [{"question": "w3", "completion": "w4"}, {"chat": [{"from": "human", "value": "w3"}, "w4"]},
     {"content": "w3 w4"}, {"prompt": "w3", "reference": "w4"}],
)  # fmt: skip
def test_a_datastore_and_training_read_the_same_records(record: Any, tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "a.jsonl", word_tokenizer(template=None)
    file.write_text(json.dumps(record))
    (learned,) = documents([file], tokenizer, "a model")
    assert [words(ids) for ids in tokenised([file], tokenizer)] == ["w3 w4"]
    assert learned.text.split() == ["w3", "w4"]


def test_a_text_file_is_read_in_blocks_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.methods.lookup.corpus.BLOCK", 5)
    file = tmp_path / "a.txt"
    file.write_text("w3 w4 w5\nw6 w7\nw8", encoding="utf-8-sig")
    read: list[int] = []
    found = [words(ids) for ids in tokenised([file], word_tokenizer(), read.append)]
    assert found == ["w3 w4 w5", "w6 w7", "w8"]
    assert sum(read) == file.stat().st_size - 3  # without the byte order mark


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [("a.jsonl", b"{", "line 1 is not JSON"), ("a.jsonl", b'{"text": "a"}\n[1]', "2: this holds"),
     ("a.jsonl", b'{"messages": [{"role": 7}]}', "a chat is a list"), ("a.txt", b"\xff", "UTF-8"),
     ("a.jsonl", b"\xff\xfe", "UTF-8"), ("a.json", b"[1", "a.json is not JSON"),
     ("a.json", b'["a", 1]', "a.json, entry 2: this holds no text"),
     ("a.jsonl", b'{"text": ""}', "line 1: this holds no text")],
)  # fmt: skip
def test_unreadable_files_are_refused(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        list(tokenised([tmp_path / name], word_tokenizer()))
    with pytest.raises(ConfigError, match="cannot read"):
        list(tokenised([tmp_path / "missing.txt"], word_tokenizer()))


# -- answers ---------------------------------------------------------------------------------------


def test_answers_of_both_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"target": "t"}\n[[1], [2, 3]]\n[[4], [5]]\n')
    lines = b"[0, 0.0, [6, 7]]\n[1, 0.7, [8]]\n"
    (tmp_path / "00000.xz").write_bytes(lzma.compress(lines))
    (tmp_path / "about.json").write_text("{}")
    (tmp_path / "training.jsonl").write_text('{"step": 50}\n{"step": 100}\n')  # a run's log
    files = answer_files([tmp_path])
    read: list[int] = []
    assert list(answers(files, 9, read.append)) == [[6, 7], [8], [2, 3], [5]]
    assert sum(read) == sum(file.stat().st_size for file in files)
    with pytest.raises(ConfigError, match="tokens that the tokenizer does not know"):
        list(answers(files, 8))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [("a.jsonl", b"[[1], [2]]\n{}\n", "line 2 holds no answer"),
     ("a.jsonl", b"[[1], [true]]\n", "line 1 holds no answer"),
     ("a.jsonl", b"[]\n", "line 1 holds no answer"), ("a.jsonl", b"{", "is not JSON"),
     ("a.xz", lzma.compress(b"[0, 0.0, [1]]")[:-4], "it is damaged"), ("a.xz", b"no", "damaged"),
     ("a.xz", lzma.compress(b"\xff"), "UTF-8")],
)  # fmt: skip
def test_unreadable_answers_are_refused(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        list(answers(answer_files([tmp_path / name]), 9))
    with pytest.raises(ConfigError, match="holds no answers"):
        answer_files([tmp_path / "about.json"])


# -- the table -------------------------------------------------------------------------------------


def test_a_table_alone_is_saved_and_opened(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 1], [2, 3, 1, 2]]
    store = Datastore.of(texts, VOCABULARY, "mine", "abc")
    store.without_texts().save(tmp_path / "d")
    again = Datastore.open(tmp_path / "d")
    assert sorted(file.name for file in (tmp_path / "d").iterdir()) == [DESCRIPTION, "table.bin"]
    assert store.has_texts
    assert not again.has_texts
    assert (again.description.tokens, again.description.texts) == (8, 2)
    assert again.table.after([2]) == store.table.after([2]) is not None
    assert again.matches([1, 2], 1, 4) == (range(0), 0)
    assert [list(text) for text in store.texts()] == texts
    assert list(again.texts()) == []


def test_a_folder_from_before_there_were_tables_makes_one(tmp_path: Path) -> None:
    file = saved(tmp_path / "d") / DESCRIPTION
    known = json.loads(file.read_text())
    del known["entries"], known["sizes"]["table.bin"], known["checksums"]["table.bin"]
    file.write_text(json.dumps(known))
    store = Datastore.open(tmp_path / "d")
    assert store.table.after([2]) == Datastore.of(store.texts(), VOCABULARY).table.after([2])


def test_a_table_with_other_tokens_is_damaged(tmp_path: Path) -> None:
    file = saved(tmp_path / "d") / DESCRIPTION
    known = json.loads(file.read_text())
    for change, said in (
        ({"entries": known["entries"] + 1}, "number of entries"),
        ({"vocabulary": 2}, "tokens that its description excludes"),
        ({"entries": 10**9}, "impossible sizes"),
        ({"sizes": []}, "impossible sizes"),
        ({"checksums": []}, "impossible sizes"),
    ):
        file.write_text(json.dumps({**known, **change}))
        with pytest.raises(ConfigError, match=said):
            Datastore.open(tmp_path / "d")
