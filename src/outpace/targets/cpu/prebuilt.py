"""Kernels that come compiled with a wheel: how they are compiled and named, and which one fits.

Nothing but the standard library is imported here, because building a wheel runs this file by
itself (`hatch_build.py`).
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "csrc" / "native.cpp"

FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    "-ffp-contract=off",  # else the bits of a result depend on how a loop was unrolled
)
"""What every compiler is given, on the user's machine too."""

_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

_VNNI = _V4 | {"avx512_vnni"}
_FOR_VNNI = ("-march=x86-64-v4", "-mavx512vnni")

Levels = Mapping[str, tuple[tuple[str, ...], frozenset[str]]]

LEVELS: Levels = {
    "x86-64-v4-amx": ((*_FOR_VNNI, "-mamx-tile", "-mamx-int8"), _VNNI | {"amx_tile", "amx_int8"}),
    "x86-64-v4-vnni": (_FOR_VNNI, _VNNI),
    "x86-64-v4": (("-march=x86-64-v4",), _V4),
    "x86-64-v3-vnni": (("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    "x86-64-v3": (("-march=x86-64-v3",), _V3),
}
"""The kinds of x86-64 that a wheel has kernels for, the strongest first: what a compiler is given,
and the features that a processor of this kind has, by the names that Linux gives them."""


_DOTS = frozenset({"asimd", "asimddp"})

_ARM: Levels = {
    "armv8.2-dotprod": (("-march=armv8.2-a+dotprod",), _DOTS),
    "armv8": (("-march=armv8-a",), frozenset({"asimd"})),
}
_APPLE: Levels = {"apple-m1": (("-mcpu=apple-m1",), frozenset())}  # all that there are have it


def levels_of(system: str, machine: str) -> Levels:
    """Returns the levels that a wheel for a kind of machine has kernels for. system, machine: as
    ``sys.platform`` and ``platform.machine()`` name them."""
    kinds = {("linux", "x86_64"): LEVELS, ("linux", "aarch64"): _ARM, ("darwin", "arm64"): _APPLE}
    return kinds.get((system, machine), {})


def sources() -> list[Path]:
    """Returns the files that the kernels are compiled from."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def file_name(level: str) -> str:
    """Returns the name of the library of a level. It changes with the sources, so that a library
    of other sources is never loaded."""
    texts = b"\0".join(source.name.encode() + b"\0" + source.read_bytes() for source in sources())
    return f"native-{level}-{hashlib.sha256(texts).hexdigest()[:24]}.so"


def find(
    features: Collection[str], folder: Path = FOLDER, levels: Levels | None = None
) -> Path | None:
    """Returns the library of the strongest level that a processor with these features has, or None
    where this installation has none for it. levels: unset, those of this machine."""
    known = levels_of(sys.platform, platform.machine()) if levels is None else levels
    for level, (_, needed) in known.items():
        if needed <= set(features) and (path := folder / file_name(level)).is_file():
            return path
    return None
