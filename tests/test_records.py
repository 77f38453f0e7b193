"""Records of JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.errors import PromptError
from outpace.files import holds_records, records


def read(name: str, text: str) -> list[tuple[object, str]]:
    return [(each.value, each.where) for each in records(text.split("\n"), Path(name))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSON"])
def test_lines_are_records_under_each_name(name: str) -> None:
    assert holds_records(Path(name))
    lines = read(name, '{"a": 1}\n\n[2]\n')
    assert lines == [({"a": 1}, f"{name}, line 1"), ([2], f"{name}, line 3")]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_is_an_array_or_one_record(indent: int | None) -> None:
    entries = [{"a": 1}, "b"]
    found = read("a.json", json.dumps(entries, indent=indent))
    assert found == [({"a": 1}, "a.json, entry 1"), ("b", "a.json, entry 2")]
    assert read("a.json", json.dumps(entries[0], indent=indent)) == [({"a": 1}, "a.json")]
    assert read("a.json", " \n") == []


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '[{"a": 1},\n{"a"', r"^a\.json is not JSON .*line 2 .* an array of records"),
        ("a.json", "some text", r"^a\.json is not JSON .* name it \.txt"),
        ("a.json", "[" * 100_000, r"^a\.json is not JSON"),
        ("a.json", '{"a": 1}\n{"a"', r"^a\.json, line 2 is not JSON"),
        ("a.jsonl", '[{"a": 1},\n{"a": 2}]', r"^a\.jsonl, line 1 is not JSON"),
    ],
)
def test_what_is_not_json_is_named(name: str, text: str, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        read(name, text)


def test_texts_are_no_records() -> None:
    assert not holds_records(Path("a.txt"))
    assert not holds_records(Path("json"))
