"""All readers of text files share one reader: what it says of a file that it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.errors import ConfigError, PromptError
from outpace.files import pieces, read_text


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_wrong_byte_is_named_by_its_place_in_the_file(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(mark + b"one\ntwo\ncaf\xe9\n")
    said = f"not UTF-8 text: byte 0xe9 at offset {len(mark) + 11} "
    with pytest.raises(PromptError, match=said):
        read_text(file)
    with pytest.raises(ConfigError, match=said):
        list(pieces(file, 0, error=ConfigError))


def test_pieces_end_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffä\u2028b\nccc\ndd".encode())
    assert list(pieces(file, 0)) == ["ä\u2028b\n", "ccc\n", "dd"]
    assert list(pieces(file, 4)) == ["ä\u2028b\n", "ccc\ndd"]
    assert read_text(file) == "ä\u2028b\nccc\ndd"


def test_a_missing_file_is_named_with_its_kind(tmp_path: Path) -> None:
    missing = tmp_path / "a.txt"
    with pytest.raises(PromptError, match=r"cannot read prompt file '.*a\.txt': No such file"):
        read_text(missing, "prompt file")
    with pytest.raises(PromptError, match=r"cannot read file '.*a\.txt': No such file"):
        list(pieces(missing, 0))
