"""Our own code for passes over a few tokens (`csrc/native.cpp`), and how Python calls it.

The library may come with the wheel (`prebuilt`). Otherwise the source is compiled on the machine
that uses it, once, and kept in the user's cache folder (`library.compiler`). Where there is no
compiler either there is no library, and models are computed by torch alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.errors import ConfigError
from outpace.targets.cpu import prebuilt
from outpace.targets.cpu.library.compiler import PATIENCE, CompilerError, find_compiler
from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.weights.blocks import KINDS as BLOCK_KINDS
from outpace.targets.cpu.weights.blocks import Blocks, grid_codes
from outpace.targets.cpu.weights.weight import (
    BLOCK_PANEL,
    KINDS,
    LINE,
    BlockShape,
    LinearStruct,
    PreparedLinears,
)
from outpace.targets.hf.logits import LogitScaling

LOGGER = logging.getLogger("outpace")

SOURCE = prebuilt.SOURCE

BLOCK_INPUTS = 32
"""Inputs of the smallest blocks (`block_formats.h`)."""

PIECE = 1 << 24
"""Bytes of a weight in blocks that are laid out at once."""

LARGE_PAGE = 1 << 21
"""Bytes of a page of memory, where the system has large ones."""

WORTH_A_THREAD = 1 << 15
"""Weights of a product per thread, at least: with fewer, starting a thread takes longer."""


class LogitsOutput(NamedTuple):
    """What a pass computes after its last layer."""

    heads: ctypes.Array[LinearStruct] | None
    """Output matrices, each of a part of the vocabulary; None: no logits are wanted."""
    head_count: int
    """How many these are."""
    logits: int | None
    """A pointer to where the logits ``[A, keep, V]`` go, one matrix's after another's."""
    keep: int
    scaling: LogitScaling = LogitScaling()


class StatesOutput(NamedTuple):
    """Where a pass writes what its layers leave."""

    first: int | None
    """A pointer to that of the first layer; None: it is not wanted."""
    stride: int
    """How many floats further the next layer's is."""


NO_LOGITS, NO_STATES = LogitsOutput(None, 0, None, 0), StatesOutput(None, 0)


class Native:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` where the file is no library, `CompilerError` where it lacks our
        functions."""
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "outpace_kinds"):
            raise CompilerError(
                f"the compiled {path.name} shows none of its functions, as with an option "
                "-fvisibility=hidden in CXX"
            )
        pointer, number, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        threads = (pointer, pointer, short)
        self._kinds: int = library.outpace_kinds()
        self.lanes: int = library.outpace_lanes()
        """Floats in a vector of the processor."""
        library.outpace_panel.restype = number
        self.panel: int = library.outpace_panel()
        """Outputs whose weights make one panel (`weight.to_panels`)."""
        self._products = library.outpace_products
        given = pointer, pointer, number, number, pointer, number, pointer
        self._products.argtypes = (*given, *threads)
        self._quantized_size = library.outpace_quantized_size
        self._quantized_size.argtypes, self._quantized_size.restype = (number, number), number
        self._blocks_size = library.outpace_blocks_size
        self._blocks_size.argtypes, self._blocks_size.restype = (short, number, number), number
        self._lay_out_blocks = library.outpace_lay_out_blocks
        self._lay_out_blocks.argtypes = (short, *(pointer,) * 2, *(number,) * 4, pointer, *threads)
        self._dequantize_blocks = library.outpace_dequantize_blocks
        self._dequantize_blocks.argtypes = (short, pointer, number, number, pointer)
        self._dequantize_rows = library.outpace_dequantize_rows
        self._dequantize_rows.argtypes = (short, *(pointer,) * 2, number, number, pointer)
        self._scratch = library.outpace_scratch
        self._scratch.argtypes = (pointer, *(number,) * 4, short)
        self._scratch.restype = number
        self._layers = library.outpace_layers
        one = (*(pointer,) * 6, number, pointer, number, *(ctypes.c_float,) * 2, pointer, number)
        self._layers.argtypes = (pointer, number, *one, *threads)
        self._parallel = _torchs_threads()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles stand for the library of the process that reads them."""
        return _again, ()

    def takes(self, dtype: torch.dtype) -> bool:
        """Returns whether weights may have this dtype."""
        return KINDS.get(dtype, self._kinds) < self._kinds

    def products(self, x: Tensor, weights: PreparedLinears) -> Tensor:
        """Returns x times each weight, flat: ``[..., N]`` of the first, then of the second, ...

        x: float32 ``[..., K]``, contiguous.
        """
        rows = x.numel() // weights.inputs
        y = x.new_empty(rows * sum(weights.outputs))
        if rows == 0:  # rows are shared out among tiles, of which there would be none
            return y
        structs, threads = weights.structs, self._threads(weights.size)
        inputs, count = weights.inputs, len(weights.outputs)
        room = self._room_for_activations(rows, inputs) if weights.in_blocks else None
        where = None if room is None else room.data_ptr()
        self._products(x.data_ptr(), y.data_ptr(), rows, inputs, structs, count, where, *threads)
        return y

    def _room_for_activations(self, rows: int, inputs: int) -> Tensor:
        """Returns memory for the quantised activations of a product; it begins with a line."""
        room = torch.empty(self._quantized_size(rows, inputs) + LINE, dtype=torch.uint8)
        return room[-room.data_ptr() % LINE :]

    # -- weights in blocks -------------------------------------------------------------------------

    def lay_out_blocks(self, blocks: Blocks) -> Tensor:
        """Returns a weight in blocks in the order in which products read it: uint8, flat.

        A view of a mapped file is released piece by piece, so that a weight is never held twice.
        """
        shape = _shape_of(blocks)
        size = self._blocks_size(*shape)
        begin = LARGE_PAGE if size >= LARGE_PAGE else LINE
        room = torch.empty(size + begin, dtype=torch.uint8)  # what is not written takes no memory
        panels = room[-room.data_ptr() % begin :][:size]
        threads = self._threads(blocks.outputs * blocks.inputs)
        kind, *sizes = shape
        given = kind, blocks.raw.data_ptr(), _grid_of(blocks), *sizes
        each = BLOCK_PANEL * blocks.raw.shape[1]  # bytes of a panel, as the file has it
        count, step = -(-blocks.outputs // BLOCK_PANEL), max(1, PIECE // each)
        for first in range(0, count, step):
            last = min(first + step, count)
            self._lay_out_blocks(*given, first, last, panels.data_ptr(), *threads)
            if blocks.release is not None:
                blocks.release(first * each, min(last * each, blocks.nbytes))
        return panels

    def dequantize_blocks(self, panels: Tensor, shape: BlockShape) -> Tensor:
        """Returns a weight that `lay_out_blocks` has laid out, as float32 ``[N, K]``."""
        whole = torch.empty(shape.outputs, _whole_blocks(shape.inputs))
        self._dequantize_blocks(shape.number, panels.data_ptr(), *whole.shape, whole.data_ptr())
        return whole[:, : shape.inputs]

    def dequantize_rows(self, blocks: Blocks) -> Tensor:
        """Returns what blocks stand for, float32 ``[N, K]``, on one thread: for a few rows."""
        kind, *sizes = _shape_of(blocks)
        found = torch.empty(sizes)
        given = blocks.raw.data_ptr(), _grid_of(blocks)
        self._dequantize_rows(kind, *given, *sizes, found.data_ptr())
        return found

    def scratch(self, layers: Any, rows: int, columns: int, view: int, threads: int) -> int:
        """Returns the floats that layers need to work in, in a pass over some tokens of each row,
        which may see ``view`` slots."""
        return int(self._scratch(layers, len(layers), rows, columns, view, threads))

    def layers(
        self,
        layers: Any,
        plan: Any,
        x: Tensor,
        cache: Any,
        reading: Any,
        norm: Any,
        threads: int,
        ending: LogitsOutput,
        states: StatesOutput,
    ) -> None:
        """Replaces x by what layers make of it, or writes the logits.

        layers, plan, cache, reading: structures as the source knows them; x: float32, contiguous;
        norm: the structure of what comes after the last layer, or None.
        """
        after = None if norm is None else ctypes.byref(norm)
        heads, count, logits, keep, scaling = ending
        last = heads, count, logits, keep, scaling.scale, scaling.cap or 0.0
        read = ctypes.byref(plan), x.data_ptr(), ctypes.byref(cache), ctypes.byref(reading)
        given = *read, after, *last, *states
        self._layers(layers, len(layers), *given, *self._parallel, threads)

    def _threads(self, weights: int) -> tuple[Any, Any, int]:
        return *self._parallel, min(torch.get_num_threads(), 1 + weights // WORTH_A_THREAD)


def _shape_of(blocks: Blocks) -> tuple[int, int, int]:
    return BLOCK_KINDS.index(blocks.kind), blocks.outputs, blocks.inputs


def _grid_of(blocks: Blocks) -> int | None:
    """A pointer to the grid of a kind of blocks, None for kinds without."""
    found = grid_codes(blocks.kind)
    return None if found is None else found.data_ptr()


def _whole_blocks(inputs: int) -> int:
    return -(-inputs // BLOCK_INPUTS) * BLOCK_INPUTS


def _torchs_threads() -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None]:
    """Returns pointers to the functions that run work on torch's threads and that say how many
    threads take part; None, twice, where torch is not built with GNU's OpenMP."""
    torchs = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(torchs))
        entries = library.GOMP_parallel, library.omp_get_num_threads
    except (OSError, AttributeError):
        return None, None
    return ctypes.cast(entries[0], ctypes.c_void_p), ctypes.cast(entries[1], ctypes.c_void_p)


@dataclass(frozen=True)
class Build:
    """The outcome of compiling and loading the library: one of the two is None."""

    library: Native | None
    problem: str | None
    """Why there is no library, in one line."""


@cache
def build() -> Build:
    """Returns the library of this process, compiled if this machine has none yet.

    Where there is none, one warning says why and what to do.
    """
    try:
        return Build(_loaded(), None)
    except (OSError, CompilerError) as error:
        problem = str(error)
    LOGGER.warning("outpace: models on the CPU are %s.", slow_because(problem))
    return Build(None, problem)


def native() -> Native | None:
    """Returns the library, or None where it cannot be built."""
    return build().library


def slow_because(problem: str) -> str:
    """Returns what the missing library costs, why it is missing, and what helps."""
    return (
        f"several times slower than with outpace's own kernels, because {problem}: install a C++ "
        "compiler (such as g++), or name one in CXX"
    )


def _loaded() -> Native:
    """Returns the library that came with the wheel, if one for this processor did. Otherwise it is
    compiled, and taken from the first folder that can keep it; where none can, it is for this
    process only."""
    if os.name != "posix":
        raise CompilerError("they are made for Linux and macOS")
    from outpace.targets.cpu.library.compiler import (  # locks of POSIX
        LibraryCache,
        cache_folders,
    )

    carried = prebuilt.find(this_processor().flags)
    if carried is not None:
        try:
            return Native(carried)
        except OSError as error:  # made for another system
            LOGGER.info("%s cannot be loaded: %s", carried, error)
    compiler = find_compiler()
    texts = (each.name.encode() + b"\0" + each.read_bytes() for each in prebuilt.sources())
    digest = hashlib.sha256(b"\0".join((compiler.identity, *texts)))
    key = f"native-{digest.hexdigest()[:24]}"

    def make(output: Path) -> None:
        compiler.compile(SOURCE, output)

    for folder in cache_folders():
        try:
            return Native(LibraryCache(folder).find_or_make(key, make, patience=PATIENCE))
        except OSError as error:  # no place to write to, or not a safe one
            LOGGER.info("compiled code is not kept in %s: %s", folder, error)
    with tempfile.TemporaryDirectory(prefix="outpace-") as passing:
        output = Path(passing) / f"{key}.so"
        make(output)
        return Native(output)


def _again() -> Native:
    """Returns the library of this process, in the place of another process's."""
    found = build()
    if found.library is None:
        raise ConfigError(
            "this model was saved with outpace's own CPU kernels, which this machine lacks because "
            f"{found.problem}: load the model from its folder instead."
        )
    return found.library
