"""The public face: names that users may rely on."""

import subprocess
import sys

import outpace
from processes import START_SECONDS


def test_public_names() -> None:
    assert sorted(outpace.__all__) == [
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "Chunk",
        "CompletionOutput",
        "LLM",
        "RequestOutput",
        "SamplingParams",
        "SpeculativeConfig",
        "__version__",
    ]


def test_every_public_name_is_there() -> None:
    for name in outpace.__all__:
        assert getattr(outpace, name) is not None


def test_importing_outpace_does_not_import_torch() -> None:
    code = "import sys, outpace; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=START_SECONDS)
    assert done.returncode == 0
