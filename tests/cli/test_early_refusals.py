"""Flags that are wrong whatever the model is: refused before torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outpace.arguments import DTYPES
from outpace.targets.hf.loading.placing import DTYPES as KNOWN
from processes import START_SECONDS

PROGRAM = """
import sys
from outpace.cli.main import run
try:
    run()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate a --num-beams 0", "--num-beams must be at least 1, not 0"),
        ("generate a -k 100000", "-k must be at most 256, not 100000"),
        ("generate a --dtype float8", "unknown --dtype 'float8': choose from auto, float32"),
        ("generate a --top-p 0", "--top-p must be a number in (0, 1], not 0.0"),
        ("generate a --num-beams 2 --early-stopping maybe", "True, False or 'never', not 'maybe'"),
        ("serve --max-num-seqs 0", "--max-num-seqs must be at least 1, not 0"),
        ("bench run --repeats 0", "--repeats"),
    ],
)
def test_a_flag_is_refused_without_torch(words: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_names_of_dtypes_are_those_that_are_loaded() -> None:
    assert set(DTYPES) == set(KNOWN)
