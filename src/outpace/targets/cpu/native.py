"""Our own code for passes over a few tokens, compiled where it is used (`native.cpp`).

It is built once with the C++ compiler that is there and kept in the user's cache folder. Where
there is no compiler, or not one that understands the source, there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    "-ffp-contract=off",  # else the bits of a result depend on how a loop was unrolled
)
PATIENCE = 120
"""Seconds that a compiler may take; it takes six."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}
"""Types of weights, as the source numbers them."""

WORTH_A_THREAD = 1 << 15
"""Weights from which on a second thread pays."""


class Weight(NamedTuple):
    """What makes a linear layer: ``matrix`` ``[N, K]``, or `laid_out`, contiguous, of one of
    `KINDS`; ``scale`` and ``bias``: float32 ``[N]`` or nothing."""

    matrix: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        matrix = self.matrix
        return matrix.shape[0] if matrix.dim() == 2 else matrix.shape[0] * matrix.shape[2]

    @property
    def inputs(self) -> int:
        return self.matrix.shape[1]


def laid_out(matrix: Tensor, panel: int) -> Tensor:
    """Returns a weight ``[N, K]`` as ``[N / panel, K, panel]``, a copy: what the source reads of it
    for some inputs then lies together."""
    outputs, inputs = matrix.shape
    return matrix.view(outputs // panel, panel, inputs).transpose(1, 2).contiguous()


def in_rows(panels: Tensor) -> Tensor:
    """Returns the plain weight ``[N, K]``, a copy."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])


class Part(ctypes.Structure):
    """A linear layer, as the source is told of it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("laid_out", ctypes.c_int64),
    )


def part(weight: Weight) -> Part:
    """Returns what the source is told of a linear layer; good while its tensors live."""
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in weight)
    matrix = weight.matrix
    return Part(*pointers, weight.outputs, KINDS[matrix.dtype], int(matrix.dim() == 3))


class Prepared:
    """Linear layers of the same inputs, as the library wants them told."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)  # alive as long as somebody may read them
        self.pointers = [weight.matrix.data_ptr() for weight in weights]
        self.parts = (Part * len(weights))(*map(part, weights))
        self.outputs = [weight.outputs for weight in weights]
        self.inputs = weights[0].inputs
        self.size = self.inputs * sum(self.outputs)


class Native:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` where the file is no such library."""
        library = ctypes.CDLL(str(path))
        pointer, number, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        threads = (pointer, pointer, short)
        self._kinds: int = library.outpace_kinds()
        self.lanes: int = library.outpace_lanes()
        """Floats that are computed with at once."""
        library.outpace_panel.restype = number
        self.panel: int = library.outpace_panel()
        """Outputs that are laid out together."""
        self._products = library.outpace_products
        self._products.argtypes = (pointer, pointer, number, number, pointer, number, *threads)
        self._scratch = library.outpace_scratch
        self._scratch.argtypes, self._scratch.restype = (pointer, short), number
        self._layers = library.outpace_layers
        self._layers.argtypes = (pointer, number, *(pointer,) * 7, number, *threads)
        self._parallel = _torchs_threads()

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether weights may have this type."""
        return KINDS.get(dtype, self._kinds) < self._kinds

    def products(self, x: Tensor, weights: Prepared) -> Tensor:
        """Returns x times each weight, flat: ``[..., N]`` of the first, then of the second, ...

        x: float32 ``[..., K]``, contiguous.
        """
        rows = x.numel() // weights.inputs
        y = x.new_empty(rows * sum(weights.outputs))
        parts, threads = weights.parts, self._threads(weights.size)
        inputs, count = weights.inputs, len(weights.outputs)
        self._products(x.data_ptr(), y.data_ptr(), rows, inputs, parts, count, *threads)
        return y

    def scratch(self, layer: Any, threads: int) -> int:
        """Returns the floats per token that a layer needs to work in, on so many threads."""
        return int(self._scratch(ctypes.byref(layer), threads))

    def layers(
        self,
        layers: Any,
        plan: Any,
        x: Tensor,
        keys: Any,
        values: Any,
        norm: int | None,
        threads: int,
        ending: tuple[Any, int | None, int] = (None, None, 0),
    ) -> None:
        """Replaces x by what layers make of it, or writes the logits.

        layers, plan: structures as the source knows them; x: float32, contiguous; keys, values:
        arrays of pointers to each layer's cache ``[heads, slots, dim]``; norm: pointer to the
        weight of what comes after the last layer; ending: the head, a pointer to its logits
        ``[A, keep, V]``, keep.
        """
        told = ctypes.byref(plan), x.data_ptr(), keys, values, norm, *ending
        self._layers(layers, len(layers), *told, *self._parallel, threads)

    def _threads(self, weights: int) -> tuple[Any, Any, int]:
        return *self._parallel, min(torch.get_num_threads(), 1 + weights // WORTH_A_THREAD)


def _torchs_threads() -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None]:
    """Returns the entry to the threads that torch computes with, if it is OpenMP's usual one, and
    to what tells how many there are."""
    torchs = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(torchs))
        entries = library.GOMP_parallel, library.omp_get_num_threads
    except (OSError, AttributeError):
        return None, None
    return ctypes.cast(entries[0], ctypes.c_void_p), ctypes.cast(entries[1], ctypes.c_void_p)


@cache
def native() -> Native | None:
    """Returns the library, built if this machine has none yet; None where it cannot be built."""
    compiler = _compiler()
    if compiler is None:
        return None
    command = [compiler, *FLAGS, f"-m{_tuning()}=native", str(SOURCE)]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=PATIENCE)
        name = _name(version.stdout, " ".join(command[:-1]).encode(), SOURCE.read_bytes())
        return _built(command, _folder(), name)
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> str | None:
    asked = os.environ.get("CXX")
    names = [asked] if asked else COMPILERS
    return next(filter(None, map(shutil.which, names)), None)


def _tuning() -> str:
    return "arch" if platform.machine() in ("x86_64", "AMD64", "i686") else "cpu"


def _name(*determining: bytes) -> str:
    digest = hashlib.sha256(_processor())
    for part in determining:
        digest.update(part)
    return f"native-{digest.hexdigest()[:24]}.so"


def _processor() -> bytes:
    """Returns what tells apart processors that do not run each other's code: homes are shared."""
    known = Path("/proc/cpuinfo")
    lines = known.read_bytes().splitlines() if known.is_file() else []
    told = [line for line in lines if line.startswith((b"flags", b"Features", b"model name"))]
    return b"".join([platform.processor().encode(), *told[:2]])


def _folder() -> Path:
    """Returns where programs keep what they can make again."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path.home() / "Library" / "Caches" if sys.platform == "darwin" else home) / "outpace"


def _built(command: Sequence[str], folder: Path, name: str) -> Native:
    kept = folder / name
    if kept.is_file():
        try:
            return Native(kept)
        except OSError:
            pass  # cut short, say: it is made again
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = _compiled(command, folder)
    except OSError:  # no place to keep it: for this process only, then
        with tempfile.TemporaryDirectory() as passing:
            return Native(_compiled(command, Path(passing)))
    os.replace(made, kept)  # at once, so that no other process loads half of it
    return Native(kept)


def _compiled(command: Sequence[str], folder: Path) -> Path:
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        subprocess.run([*command, "-o", made], check=True, capture_output=True, timeout=PATIENCE)
    except BaseException:
        os.unlink(made)
        raise
    return Path(made)
