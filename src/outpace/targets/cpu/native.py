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
from collections.abc import Sequence
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
from outpace.targets.hf.logits import LogitScaling

LOGGER = logging.getLogger("outpace")

SOURCE = prebuilt.SOURCE

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}
"""Dtypes of weights, by their numbers in `dense_products.h`."""

FIRST_BLOCK_KIND = len(KINDS)
"""The number of the first kind of weights in blocks (`linear.h`); the others follow in the order of
`blocks.KINDS`."""

BLOCK_INPUTS = 32
"""Inputs of the smallest blocks (`block_formats.h`)."""

BLOCK_PANEL = 16
"""Outputs of a panel of weights in blocks, on all processors (`block_formats.h`)."""

LINE = 64
"""Bytes of a line of the processor's cache."""

PIECE = 1 << 24
"""Bytes of a weight in blocks that are laid out at once."""

LARGE_PAGE = 1 << 21
"""Bytes of a page of memory, where the system has large ones."""

WORTH_A_THREAD = 1 << 15
"""Weights of a product per thread, at least: with fewer, starting a thread takes longer."""


class BlockShape(NamedTuple):
    """A weight ``[N, K]`` in quantised blocks."""

    kind: str
    """One of `blocks.KINDS`."""
    outputs: int
    inputs: int

    @property
    def number(self) -> int:
        """The number of its kind among those of blocks."""
        return BLOCK_KINDS.index(self.kind)


class Weight(NamedTuple):
    """The tensors of a linear layer with N outputs and K inputs.

    matrix: contiguous, of one of `KINDS`, ``[N, K]`` or in panels ``[N / panel, K, panel]``
    (`laid_out`). scale: float32 ``[N]``, for integers. bias: float32 ``[N]``.
    """

    matrix: Tensor
    scale: Tensor | None
    bias: Tensor | None
    blocks: BlockShape | None = None
    """What a weight in blocks is; its ``matrix`` is what `Native.lay_out_blocks` returns."""

    @property
    def outputs(self) -> int:
        if self.blocks is not None:
            return self.blocks.outputs
        matrix = self.matrix
        return matrix.shape[0] if matrix.dim() == 2 else matrix.shape[0] * matrix.shape[2]

    @property
    def inputs(self) -> int:
        return self.matrix.shape[1] if self.blocks is None else self.blocks.inputs

    @property
    def kind(self) -> int:
        """The number of its kind in `linear.h`."""
        if self.blocks is not None:
            return FIRST_BLOCK_KIND + self.blocks.number
        return KINDS[self.matrix.dtype]

    def some(self, first: int, outputs: int) -> Weight:
        """Returns some outputs in a row, as a layer of the same weights. ``first`` begins a panel
        where the weight is held in these."""
        matrix, scale, bias, blocks = self
        here = slice(first, first + outputs)
        if blocks is not None:
            kind, whole, inputs = blocks
            panels = matrix.view(-(-whole // BLOCK_PANEL), -1)
            matrix = panels[first // BLOCK_PANEL : -(-here.stop // BLOCK_PANEL)].flatten()
            blocks = BlockShape(kind, outputs, inputs)
        elif matrix.dim() == 3:
            panel = matrix.shape[2]
            matrix = matrix[first // panel : here.stop // panel]
        else:
            matrix = matrix[here]
        scale, bias = (None if each is None else each[here] for each in (scale, bias))
        return Weight(matrix, scale, bias, blocks)

    @property
    def panel(self) -> int:
        """Outputs that are held together."""
        if self.blocks is not None:
            return BLOCK_PANEL
        return self.matrix.shape[2] if self.matrix.dim() == 3 else 1


def laid_out(matrix: Tensor, panel: int) -> Tensor:
    """Returns a copy of a weight ``[N, K]`` in panels, ``[N / panel, K, panel]``.

    A panel holds the weights of ``panel`` outputs, input after input. A product computes these
    outputs together, and so reads memory in order.
    """
    outputs, inputs = matrix.shape
    return matrix.view(outputs // panel, panel, inputs).transpose(1, 2).contiguous()


def in_rows(panels: Tensor) -> Tensor:
    """Returns a copy of a weight in panels ``[N / panel, K, panel]`` as plain rows ``[N, K]``."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])


class LinearStruct(ctypes.Structure):
    """`Linear` of `linear.h`, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("in_panels", ctypes.c_int64),
    )


def linear_struct(weight: Weight) -> LinearStruct:
    """Returns a linear layer as the library reads it. Valid as long as the tensors live."""
    tensors = weight.matrix, weight.scale, weight.bias
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return LinearStruct(*pointers, weight.outputs, weight.kind, int(weight.matrix.dim() == 3))


def first_outputs(of: LinearStruct, outputs: int) -> LinearStruct:
    """Returns the first ``outputs`` outputs of a layer or more, as a layer of the same weights."""
    cut = LinearStruct.from_buffer_copy(of)
    cut.outputs = min(-(-outputs // LINE) * LINE, of.outputs)  # whole panels
    return cut


class Prepared:
    """Linear layers of the same inputs, as the library reads them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)  # alive as long as somebody may read them
        self.structs = (LinearStruct * len(weights))(*map(linear_struct, weights))
        self.outputs = [weight.outputs for weight in weights]
        self.inputs = weights[0].inputs
        self.size = self.inputs * sum(self.outputs)
        self.in_blocks = any(weight.blocks is not None for weight in weights)


class Ending(NamedTuple):
    """What a pass computes after its last layer."""

    heads: ctypes.Array[LinearStruct] | None
    """Output matrices, each of a part of the vocabulary; None: no logits are wanted."""
    head_count: int
    """How many these are."""
    logits: int | None
    """A pointer to where the logits ``[A, keep, V]`` go, one matrix's after another's."""
    keep: int
    scaling: LogitScaling = LogitScaling()


class StatesLeft(NamedTuple):
    """Where a pass writes what its layers leave."""

    first: int | None
    """A pointer to that of the first layer; None: it is not wanted."""
    stride: int
    """How many floats further the next layer's is."""


NO_LOGITS, NO_STATES = Ending(None, 0, None, 0), StatesLeft(None, 0)


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
        """Outputs whose weights make one panel (`laid_out`)."""
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

    def products(self, x: Tensor, weights: Prepared) -> Tensor:
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
        ending: Ending,
        states: StatesLeft,
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
