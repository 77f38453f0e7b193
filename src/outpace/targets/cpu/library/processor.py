"""What this machine's processor is and can do, as far as the choice of kernels depends on it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor. Other systems have no such file."""

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors with instructions that multiply bfloat16 numbers (the last one is ARM's)."""

INSTRUCTION_SETS = (
    ("amx_tile", "AMX"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("asimd", "NEON"),
)
"""Flags that name an instruction set, the strongest first."""


@dataclass(frozen=True)
class Processor:
    """One kind of processor."""

    vendor: str
    """As the processor names it ("GenuineIntel"), or "" where the system does not say."""
    model: str
    """The name of the model, or what `platform` knows instead."""
    flags: frozenset[str]
    """Its features, by the names that Linux gives them."""

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has instructions for products of bfloat16 numbers."""
        return bool(self.flags & BFLOAT16)

    @property
    def instructions(self) -> str:
        """The strongest instruction set that it has, for people to read."""
        found = (name for flag, name in INSTRUCTION_SETS if flag in self.flags)
        return next(found, platform.machine())

    @property
    def identity(self) -> bytes:
        """Bytes that differ between processors that may not run each other's machine code."""
        return repr((platform.machine(), self.vendor, self.model, sorted(self.flags))).encode()


def this_processor() -> Processor:
    """Returns the processor that this process runs on."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    known = {name.strip().lower(): value.strip() for name, _, value in lines}
    return Processor(
        vendor=known.get("vendor_id", ""),
        model=known.get("model name", platform.processor()),
        flags=frozenset(known.get("flags", known.get("features", "")).split()),
    )
