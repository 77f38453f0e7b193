"""What loading a GGUF file takes: blocks are dequantised for nobody who does not multiply them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.weights.blocks import Blocks
from outpace.targets.hf.gguf.file import read_model
from outpace.targets.hf.gguf.load import load_gguf
from outpace.targets.hf.loading.load import load
from representatives import representatives
from targets.gguf.files import tiny, write
from targets.gguf.tiny_families import FAMILIES

OURS = pytest.mark.skipif(native() is None, reason="needs a C++ compiler")


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each matrix, or part of one, that is dequantised from blocks."""
    sizes: list[int] = []

    def counting(function: Any) -> Any:
        def dequantize(*given: Any) -> Any:
            matrix = function(*given)
            sizes.append(matrix.nbytes)
            return matrix

        return dequantize

    monkeypatch.setattr(Blocks, "dense", counting(Blocks.dense))
    monkeypatch.setattr(Native, "dequantize_blocks", counting(Native.dequantize_blocks))
    return sizes


@pytest.mark.parametrize("arch", FAMILIES)
def test_building_a_model_dequantizes_none_of_its_blocks(
    arch: str, tmp_path: Path, dequantized: list[int]
) -> None:
    path = write(tmp_path / "model.gguf", arch, tiny(arch), "Q8_0")
    dequantized.clear()
    device = torch.device("cpu")
    model, _ = load_gguf(read_model(path), None, torch.float32, device, lambda *_: None)
    kept = [name for name, module in model.named_modules() if hasattr(module, "blocks")]
    assert kept
    assert sum(dequantized) == 0


@OURS
def test_loading_target_and_draft_model_dequantizes_no_block(
    tmp_path: Path, dequantized: list[int]
) -> None:
    target = write(tmp_path / "target.gguf", "qwen2", tiny("qwen2"), "Q8_0")
    drafter = write(tmp_path / "drafter.gguf", "llama", tiny("llama"), "Q8_0")
    dequantized.clear()
    llm = LLM(target, speculative_config={"model": str(drafter), "num_speculative_tokens": 2})
    assert llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4))
    assert sum(dequantized) == 0


@OURS
def test_a_family_that_is_dequantized_is_dequantized_once(
    tmp_path: Path, dequantized: list[int]
) -> None:
    path = write(tmp_path / "model.gguf", "mistral3", tiny("mistral3"), "Q8_0")
    dequantized.clear()
    model: Any = load(path).model
    inner = [m for name, m in model.named_modules() if name.endswith("_proj")]
    assert inner
    matrices = {m.in_features * m.out_features for m in (*inner, model.lm_head)}
    assert max(dequantized) == 4 * max(matrices)
    linear = [*inner, model.lm_head]
    assert sum(dequantized) == sum(4 * m.in_features * m.out_features for m in linear)


PEAK = """
import json, sys
from outpace import LLM, SamplingParams

def kept(name: str) -> int:
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def write(path: str, options: dict) -> None:
    LLM(path, **options).generate([[5, 6]], SamplingParams(temperature=0, max_tokens=8))

small, large = json.loads(sys.argv[1])
write(*small)
before = kept("VmRSS")
write(*large)
print(kept("VmHWM") - before)
"""
"""Prints the bytes that a process takes at its peak to load a model and to write with it; another
one pays before for what is imported."""

LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6}


def raised(small: Path, large: Path, **options: Any) -> int:
    """Returns the bytes that `PEAK` prints."""
    given = json.dumps([[str(path), options] for path in (small, large)])
    run = [sys.executable, "-c", PEAK, given]
    return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


@OURS
@PROC
@pytest.mark.parametrize(
    ("arch", "changes", "times"),
    representatives(
        [
            ("qwen2", LARGE, 1.7),
            ("llama", LARGE, 1.7),  # the file has the rows of queries and keys in another order
            ("gemma3", {"hidden_size": 512, "vocab_size": 120_000}, 1.1),  # mostly the embedding
        ],
        lambda arch, *_: arch != "qwen2",
    ),
)
def test_a_file_is_in_memory_once(
    arch: str, changes: dict[str, Any], times: float, tmp_path: Path
) -> None:
    """What products read, and some for the rest (0.9 to 1.4 times the file). Pages of the file that
    stay would take it twice, and all matrices in another order before the first one is laid out,
    almost so (1.3 to 2.4 times)."""
    small = write(tmp_path / "small.gguf", arch, tiny(arch), "Q8_0")
    large = write(tmp_path / "large.gguf", arch, tiny(arch, **changes), "Q8_0", tokens=False)
    size = large.stat().st_size
    assert size > 50e6
    assert raised(small, large) < times * size


def test_pages_that_are_released_are_read_again(tmp_path: Path) -> None:
    """Those that others lie in too stay: there, numbers may have been written to."""
    path = write(tmp_path / "m.gguf", "qwen2", tiny("qwen2"), "Q8_0", alignment=8)
    tensors = [*read_model(path).tensors.values()]
    before = [tensor.raw.clone() for tensor in tensors]
    for tensor in tensors[::2]:
        tensor.raw.fill_(7)
    for tensor in tensors[1::2]:
        tensor.release()
    for place, (tensor, was) in enumerate(zip(tensors, before, strict=True)):
        assert torch.equal(tensor.raw, was if place % 2 else torch.full_like(was, 7))
