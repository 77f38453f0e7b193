"""The header of a GGUF file: what the file says of its model, and where its tensors lie.

A header is some numbers, then named values (among them the whole vocabulary), then the names,
shapes and places of the tensors. The file is mapped into memory and the header read from the map,
each count and length held against the bytes that are left before anything is made of it: a damaged
file costs a sentence, never memory. Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import errno
import math
import mmap
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outpace.core.values import shown
from outpace.errors import ModelLoadError
from outpace.targets.hf.loading.fetched import check_fetched

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Tensors begin at multiples of this many bytes, unless a file says otherwise."""

STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Types of values, as numpy calls them."""

MOST_DIMENSIONS = 4
SMALLEST_VALUE = 8 + 4 + 1
"""Bytes that a named value takes at least: the length of its name, its type, and itself."""
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
"""Bytes that the entry of a tensor takes at least."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as it lies in a file."""

    name: str
    kind: str
    """The kind of its numbers or blocks, as GGUF calls it: "F32", "Q4_K", ..."""
    shape: tuple[int, ...]
    """How its numbers are arranged, in torch's order: the last dimension is the one in which they
    lie side by side."""
    raw: Tensor
    """uint8, all its bytes: a view of the mapped file. Never write to it."""
    data: mmap.mmap
    """The mapped file."""
    begin: int
    """Where its bytes begin in the file."""

    @property
    def rows(self) -> Tensor:
        """The bytes of a matrix, ``[N, bytes of a row]``; of several, one's after another's."""
        return self.raw.view(math.prod(self.shape[:-1]), -1)

    def release(self, first: int = 0, end: int | None = None) -> None:
        """Takes its bytes from ``first`` to before ``end`` out of the process's memory; who looks
        at them again reads the file.

        Pages that hold other bytes too stay: numbers that are in no blocks are used where they lie,
        and what was written to them would be lost.
        """
        end = self.raw.nbytes if end is None else end
        begin = -(-(self.begin + first) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (self.begin + end) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if sys.platform != "win32" and size > 0:
            with suppress(OSError):  # of memory that the process has locked, which stays
                self.data.madvise(mmap.MADV_DONTNEED, begin, size)


@dataclass(frozen=True, eq=False)
class Header:
    """What one GGUF file says."""

    path: Path
    values: dict[str, Any]
    """Numbers, texts, lists of texts, numpy arrays of numbers."""
    tensors: dict[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """Returns whether a file is one of GGUF, by its name or its first bytes."""
    return path.is_file() and (path.suffix == ".gguf" or begins_as_gguf(path))


def begins_as_gguf(path: Path) -> bool:
    """Returns whether the first bytes of a file are those of GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Returns the header of a GGUF file. Raises ``ModelLoadError`` for anything else."""
    check_fetched([path])
    try:
        with path.open("rb") as file:
            # Copied on writing: torch warns of memory that it may not write to.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except PermissionError as error:
        raise ModelLoadError(
            f"cannot read {path} ({error.strerror}): give yourself the right to read it "
            "(chmod), or name another file."
        ) from error
    except OSError as error:
        remedy = "name a file that can be read."
        if error.errno == errno.ENOMEM:
            remedy = "it is larger than this machine's memory, so take one with fewer bits."
        raise ModelLoadError(f"cannot read {path} ({error.strerror}): {remedy}") from error
    except ValueError as error:  # mmap's, for no bytes at all
        raise ModelLoadError(f"cannot read {path} (it is empty): download it again.") from error
    try:
        return _Reader(path, data).header()
    except _Damaged as error:
        raise ModelLoadError(
            f"{path} is damaged or cut short ({error}): download it again."
        ) from error


class _Damaged(Exception):
    """What is wrong with the bytes of a file."""


class _Reader:
    """Reads a header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.at = 0
        """The next byte to be read."""

    def header(self) -> Header:
        self._check_start()
        tensors, count = self._number("<Q"), self._number("<Q")
        values = self._values(count)
        entries = self._entries(tensors)
        start = -(-self.at // (step := _alignment(values))) * step
        return Header(self.path, values, self._stored(entries, start, step))

    def _check_start(self) -> None:
        if self.data[: len(MAGIC)] != MAGIC:
            raise ModelLoadError(
                f"{self.path} is no GGUF file (it does not begin with 'GGUF'): name another file, "
                "or the folder of a saved model."
            )
        self.at = len(MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "was written for big-endian machines" if swapped else f"is of version {version}"
            raise ModelLoadError(
                f"{self.path} {what}, and GGUF is read in versions 2 and 3, little-endian: "
                "download a newer file of the model."
            )

    # -- pieces --------------------------------------------------------------------------------

    def _take(self, count: int, what: str) -> int:
        """Returns where the next ``count`` bytes begin, and steps after them."""
        begin = self.at
        if count > self.size - begin:
            raise _Damaged(f"{what} would end beyond the end of the file")
        self.at = begin + count
        return begin

    def _number(self, form: str) -> int:
        begin = self._take(struct.calcsize(form), "a number")
        return int(struct.unpack_from(form, self.data, begin)[0])

    def _text(self) -> str:
        length = self._number("<Q")
        begin = self._take(length, "a text")
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def _texts(self, count: int) -> list[str]:
        """Returns a list of texts. There may be hundreds of thousands, hence the plain loop."""
        self._room(count, 8, "a list of texts")
        data, at, size = self.data, self.at, self.size
        unpack, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if at + 8 > size:
                raise _Damaged("a list of texts would end beyond the end of the file")
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > size:
                raise _Damaged("a text would end beyond the end of the file")
            found.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def _room(self, count: int, each: int, what: str) -> None:
        """Raises unless ``count`` things of ``each`` bytes or more may follow."""
        if count > (self.size - self.at) // each:
            raise _Damaged(f"{what} would end beyond the end of the file")

    # -- values --------------------------------------------------------------------------------

    def _values(self, count: int) -> dict[str, Any]:
        self._room(count, SMALLEST_VALUE, "its values")
        values: dict[str, Any] = {}
        for _ in range(count):
            name = self._text()
            if name in values:
                raise _Damaged(f"it has two values named {shown(name)}")
            values[name] = self._value(name)
        return values

    def _value(self, name: str) -> Any:
        kind = self._number("<I")
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(name)
        return self._numbers(kind, 1, name)[0].item()

    def _array(self, name: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        return self._texts(count) if kind == STRING else self._numbers(kind, count, name)

    def _numbers(self, kind: int, count: int, name: str) -> np.ndarray[Any, Any]:
        if kind not in NUMBERS:
            raise _Damaged(f"its value {shown(name)} is of the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        begin = self._take(count * dtype.itemsize, f"its value {shown(name)}")
        return np.frombuffer(self.data, dtype, count, begin).copy()

    # -- tensors -------------------------------------------------------------------------------

    def _entries(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Returns name, shape, number of the kind, and offset of each tensor."""
        self._room(count, SMALLEST_TENSOR, "its list of tensors")
        return [self._entry() for _ in range(count)]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._text(), self._number("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise _Damaged(f"its tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _stored(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, step: int
    ) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        end = 0  # of the tensors so far, in the order of their places
        for name, shape, number, offset in sorted(entries, key=lambda entry: entry[3]):
            kind, nbytes = self._size(name, shape, number)
            if name in tensors:
                raise _Damaged(f"it has two tensors named {shown(name)}")
            if offset % step or offset < end:
                raise _Damaged(f"its tensor {shown(name)} lies where none can")
            end = offset + nbytes
            if start + end > self.size:
                raise _Damaged(f"its tensor {shown(name)} would end beyond the end of the file")
            begin = start + offset
            raw = torch.frombuffer(self.data, dtype=torch.uint8, count=nbytes, offset=begin)
            tensors[name] = StoredTensor(name, kind, shape, raw, self.data, begin)
        return tensors

    def _size(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """Returns the kind of a tensor, and how many bytes it takes."""
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelLoadError(
                f"{self.path} holds weights of a kind that the gguf library does not know (number "
                f"{number}, in {shown(name)}): use a Q4_K_M or Q8_0 file of the model, or a newer "
                "gguf library."
            ) from None
        numbers, (size, nbytes) = math.prod(shape), GGML_QUANT_SIZES[kind]
        if numbers == 0 or shape[-1] % size:
            raise _Damaged(f"its tensor {shown(name)} of kind {kind.name} has the shape {shape}")
        return kind.name, numbers // size * nbytes


def _alignment(values: dict[str, Any]) -> int:
    found = values.get("general.alignment", ALIGNMENT)
    if not isinstance(found, int) or isinstance(found, bool) or found not in _ALIGNMENTS:
        raise _Damaged(f"its tensors would be aligned to {shown(found)} bytes")
    return found


_ALIGNMENTS = frozenset(1 << power for power in range(3, 17))
