"""Runs the tests that depend on the processor as on weaker processors.

    python -m tests.lowered [--all] [-n N] [pytest's own options]

N levels at a time, each in one process. With ``--all`` as on each level below this one's. Without
it as on the strongest and the weakest of them: every width of vectors and both ranges of int8
weights are among these two, and of the products of blocks the ones that a level in the middle has
are tested by ``--all`` alone.

What a level lacks is left out by our kernels (``OUTPACE_CPU_LEVEL``) and, as far as their variables
reach, by torch, oneDNN and MKL.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outpace.targets.cpu.library.processor import LEVEL, levels_below, this_processor
from outpace.targets.cpu.native import native

KINDS = "tests/targets/gguf/test_kinds.py"
TESTS = (
    "tests/cpu/test_blocks.py",
    "tests/cpu/test_copies.py",
    "tests/cpu/test_experts.py",
    "tests/cpu/test_latent.py",
    "tests/cpu/test_linear.py",
    "tests/cpu/test_native.py",
    "tests/cpu/test_native_heads.py",
    "tests/cpu/test_native_states.py",
    "tests/cpu/test_quantize.py",
    "tests/draft/test_rounding.py",
    "tests/hf/test_speculative.py::test_the_drafters_own_options_reach_it",
    f"{KINDS}::test_blocks_of_both_sorts_share_a_file",
    f"{KINDS}::test_it_says_in_which_blocks_the_weights_are",
    f"{KINDS}::test_a_noisy_copy_is_off",
    f"{KINDS}::test_blocks_are_multiplied_in_models_that_are_wholly_our_own",
)
"""Those that compute with our own code. What is computed in float64 is left to torch."""

FOR_ALL = (
    "tests/cpu/test_blocks.py::test_processors_agree",
    "tests/cpu/test_copies.py::test_another_process_reads_pickled_models",
    "tests/cpu/test_latent.py::test_products_the_other_way_round",
    "tests/draft/test_rounding.py::test_each_rounded_head_changes_no_text",
)
"""Those that are left to ``--all``: the suite itself compares this level with all others; copies in
one process and heads of one kind are tried."""

OTHERS = {
    "x86-64-v3": ("AVX2", "avx2"),
    "x86-64-v3-vnni": ("AVX2_VNNI", "avx2"),
    "x86-64-v4": ("AVX512_CORE", "avx512"),
    "x86-64-v4-vnni": ("AVX512_CORE_VNNI", "avx512"),
}
"""For each level, what oneDNN and torch call it."""


COMPILES = "from outpace.targets.cpu.native import native; raise SystemExit(native() is None)"


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("-n", type=int, default=1)
    asked, options = parser.parse_known_args()
    levels = levels_below(this_processor())
    if not asked.all:
        options += [word for test in FOR_ALL for word in ("--deselect", test)]
        levels = list(dict.fromkeys([*levels[:1], *levels[-1:]]))
    with ThreadPoolExecutor(asked.n) as pool:
        done = list(pool.map(partial(run, options), levels))
    return next((code for code in done if code), 0)


def run(options: list[str], level: str) -> int:
    """Returns pytest's exit code; prints what it says when it has ended."""
    onednn, torchs = OTHERS[level]
    lowered = {
        LEVEL: level,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": torchs,
        "MKL_ENABLE_INSTRUCTIONS": "AVX2" if torchs == "avx2" else "AVX512",
    }
    environment = {**os.environ, **lowered}
    compiled = subprocess.run([sys.executable, "-c", COMPILES], env=environment)
    if compiled.returncode and native() is not None:
        print(f"as on {level}: our code is not compiled, and all tests of it would be skipped")
        return 1
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *options, *TESTS]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, **pipe)
    print(f"as on {level}:\n{done.stdout}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
