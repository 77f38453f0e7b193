"""This machine's processor and its instruction set, as far as the choice of kernels depends on it.

The environment variable ``OUTPACE_CPU_LEVEL`` lowers it to one of `prebuilt.LEVELS`: kernels are
then compiled and chosen as on a weaker processor, which is how one machine tests what another one
will run. torch and oneDNN have variables of their own for the same (``ATEN_CPU_CAPABILITY``,
``ONEDNN_MAX_CPU_ISA``).
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.errors import ConfigError, did_you_mean
from outpace.targets.cpu.prebuilt import LEVELS

LEVEL = "OUTPACE_CPU_LEVEL"
"""The environment variable that lowers the processor."""

ABOVE_V3 = ("avx512", "avx_vnni", "avx10", "amx")
"""How the features begin that only some levels have."""

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
    level: str | None = None
    """The level to which it is lowered, None if it is not."""

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has instructions for products of bfloat16 numbers."""
        return bool(self.flags & BFLOAT16)

    @property
    def instructions(self) -> str:
        """The strongest instruction set that it has, for people to read."""
        found = (name for flag, name in INSTRUCTION_SETS if flag in self.flags)
        name = next(found, platform.machine())
        return name if self.level is None else f"{name}, lowered by {LEVEL}={self.level}"

    @property
    def identity(self) -> bytes:
        """Bytes that differ between processors that may not run each other's machine code."""
        return repr((platform.machine(), self.vendor, self.model, sorted(self.flags))).encode()

    def lowered(self, level: str) -> Processor:
        """Returns this processor without what a level does not have.

        Raises ``ConfigError`` for a level that is unknown, or higher than the processor's own.
        """
        if level not in LEVELS:
            raise ConfigError(
                f"{LEVEL} is {level!r}, which is no level{did_you_mean(level, LEVELS)}; there are "
                f"{', '.join(LEVELS)}."
            )
        needed = LEVELS[level][1]
        missing = sorted(needed - self.flags)
        if missing:
            raise ConfigError(
                f"{LEVEL} is {level!r}, and this processor lacks {', '.join(missing)} for it: the "
                "variable only lowers. Name a lower level, or unset it."
            )
        kept = {flag for flag in self.flags if flag in needed or not flag.startswith(ABOVE_V3)}
        return replace(self, flags=frozenset(kept), level=level)


def this_processor() -> Processor:
    """Returns the processor that this process runs on, lowered where the environment says so."""
    found = _described()
    level = os.environ.get(LEVEL)
    return found.lowered(level) if level else found


def levels_below(processor: Processor) -> list[str]:
    """Returns the levels to which a processor can be lowered, the strongest first. The first one
    that a processor has is nearly its own and left out."""
    return [level for level, (_, needed) in LEVELS.items() if needed <= processor.flags][1:]


def _described() -> Processor:
    text = CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    known = {name.strip().lower(): value.strip() for name, _, value in lines}
    return Processor(
        vendor=known.get("vendor_id", ""),
        model=known.get("model name", platform.processor()),
        flags=frozenset(known.get("flags", known.get("features", "")).split()),
    )
