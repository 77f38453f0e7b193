"""All readers of text files share one reader: what it says of a file that it cannot read."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from outpace.errors import ConfigError, PromptError
from outpace.files import pieces, read_text, remove_parts, replacing


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


def test_a_file_that_is_replaced_is_whole_or_the_former_one(tmp_path: Path) -> None:
    file, link = tmp_path / "kept.json", tmp_path / "link.json"
    file.write_text("former")
    file.chmod(0o640)
    link.symlink_to(file)
    with suppress(KeyboardInterrupt), replacing(link) as part:
        part.write_text("half of i")
        raise KeyboardInterrupt
    assert file.read_text() == "former"
    with replacing(link) as part:
        part.write_text("the new one")
        assert file.read_text() == "former"
    assert (file.read_text(), link.is_symlink()) == ("the new one", True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_what_cannot_be_replaced_is_written_itself(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with replacing(Path(f"/dev/fd/{writer}")) as part:
            part.write_text("through it")
        assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
        os.close(writer)
    file = tmp_path / "a file"
    file.write_text("former")
    with pytest.MonkeyPatch.context() as patch:  # a folder that is read-only, also for root
        patch.setattr(os, "access", lambda path, _: Path(path) == file)
        with replacing(file) as part:
            assert part == file
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_mounted_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Path, __: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    file = tmp_path / "a file"
    file.write_text("former")
    monkeypatch.setattr(Path, "replace", busy)
    with replacing(file) as part:
        part.write_text("new")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("new", [file])


def test_parts_that_were_left_are_removed(tmp_path: Path) -> None:
    for name in ("a[1].json.part", "a[1].json.0f.part", "a1.json.0f.part"):
        (tmp_path / name).touch()
    remove_parts(tmp_path / "a[1].json")
    assert [each.name for each in tmp_path.iterdir()] == ["a1.json.0f.part"]


def test_what_is_no_file_is_written_itself(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(pipe) as part:
            part.write_text("through it")
        assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
