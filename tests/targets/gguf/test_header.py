"""Headers: as the gguf library reads them; every damage is a sentence."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.errors import ModelLoadError
from outpace.targets.hf.gguf.file import check_files
from outpace.targets.hf.gguf.header import Header, is_gguf, read_header
from targets.gguf.files import tiny, write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf") / "model.gguf"
    more: dict[str, Any] = {
        "some.flags": [True, False],
        "some.numbers": [1.5, -2.0],
        "some.whole": [-3, 70000],
        "some.text": "näïve \N{PILE OF POO}",
        "some.truth": True,
        "some.fraction": 0.25,
    }
    return write(place, "llama", tiny("llama"), "Q4_0", changes=more)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return bool(np.array_equal(ours, np.asarray(theirs, ours.dtype)))
    return bool(ours == theirs)


def test_it_says_what_the_library_reads(path: Path) -> None:
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.values) == list(fields)
    for name, found in fields.items():
        assert same(ours.values[name], found.contents()), name
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, list(mine.shape[::-1])) == (tensor.tensor_type.name, list(tensor.shape))
        assert mine.raw.numpy().tobytes() == tensor.data.tobytes()


def test_the_file_is_mapped_not_read(path: Path) -> None:
    name, stored = next(iter(read_header(path).tensors.items()))
    before = path.read_bytes()
    place = before.index(stored.raw.numpy().tobytes())
    changed = bytearray(before)
    changed[place] ^= 1
    with path.open("r+b") as file:
        file.write(changed)
    try:
        assert stored.raw[0] == changed[place], name
        stored.raw[0] ^= 1  # which changes the memory of this process only
        assert path.read_bytes() == changed
    finally:
        with path.open("r+b") as file:
            file.write(before)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    other = tmp_path / "blob"
    other.write_text("GGUF" + "x" * 40)
    assert is_gguf(other), "the first bytes count, whatever the name is"
    assert not is_gguf(tmp_path / "missing.gguf")
    other.write_text("other things")
    assert not is_gguf(other)
    with pytest.raises(ModelLoadError, match="no GGUF file"):
        read_header(other)
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"empty.gguf .it is empty.: download it again"):
        read_header(empty)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "the right to read it .chmod."),
        (errno.EIO, "name a file that can be read"),
    ],
)
def test_a_whole_file_that_cannot_be_read(
    number: int, remedy: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "not for you")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelLoadError, match=rf"cannot read .*not for you.*{remedy}"):
        check_files(path)


# -- damage ------------------------------------------------------------------------------------

HUGE = 1 << 62


def at(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]

    return change


def after(text: str, skip: int, form: str, value: int) -> Callable[[bytes], bytes]:
    """Changes a number after the first place where a text stands."""

    def change(data: bytes) -> bytes:
        return at(data.index(text.encode()) + len(text) + skip, form, value)(data)

    return change


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "version 1": (at(4, "<I", 1), "of version 1, and GGUF is read in versions 2 and 3"),
    "big-endian": (at(4, ">I", 3), "for big-endian machines"),
    "more tensors": (at(8, "<Q", HUGE), "its list of tensors would end"),
    "more values": (at(16, "<Q", HUGE), "its values would end"),
    "no tensors": (at(8, "<Q", 0), ""),
    "longer name": (at(24, "<Q", HUGE), "a text would end"),
    "unknown type": (after("general.architecture", 0, "<I", 77), "of the unknown type 77"),
    "longer list": (after("tokenizer.ggml.tokens", 8, "<Q", HUGE), "a list of texts would end"),
    "longer token": (after("tokenizer.ggml.tokens", 16, "<Q", HUGE), "a text would end"),
    "longer types": (after("ggml.token_type", 8, "<Q", HUGE), "'tokenizer.ggml.token_type' would"),
    "lists in a list": (after("ggml.token_type", 4, "<I", 9), "of the unknown type 9"),
    "dimensions": (after("output_norm.weight", 0, "<I", 1 << 31), "has 2147483648 dimensions"),
    "no dimensions": (after("output_norm.weight", 0, "<I", 0), "has 0 dimensions"),
    "shape": (after("output_norm.weight", 4, "<Q", HUGE), "would end beyond the end"),
    "empty shape": (after("output_norm.weight", 4, "<Q", 0), "has the shape (0,)"),
    "offset": (after("output_norm.weight", 16, "<Q", HUGE), "would end beyond the end"),
    "odd offset": (after("output_norm.weight", 16, "<Q", 3), "lies where none can"),
    "overlap": (after("output_norm.weight", 16, "<Q", 0), "lies where none can"),
    "unknown kind": (after("output_norm.weight", 12, "<I", 99), "does not know (number 99"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, path: Path, tmp_path: Path) -> None:
    change, reason = DAMAGES[damage]
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(change(path.read_bytes()))
    if not reason:
        assert read_header(damaged).tensors == {}
        return
    with pytest.raises(ModelLoadError) as caught:
        read_header(damaged)
    assert reason in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short(share: float, path: Path, tmp_path: Path) -> None:
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelLoadError, match=r"damaged or cut short .* download it again"):
        read_header(cut)


@pytest.mark.parametrize("alignment", [0, 1, 24, 1 << 30, "32"])
def test_odd_alignments(alignment: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.gguf", "llama", tiny("llama"), changes={"general.alignment": alignment}
    )
    with pytest.raises(ModelLoadError, match="would be aligned to"):
        read_header(path)


def test_another_alignment(tmp_path: Path) -> None:
    model = tiny("llama")
    header = read_header(write(tmp_path / "a.gguf", "llama", model, alignment=256))
    assert_holds(header, model)
    assert header.values["general.alignment"] == 256


def assert_holds(header: Header, model: Any) -> None:
    norm = header.tensors["output_norm.weight"].raw.view(torch.float32)
    assert torch.equal(norm, model.model.norm.weight)


@pytest.mark.parametrize("twice", ["value", "tensor"])
def test_names_that_come_twice(twice: str, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "twice.gguf"
    values = (b"some.whole", b"some.flags")
    names = values if twice == "value" else (b"blk.1.", b"blk.0.")
    data = path.read_bytes()
    other.write_bytes(data.replace(*names))
    with pytest.raises(ModelLoadError, match=f"it has two {twice}s named"):
        read_header(other)
