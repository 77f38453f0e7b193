"""Runs the tests that depend on the processor as on weaker processors.

    python -m tests.lowered [--all] [pytest's own options]

With ``--all`` once for each level below this one's. Without it as on the strongest and the weakest
of them: every width of vectors and both ranges of int8 weights are among these two, and of the
products of blocks the ones that a level in the middle has are tested by ``--all`` alone. So is that
each level agrees with each other one: the suite itself compares this one's with all of them.

What a level lacks is left out by our kernels (``OUTPACE_CPU_LEVEL``) and, as far as their variables
reach, by torch, oneDNN and MKL.
"""

from __future__ import annotations

import os
import subprocess
import sys

from outpace.targets.cpu.library.processor import LEVEL, levels_below, this_processor

FILES = (
    "tests/cpu/test_blocks.py",
    "tests/cpu/test_copies.py",
    "tests/cpu/test_experts.py",
    "tests/cpu/test_linear.py",
    "tests/cpu/test_native.py",
    "tests/cpu/test_quantize.py",
    "tests/draft/test_rounding.py",
    "tests/hf/test_speculative.py",
    "tests/targets/gguf/test_kinds.py",
)

OTHERS = {
    "x86-64-v3": ("AVX2", "avx2"),
    "x86-64-v3-vnni": ("AVX2_VNNI", "avx2"),
    "x86-64-v4": ("AVX512_CORE", "avx512"),
    "x86-64-v4-vnni": ("AVX512_CORE_VNNI", "avx512"),
}
"""For each level, what oneDNN and torch call it."""


def main() -> int:
    options = sys.argv[1:]
    levels = levels_below(this_processor())
    if "--all" in options:
        options.remove("--all")
    else:
        options += ["--deselect", "tests/cpu/test_blocks.py::test_processors_agree"]
        levels = list(dict.fromkeys([*levels[:1], *levels[-1:]]))
    for level in levels:
        onednn, torchs = OTHERS[level]
        lowered = {
            LEVEL: level,
            "ONEDNN_MAX_CPU_ISA": onednn,
            "ATEN_CPU_CAPABILITY": torchs,
            "MKL_ENABLE_INSTRUCTIONS": "AVX2" if torchs == "avx2" else "AVX512",
        }
        print(f"as on {level}:", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options, *FILES]
        code = subprocess.run(command, env={**os.environ, **lowered}).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
